"""Why does the queue wait? In words, for traces, the single-step tool and people."""

from __future__ import annotations

from scheduler_proc.admit import prefix_key
from scheduler_proc.request import Req
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.state import Pool


def why_waiting(scheduler: Scheduler, req: Req) -> str:
    """What keeps a waiting request from running, as of the last step. Costs about 20 us, changes nothing."""
    state = scheduler.state
    pool = state.pool
    if pool is None:
        return "worker: none is ready"
    if state.suspects:
        return f"crash: {len(state.suspects)} requests that ran when the worker died run alone first"
    if pool.table.num_free == 0 or pool.table.num_taken >= pool.max_running:
        return f"slots: {pool.table.num_taken} requests hold the {pool.max_running} there are"
    stuck = scheduler.batcher.stuck
    if stuck is req:
        return _why_full(scheduler, pool, req)
    if other := _computes_its_prefix(scheduler, pool, req):
        return f"prefix: {other.rid} is computing what it shares with it"
    if stuck is not None:
        return f"order: {stuck.rid} is before it and does not fit"
    if len(pool.in_flight) >= scheduler.batcher.depth and not any(pool.in_flight[-1].chunks):
        return "turn: enough batches are in flight; the next is decided when one returns"
    if state.pacing.holding:
        return "turn: the next batch is decided shortly before the running one ends"
    return "budget: the prefill tokens of the step went to others, or pages had just run out"


def _why_full(scheduler: Scheduler, pool: Pool, req: Req) -> str:
    needed = pool.pages_for(len(req.ids))
    reserve = scheduler.admission.reserved_tokens(pool) + scheduler.admission.reserve_for(req)
    return (
        f"pages: {needed} needed, {pool.allocator.num_free} free and {pool.tree.num_evictable} evictable,"
        f" {int(reserve) // pool.page_size} reserved for what {pool.table.num_taken} running will still generate"
    )


def _computes_its_prefix(scheduler: Scheduler, pool: Pool, req: Req) -> Req | None:
    if not req.uses_cache or not pool.tree.enabled:
        return None
    data = req.data()
    match = pool.tree.match(req.spec.cache_salt, data, (len(req.ids) - 1) // pool.page_size)
    key = prefix_key(pool, req, data, match.num_pages)
    return None if key is None else scheduler.state.pending_prefixes.get(key)


def held(scheduler: Scheduler) -> str:
    """The request at the head of the queue and what it waits for; empty when nothing waits."""
    queue = scheduler.state.queue
    if not queue:
        return ""
    head = scheduler.batcher.stuck or next(iter(queue))
    return f"{head.rid}: {why_waiting(scheduler, head)}"

"""Taking a waiting request in: its cached prefix, its pages, its slot, its prefill chunks."""

from __future__ import annotations

from enum import Enum

import numpy as np

from common.messages import BeginRequest, Finish, pack_ints
from scheduler_proc.admission import Admission
from scheduler_proc.cost import Budget
from scheduler_proc.draft import Draft
from scheduler_proc.life import Life
from scheduler_proc.radix import Match
from scheduler_proc.request import Req, Status
from scheduler_proc.state import Pool, State

MIN_SHARED_PAGES = 2
"""A request waits for another's prefix only if it saves at least this many pages of prefill."""


class Verdict(Enum):
    """What became of a waiting request."""

    ADMITTED = 0
    WAITS = 1
    """Another request computes a prefix it needs (or it just ended); the next in the queue may go."""
    FULL = 2
    """No slot or not enough pages; nobody behind it may overtake it."""


class Admitter:
    """Moves requests from WAITING to RUNNING and schedules their prefill."""

    def __init__(self, state: State, life: Life, admission: Admission) -> None:
        self.state = state
        self.life = life
        self.admission = admission

    @property
    def has_slot(self) -> bool:
        """One more request may run."""
        pool = self.state.need_pool()
        return pool.table.num_free > 0 and pool.table.num_taken < pool.max_running

    def admit(self, draft: Draft, req: Req, now: float, *, alone: bool = False) -> Verdict:
        """Give ``req`` a slot and pages for all its known ids.

        ``alone``: only the pages must be there; no estimate of growth, no waiting for others.
        """
        pool = draft.pool
        if pool.table.num_free == 0 or not (alone or self.has_slot):
            return Verdict.FULL
        num_pages = pool.pages_for(len(req.ids))
        if num_pages > pool.allocator.num_pages:
            self._outgrew(req)
            return Verdict.WAITS
        match = self._match(pool, req)
        if not alone:
            if self._prefix_is_coming(pool, req, match):
                return Verdict.WAITS
            if not self._fits(pool, req, match, num_pages):
                return Verdict.FULL
        node, cached = pool.tree.lock(match)
        pool.allocator.retain(cached)
        own = pool.allocator.alloc(num_pages - len(cached)) if pool.ensure(num_pages - len(cached)) else None
        if own is None:
            pool.tree.unlock(node)
            pool.allocator.release(cached)
            return Verdict.FULL
        self.state.queue.remove(req)
        req.become(Status.RUNNING)
        req.node, req.tree_len = node, len(cached) * pool.page_size
        req.pages = cached.tolist() + own.tolist()
        self._begin(draft, req, self._copy_partial_page(draft, req), now)
        return Verdict.ADMITTED

    def _match(self, pool: Pool, req: Req) -> Match:
        """Longest usable cached prefix: at least the last id is computed, for its logits."""
        if not req.uses_cache:
            return Match(None, 0, 0)
        return pool.tree.match(req.spec.cache_salt, req.data(), (len(req.ids) - 1) // pool.page_size)

    def _fits(self, pool: Pool, req: Req, match: Match, num_pages: int) -> bool:
        """Its pages, its own growth and that of those who run fit into what is free or can be evicted."""
        if not any(pool.table.running):
            return True
        # Matched pages that nobody locks count as evictable, but not for this request: it locks them.
        available = (pool.num_available - num_pages) * pool.page_size
        held = match.num_pages * pool.page_size if match.node is not None and match.node.locks else 0
        reserve = self.admission.reserved_tokens(pool) + self.admission.reserve_for(req)
        return available + held >= reserve

    def _begin(self, draft: Draft, req: Req, computed_len: int, now: float) -> None:
        """Take a slot, announce the request to the worker and, the first time, to the detokenizer."""
        pool, state = draft.pool, self.state
        data = req.data()
        slot = pool.table.take(req, pool.page_size)
        pool.table.computed[slot] = computed_len
        req.scheduled_len = computed_len
        spec = req.spec
        draft.begins.append(
            BeginRequest(
                slot,
                req.rid,
                data,
                req.prompt_len,
                computed_len,
                pack_ints(req.pages),
                req.worker_sampling,
                spec.eos_token_ids,
                spec.grammar,
            )
        )
        self._announce_prefix(pool, req, data)
        if req.group_key is not None:
            state.leaders.setdefault(req.group_key, req)
        if not req.accepted:
            req.cached_len = min(computed_len, req.prompt_len)
            state.begins[req.rid] = req
            if req.counted:
                state.metrics.prompt_tokens_total += req.prompt_len
                state.metrics.cached_tokens_total += req.cached_len
                state.metrics.queue_time.observe(max(now - req.queued_at, 0.0))
        state.loose[req.rid] = req

    def add_chunk(self, draft: Draft, req: Req, budget: Budget) -> None:
        """Schedule as many more ids of a prefilling request as ``budget`` has for it."""
        table = draft.pool.table
        left = table.known[req.slot] - req.scheduled_len
        start = req.scheduled_len
        n = budget.take(start, left)
        if n <= 0:
            return
        req.scheduled_len += n
        draft.prefill_context += n * start + n * (n - 1) // 2
        draft.prefill_slots.append(req.slot)
        draft.prefill_chunks.append(n)
        draft.prefill_samples.append(n == left)
        if n == left:
            table.decoding[req.slot] = True

    def _outgrew(self, req: Req) -> None:
        """Its ids alone need more pages than there are (it was preempted, or another worker had more)."""
        pool = self.state.need_pool()
        words = f"its {len(req.ids)} tokens no longer fit into the KV cache, which holds {pool.max_tokens}"
        if not req.accepted:
            req.cached_len = 0
            self.state.begins[req.rid] = req
        self.life.finish(req, Finish("length", message=words))

    # ------------------------------------------------------------------ sharing within the running set

    def _announce_prefix(self, pool: Pool, req: Req, data: bytes) -> None:
        """Let others wait for the pages this request is about to compute."""
        if not req.uses_cache or not pool.tree.enabled:
            return
        first = req.tree_len // pool.page_size
        key = prefix_key(pool, req, data, first)
        if key is not None and key not in self.state.pending_prefixes:
            self.state.pending_prefixes[key] = req
            req.pending_key = key

    def _prefix_is_coming(self, pool: Pool, req: Req, match: Match) -> bool:
        """Does a running request compute a long prefix of ``req`` that is not in the tree yet?"""
        if not req.uses_cache or not pool.tree.enabled:
            return False
        key = prefix_key(pool, req, req.data(), match.num_pages)
        other = None if key is None else self.state.pending_prefixes.get(key)
        if other is None:
            return False
        n = min(pool.table.known_len(other), len(req.ids) - 1)
        different = pool.table.ids[other.slot, :n] != np.frombuffer(req.ids, dtype=np.int32)[:n]
        shared = int(different.argmax()) if different.any() else n
        return shared // pool.page_size >= match.num_pages + MIN_SHARED_PAGES

    def _copy_partial_page(self, draft: Draft, req: Req) -> int:
        """Copy the last, partial page of the prompt from a running sample of the same group.

        Returns how many leading ids of ``req`` are computed then: all but the last of the prompt, or
        what the tree had. The source is held until the copy has been made.
        """
        pool = draft.pool
        leader = None if req.group_key is None else self.state.leaders.get(req.group_key)
        full, rest = divmod(req.prompt_len - 1, pool.page_size)
        usable = (
            leader is not None
            and rest > 0
            and len(req.ids) == req.prompt_len
            and req.uses_cache
            and pool.tree.enabled
            and req.tree_len == full * pool.page_size
            and leader.status is Status.RUNNING
            and pool.table.computed[leader.slot] >= req.prompt_len - 1
        )
        if not usable or leader is None:
            return req.tree_len
        source, target = leader.pages[full], req.pages[full]
        pool.allocator.retain([source])
        draft.copies.append((source, target))
        return req.prompt_len - 1


def prefix_key(pool: Pool, req: Req, data: bytes, num_cached: int) -> tuple[str, int, bytes] | None:
    """Name of the page after ``num_cached`` cached ones; None when ``data`` ends before it does."""
    size = 4 * pool.page_size
    page = data[num_cached * size : (num_cached + 1) * size]
    return (req.spec.cache_salt, num_cached, page) if len(page) == size else None

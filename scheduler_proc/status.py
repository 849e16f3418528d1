"""What the scheduler tells about itself: EngineStatus, server info, the invariant."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np

from common.config import HostsConfig, HttpConfig, RuntimeConfig, ServerConfig
from common.errors import InvariantError
from common.messages import EngineStatus
from scheduler_proc.request import Req, Status
from scheduler_proc.state import Pool, State


def gauges(state: State) -> dict[str, float]:
    """The state of now, under SGLang's names."""
    pool = state.pool
    out: dict[str, float] = {
        "num_queue_reqs": len(state.queue),
        "num_running_reqs": 0,
        "num_used_tokens": 0,
        "num_used_pages": 0,
        "token_usage": 0.0,
    }
    if pool is not None:
        used = pool.allocator.num_pages - pool.num_available
        out["num_running_reqs"] = pool.table.num_taken
        out["num_used_pages"] = used
        out["num_used_tokens"] = used * pool.page_size
        out["token_usage"] = used / pool.allocator.num_pages
        out["num_cached_tokens"] = pool.tree.num_pages * pool.page_size
        out["num_free_pages"] = pool.allocator.num_free
        out["num_evicted_tokens_total"] = pool.tree.num_evicted_pages * pool.page_size
    return out


def engine_status(state: State, generations: dict[str, int]) -> EngineStatus:
    """What every gateway is told."""
    pool = state.pool
    return EngineStatus(
        generations=dict(generations),
        ready=pool is not None,
        draining=state.draining,
        num_running=0 if pool is None else pool.table.num_taken,
        num_waiting=len(state.queue),
        max_queued=state.config.scheduler.max_queued_requests,
        context_len=0 if pool is None else pool.ready.context_len,
        max_total_tokens=0 if pool is None else pool.max_tokens,
        vocab_size=0 if pool is None else pool.ready.vocab_size,
        batch_invariant=pool is not None and pool.ready.batch_invariant,
        run=state.run,
        metrics=gauges(state) | state.metrics.counters(),
        histograms=state.metrics.histograms(),
    )


def shared_config(config: ServerConfig) -> dict[str, Any]:
    """What a gateway on another host takes over when it joins; JSON-able. No key goes along."""
    own = {"http": HttpConfig(tokenizers=config.http.tokenizers), "hosts": HostsConfig(), "runtime": RuntimeConfig()}
    shared = msgspec.to_builtins(msgspec.structs.replace(config, **own))
    return {"config": shared, "has_keys": bool(config.http.api_key), "has_admin_keys": bool(config.http.admin_api_key)}


def server_info(state: State, generations: dict[str, int]) -> dict[str, Any]:
    """The body of ``/get_server_info``; JSON-able, keys and other secrets left out."""
    config = msgspec.to_builtins(state.config)
    for secret in ("api_key", "admin_api_key"):
        config["http"].pop(secret, None)
    pool = state.pool
    return {
        "config": config,
        "worker": None if pool is None else msgspec.to_builtins(pool.ready),
        "generations": dict(generations),
        "ready": pool is not None,
        "draining": state.draining,
        "max_total_tokens": 0 if pool is None else pool.max_tokens,
        "metrics": gauges(state) | state.metrics.counters(),
        "histograms": state.metrics.histograms(),
    }


def check_invariants(state: State, live: list[Req] | None = None) -> None:
    """Raise InvariantError unless pages, counts, locks and slots agree with who holds what.

    The page equation: free + cached (tree) + held only by live requests == total; and a page's count is the
    number of its holders. Costs time in proportion to everything there is.
    """
    pool = state.pool
    if pool is None:
        return
    holders = np.zeros(pool.allocator.num_pages, dtype=np.int32)
    cached = np.zeros(pool.allocator.num_pages, dtype=np.bool_)
    num_pages = num_locked = 0
    for node in pool.tree.nodes():
        if cached[node.pages].any():
            raise InvariantError("a page is twice in the tree")
        cached[node.pages] = True
        holders[node.pages] += 1
        num_pages += len(node.pages)
        num_locked += len(node.pages) if node.locks else 0
        if len(node.key) != 4 * pool.page_size * len(node.pages) or not len(node.pages):
            raise InvariantError(f"node {node.number}: {len(node.key)} bytes of key for {len(node.pages)} pages")
    for req in pool.table.taken():
        if len(set(req.pages)) != len(req.pages):
            raise InvariantError(f"{req.rid} holds a page twice")
        holders[req.pages] += 1
    for flight in pool.in_flight:
        for page in flight.copied_pages:
            holders[page] += 1
    wrong = np.flatnonzero(holders != pool.allocator.refs)
    if wrong.size:
        page = int(wrong[0])
        raise InvariantError(f"page {page} has count {pool.allocator.refs[page]} and {holders[page]} holders")
    held = int(np.count_nonzero((holders > 0) & ~cached))
    if pool.allocator.num_free + int(cached.sum()) + held != pool.allocator.num_pages:
        raise InvariantError(
            f"{pool.allocator.num_free} free + {int(cached.sum())} cached + {held} held pages"
            f" are not {pool.allocator.num_pages}"
        )
    if (num_pages, num_locked) != (pool.tree.num_pages, pool.tree.num_locked):
        raise InvariantError(f"tree counts {pool.tree.num_pages} pages, {pool.tree.num_locked} locked; it has"
                             f" {num_pages}, {num_locked}")  # fmt: skip
    _check_requests(state, pool)


def _check_requests(state: State, pool: Pool) -> None:
    table = pool.table
    rows = array("i", bytes(4 * table.max_slots))
    for flight in pool.in_flight:
        for slot in flight.slots:
            rows[slot] += 1
    if rows != table.rows:
        raise InvariantError("rows in flight are miscounted")
    for req in table.taken():
        running = req.status is Status.RUNNING
        if bool(table.running[req.slot]) != running or table.capacity[req.slot] != len(req.pages) * pool.page_size:
            raise InvariantError(f"{req.rid}: the slot's columns disagree with the request ({req.status.name})")
        if req.status in (Status.LEAVING, Status.ENDING) and not table.rows[req.slot]:
            raise InvariantError(f"{req.rid}: {req.status.name} with nothing in flight")
    for req in state.queue:
        if req.slot >= 0 or req.pages or req.status is not Status.WAITING:
            raise InvariantError(f"{req.rid} waits and holds a slot or pages")
    for req in state.reqs.values():
        if req.status is Status.WAITING and req not in list(state.queue):
            raise InvariantError(f"{req.rid} waits outside the queue")

"""The scheduler's state as bytes, and back: a trace that begins with one replays on its own.

Plain structs in MessagePack. What a step decides after ``restore`` is what it would have decided without: ages
in the tree, the order of free pages and slots, timers and half-done handshakes are all in it. Taken between
steps; costs time and bytes in proportion to the tokens that are cached.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from common.errors import InvariantError
from common.messages import (
    pack_f32,
    pack_i32,
    unpack_f32,
    unpack_i32,
)
from scheduler_proc.radix import Node, RadixTree
from scheduler_proc.request import Req, Status
from scheduler_proc.slots import FLAGS, NUMBERS, SlotTable
from scheduler_proc.snapshot_state import FlightState, NodeState, PoolState, ReqState, Snapshot
from scheduler_proc.state import InFlight, Pool

if TYPE_CHECKING:
    from scheduler_proc.scheduler import Scheduler

COLUMNS = (*NUMBERS, *FLAGS)
_AS_IS = (
    "attempt", "queued_at", "rank", "slot", "pages", "tree_len", "scheduled_len", "cached_len",
    "sent_len", "finish", "finish_handed", "silent", "in_tool_call", "crashes", "num_preemptions", "pending_key",
    "logprobs", "top_logprobs", "prompt_logprobs_left", "prompt_top", "prompt_logprobs_sent",
)  # fmt: skip
"""Fields of ``Req`` that ``ReqState`` has under the same name."""


# --------------------------------------------------------------------------- taking


def take(scheduler: Scheduler) -> bytes:
    """The state between two steps, as bytes."""
    state = scheduler.state
    pool = state.pool
    live = list(state.reqs.values())
    known = set(map(id, live))
    others = [] if pool is None else [req for req in pool.table.taken() if id(req) not in known]
    place = {id(req): i for i, req in enumerate(live + others)}
    stuck = scheduler.batcher.stuck
    return msgspec.msgpack.encode(
        Snapshot(
            epoch=state.epoch,
            step=state.step,
            worker_generation=state.worker_generation,
            next_seq=state.next_seq,
            draining=state.draining,
            reqs=[_req_state(req) for req in live + others],
            num_live=len(live),
            begins=[place[id(req)] for req in state.begins.values()],
            loose=[place[id(req)] for req in state.loose.values()],
            pending_prefixes=[place[id(req)] for req in state.pending_prefixes.values()],
            leaders=[place[id(req)] for req in state.leaders.values()],
            refused=state.refused,
            gone=state.gone,
            suspects=state.suspects,
            unexplained_crashes=state.unexplained_crashes,
            excused_crashes=state.excused_crashes,
            metrics=state.metrics,
            cost=state.cost,
            pacing=state.pacing,
            pool=None if pool is None else _pool_state(pool),
            ratio=scheduler.admission.ratio,
            stuck=-1 if stuck is None else place.get(id(stuck), -1),
            generations=scheduler.generations,
            timers=scheduler.ingest.timers,
            gateways=scheduler.gateways.known,
            orphans=scheduler.gateways.orphans,
            last_turn=scheduler.gateways.last_turn,
            next_reset=scheduler.workers.next_reset,
            orders=scheduler.controls.to_worker,
            flushes=scheduler.controls.flushes,
            profiles=scheduler.controls.profiles,
            next_status=scheduler.next_status,
            announced=scheduler.announced,
            told_idle=scheduler.told_idle,
        )
    )


def _req_state(req: Req) -> ReqState:
    return ReqState(
        seq=req.seq,
        spec=req.spec,
        status=int(req.status),
        ids=req.ids.tobytes(),
        node=-1 if req.node is None else req.node.number,
        prompt_logprobs=None if req.prompt_logprobs is None else pack_f32(req.prompt_logprobs),
        **{name: getattr(req, name) for name in _AS_IS},
    )


def _pool_state(pool: Pool) -> PoolState:
    table = pool.table
    return PoolState(
        ready=pool.ready,
        free_pages=pack_i32(pool.allocator.free_pages()),
        refs=pack_i32(pool.allocator.refs),
        nodes=[
            NodeState(
                node.number,
                -1 if node.parent is None else node.parent.number,
                node.salt,
                node.key,
                pack_i32(node.pages),
                node.locks,
                node.stamp,
            )
            for node in pool.tree.all_nodes()
        ],
        tick=pool.tree.tick,
        next_number=pool.tree.next_number,
        num_evicted_pages=pool.tree.num_evicted_pages,
        columns={name: table.view(name).tobytes() for name in COLUMNS} | {"stop": table.stop.tobytes()},
        ids={req.slot: table.known_ids(req).tobytes() for req in table.taken()},
        free_slots=table.free_slots,
        to_end=table.to_end,
        in_flight=[
            FlightState(f.step, f.slots.tobytes(), f.chunks.tobytes(), f.samples, f.copied_pages, f.prefill_context)
            for f in pool.in_flight
        ],
    )


# --------------------------------------------------------------------------- restoring


def put(scheduler: Scheduler, data: bytes) -> None:
    """Bring a new ``Scheduler`` into the state ``data`` tells of. Raises msgspec.ValidationError for other bytes."""
    snap = msgspec.msgpack.decode(data, type=Snapshot)
    state = scheduler.state
    for name in (
        "epoch", "step", "worker_generation", "next_seq", "draining", "refused", "gone", "suspects",
        "unexplained_crashes", "excused_crashes", "metrics", "cost", "pacing",
    ):  # fmt: skip
        setattr(state, name, getattr(snap, name))
    nodes: dict[int, Node] = {}
    if snap.pool is not None:
        state.pool = Pool(snap.pool.ready, state.config)
        nodes = _put_tree(state.pool.tree, snap.pool)
    reqs = [_put_req(record, nodes) for record in snap.reqs]
    if snap.pool is not None and state.pool is not None:
        _put_pool(state.pool, snap.pool, reqs)
    state.reqs = {req.rid: req for req in reqs[: snap.num_live]}
    for req in state.reqs.values():
        if req.status is Status.WAITING:
            state.queue.add(req)
    state.begins = {reqs[i].rid: reqs[i] for i in snap.begins}
    state.loose = {reqs[i].rid: reqs[i] for i in snap.loose}
    for i in snap.pending_prefixes:
        key = reqs[i].pending_key
        if key is not None:
            state.pending_prefixes[key] = reqs[i]
    for i in snap.leaders:
        group = reqs[i].group_key
        if group is not None:
            state.leaders[group] = reqs[i]
    _put_parts(scheduler, snap, reqs)


def _put_parts(scheduler: Scheduler, snap: Snapshot, reqs: list[Req]) -> None:
    scheduler.admission.ratio = snap.ratio
    scheduler.batcher.stuck = None if snap.stuck < 0 else reqs[snap.stuck]
    scheduler.generations.clear()
    scheduler.generations.update(snap.generations)
    scheduler.ingest.timers[:] = snap.timers
    scheduler.gateways.known.update(snap.gateways)
    scheduler.gateways.orphans.update(snap.orphans)
    scheduler.gateways.last_turn = snap.last_turn
    scheduler.workers.next_reset = snap.next_reset
    scheduler.controls.to_worker[:] = snap.orders
    scheduler.controls.flushes[:] = snap.flushes
    scheduler.controls.profiles.update(snap.profiles)
    scheduler.next_status = snap.next_status
    scheduler.announced = snap.announced
    scheduler.told_idle = snap.told_idle


def _put_req(record: ReqState, nodes: dict[int, Node]) -> Req:
    req = Req(record.seq, record.spec, record.queued_at)
    req.status = Status(record.status)
    req.ids = array("i", record.ids)
    req.node = None if record.node < 0 else nodes[record.node]
    req.prompt_logprobs = None if record.prompt_logprobs is None else unpack_f32(record.prompt_logprobs).copy()
    for name in _AS_IS:
        setattr(req, name, getattr(record, name))
    return req


def _put_tree(tree: RadixTree, snap: PoolState) -> dict[int, Node]:
    nodes: dict[int, Node] = {}
    for record in snap.nodes:
        parent = None if record.parent < 0 else nodes[record.parent]
        node = Node(record.number, parent, record.key, unpack_i32(record.pages), record.salt)
        node.locks, node.stamp = record.locks, record.stamp
        nodes[record.number] = node
    tree.adopt(list(nodes.values()), snap.tick, snap.next_number, snap.num_evicted_pages)
    return nodes


def _put_pool(pool: Pool, snap: PoolState, reqs: list[Req]) -> None:
    pool.allocator.restore(unpack_i32(snap.free_pages), unpack_i32(snap.refs))
    table: SlotTable = pool.table
    for name in COLUMNS:
        column = table.view(name)
        column[:] = np.frombuffer(snap.columns[name], dtype=column.dtype)
    for slot, ids in snap.ids.items():
        table.ids[slot, : len(ids) // 4] = unpack_i32(ids)
    table.stop[:] = unpack_i32(snap.columns["stop"]).reshape(table.stop.shape)
    for req in reqs:
        if req.slot >= 0:
            if table.reqs[req.slot] is not None:
                raise InvariantError(f"two requests hold slot {req.slot}")
            table.reqs[req.slot] = req
    table.free_slots[:] = snap.free_slots
    table.to_end[:] = snap.to_end
    pool.in_flight = deque(
        InFlight(
            f.step, array("i", f.slots), chunks, f.sampling, chunks.count(0), sum(chunks), f.copied_pages,
            f.prefill_context,
        )  # fmt: skip
        for f in snap.in_flight
        for chunks in [array("i", f.chunks)]
    )

"""What a snapshot of the scheduler holds: plain structs, for MessagePack."""

from __future__ import annotations

import msgspec

from common.messages import (
    Control,
    Finish,
    RefusedRow,
    Tokenized,
    TopLogprobs,
    ToWorker,
    WorkerReady,
)
from scheduler_proc.cost import StepCost
from scheduler_proc.gateways import Gateway
from scheduler_proc.metrics import Metrics
from scheduler_proc.pacing import Pacing


class ReqState(msgspec.Struct, array_like=True):
    """A ``Req``."""

    seq: int
    spec: Tokenized
    status: int
    ids: bytes
    node: int
    """Number of the locked tree node; -1: none."""
    prompt_logprobs: bytes | None
    attempt: int
    queued_at: float
    rank: float
    slot: int
    pages: list[int]
    tree_len: int
    scheduled_len: int
    cached_len: int
    sent_len: int
    finish: Finish | None
    finish_handed: bool
    silent: bool
    in_tool_call: bool
    crashes: int
    num_preemptions: int
    pending_key: tuple[str, int, bytes] | None
    logprobs: list[float] | None
    top_logprobs: list[TopLogprobs]
    prompt_logprobs_left: int
    prompt_top: list[TopLogprobs]
    prompt_logprobs_sent: bool


class NodeState(msgspec.Struct, array_like=True):
    """A tree node; parents come before their children."""

    number: int
    parent: int
    """Number of the parent; -1 for the root of a namespace."""
    salt: str
    key: bytes
    pages: bytes
    locks: int
    stamp: int


class FlightState(msgspec.Struct, array_like=True):
    """An ``InFlight``."""

    step: int
    slots: bytes
    chunks: bytes
    sampling: bytes
    copied_pages: tuple[int, ...]
    prefill_context: int = 0


class PoolState(msgspec.Struct):
    """A ``Pool``."""

    ready: WorkerReady
    free_pages: bytes
    refs: bytes
    nodes: list[NodeState]
    tick: int
    next_number: int
    num_evicted_pages: int
    columns: dict[str, bytes]
    ids: dict[int, bytes]
    """Slot -> its known ids."""
    free_slots: list[int]
    to_end: list[int]
    in_flight: list[FlightState]


class Snapshot(msgspec.Struct):
    """All of a ``Scheduler``. Requests are named by their place in ``reqs``."""

    epoch: int
    step: int
    worker_generation: int
    next_seq: int
    draining: bool
    reqs: list[ReqState]
    num_live: int
    """The first so many of ``reqs`` can be found by rid; the others only hold pages still in flight."""
    begins: list[int]
    loose: list[int]
    pending_prefixes: list[int]
    leaders: list[int]
    refused: list[RefusedRow]
    gone: list[str]
    suspects: dict[str, int]
    unexplained_crashes: int
    excused_crashes: int
    metrics: Metrics
    cost: StepCost
    pacing: Pacing
    pool: PoolState | None
    ratio: float
    stuck: int
    generations: dict[str, int]
    timers: list[tuple[float, int, str, str]]
    gateways: dict[str, Gateway]
    orphans: dict[str, list[tuple[str, int]]]
    last_turn: float
    next_reset: float
    orders: list[ToWorker]
    flushes: list[tuple[float, Control]]
    profiles: dict[str, tuple[float, Control]]
    next_status: float
    announced: tuple[bool, bool, tuple[tuple[str, int], ...]] | None
    told_idle: bool = False

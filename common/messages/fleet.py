"""Scheduler, gateways and supervisor: who is there, and how they are."""

from __future__ import annotations

from typing import Any, Literal

from common.messages.base import GatewayName, Message

# --------------------------------------------------------------------------- scheduler <-> gateways


class EngineStatus(Message, frozen=True, kw_only=True):
    """scheduler -> all gateways, a few times a second and on every change of generation."""

    generations: dict[str, int]
    """role -> generation, e.g. {"tokenizer-0": 0, "scheduler-0": 1, "detokenizer-0": 0, "worker-0": 0}.
    When the tokenizer's, scheduler's or detokenizer's changes, gateways resubmit what is open."""
    ready: bool
    """A worker is ready and requests are scheduled."""
    draining: bool
    num_running: int
    num_waiting: int
    max_queued: int
    context_len: int
    """0 while no worker has been ready yet."""
    max_total_tokens: int
    """Tokens the KV pool holds."""
    vocab_size: int = 0
    batch_invariant: bool = False
    metrics: dict[str, float] = {}
    """Snapshot of the engine's counters and gauges, Prometheus names without prefix."""
    histograms: dict[str, list[float]] = {}
    """name -> [sum, count, bucket counts...]; buckets are named in gateway/metrics.py."""
    run: str = ""
    """Names this run of the whole engine: another one knows nothing of what is open."""


class GatewayLease(Message, frozen=True, kw_only=True):
    """gateway -> scheduler, every second: the gateway is alive. Its address lets others answer it."""

    gateway: GatewayName
    address: str
    """Endpoint the gateway's PULL socket is bound to; ``tcp://host:port#key`` for one on another host."""
    generation: int
    closing: bool = False


class Control(Message, frozen=True, kw_only=True):
    """gateway -> scheduler: an operation on the engine, answered by ControlReply."""

    request_id: str
    gateway: GatewayName
    action: Literal["flush_cache", "abort_all", "abort", "info", "config", "start_profile", "stop_profile", "drain"]
    rid: str = ""
    timeout_s: float = 0.0
    """flush_cache: how long to wait for idleness; 0 answers 409 at once when busy."""
    directory: str = ""


class ControlReply(Message, frozen=True, kw_only=True):
    """Answer to Control."""

    request_id: str
    status: int
    body: dict[str, Any] = {}
    """JSON-able."""


class GatewayAddress(Message, frozen=True, kw_only=True):
    """scheduler -> tokenizer and detokenizer: where a gateway (perhaps on another host) listens."""

    gateway: GatewayName
    address: str
    gone: bool = False


# --------------------------------------------------------------------------- supervisor


class Fleet(Message, frozen=True, kw_only=True):
    """supervisor -> scheduler: the generation of every role, whenever one changes."""

    generations: dict[str, int]
    draining: bool = False
    num_bad_frames: int = 0
    """Dropped so far by every process but the gateways, which count their own."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """all -> supervisor, about once a second."""

    role: str
    index: int
    generation: int
    pid: int
    ready: bool
    progress: int
    """Grows with the work done (loop turns, steps, messages). A process that is busy and does not
    grow is hung."""
    busy_since: float = 0.0
    """time.time() at which the work in hand began; 0 when idle."""
    detail: str = ""
    info: dict[str, Any] = {}
    """With ready: what the start-up table shows."""
    num_bad_frames: int = 0
    """Frames and connections that its inboxes refused."""

"""The scheduler's algorithm, one pure step at a time.

    ingest(messages) -> next_batch() -> send ForwardBatch -> commit(StepResult)

A step takes the messages that have arrived and the time, and returns what is to be sent. It does no I/O,
reads no clock and draws no random number: the same state and inputs give the same outputs, so the loop in
``main.py``, a simulation, a replay of a trace and a debugger all run this code.

1. **Ingest.** Requests join the queue, aborts and stop hits end requests, and a StepResult is *committed*:
   its ids are appended to their requests, endings found, and the pages of who is over go to the radix tree
   or become free.
2. **Schedule.** While fewer than two batches are in flight and something can run, build one: a row for each
   decoding request; then prompts, in chunks, under a token budget, first of requests that have output and were
   preempted or outlived a process. The batch that is sent while another runs never names what that one will
   sample, so the worker never waits for the scheduler. It is sent shortly before that one is expected to end,
   so that newcomers are in it (``pacing.py``). When pages run out: evict cached leaves, oldest first; then
   preempt. A preempted request keeps its ids, and waits before all that never ran.
3. **Output.** One TokenBatch with what each request's cursor has not passed. With a full channel the cursors
   stay.

Pages are let go only when the last batch that used them has been committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import ServerConfig
from common.messages import (
    Abort,
    Control,
    ControlReply,
    EngineStatus,
    Fleet,
    GatewayAddress,
    GatewayLease,
    GatewayStuck,
    StepResult,
    StopHit,
    TokenBatch,
    Tokenized,
    TokenizerReady,
    ToScheduler,
    ToWorker,
    WorkerControlReply,
    WorkerReady,
)
from scheduler_proc import snapshot
from scheduler_proc.admission import Admission
from scheduler_proc.batch import Batcher
from scheduler_proc.commit import Commit
from scheduler_proc.control import Controls
from scheduler_proc.gateways import Gateways
from scheduler_proc.ingest import Ingest
from scheduler_proc.life import Life
from scheduler_proc.output import Output
from scheduler_proc.policy import make_policy
from scheduler_proc.state import State
from scheduler_proc.status import check_invariants, engine_status
from scheduler_proc.workers import Workers

STATUS_S = 0.25
"""EngineStatus at least this often; at once when a generation or readiness changes, and for a gateway that comes."""
IDLE_STATUS_S = 1.0
"""As ``STATUS_S``, while there is nothing new to tell."""


@dataclass(slots=True)
class StepOutput:
    """What one step wants sent, each list in order."""

    to_worker: list[ToWorker] = field(default_factory=list)
    """To ``worker-0``, rank 0, which leads the others."""
    addresses: list[GatewayAddress] = field(default_factory=list)
    """To every tokenizer and the detokenizer, before ``tokens``."""
    tokens: TokenBatch | None = None
    """To the detokenizer."""
    replies: list[tuple[str, ControlReply]] = field(default_factory=list)
    """(gateway, answer): may not be lost."""
    status: EngineStatus | None = None
    """To every gateway that takes it; the next one supersedes it."""
    preempted: list[tuple[str, str]] = field(default_factory=list)
    """(rid, why) of those who gave way, for the trace."""
    log: list[tuple[str, str]] = field(default_factory=list)
    """(level, words)."""
    wake_at: float = float("inf")
    """Without messages, the next step is due then."""


class Scheduler:
    """The state and its step. One instance per process; not thread-safe."""

    def __init__(self, config: ServerConfig, generation: int = 0) -> None:
        state = self.state = State(config, generation)
        self.generations: dict[str, int] = {"scheduler-0": generation}
        life = Life(state)
        self.admission = Admission(config.scheduler.schedule_conservativeness)
        self.gateways = Gateways(state, life)
        self.ingest = Ingest(state, life, self.gateways)
        self.workers = Workers(state, life, self.ingest)
        self.batcher = Batcher(state, life, self.admission, make_policy(config.scheduler.schedule_policy))
        self.commit = Commit(state, life, self.admission)
        self.output = Output(state, life)
        self.controls = Controls(state, self.ingest, self.generations)
        self.next_status = 0.0
        self.told_idle = False
        self._more = False
        """Another batch could be built at once."""
        self.announced: tuple[bool, bool, tuple[tuple[str, int], ...]] | None = None

    def step(
        self,
        messages: list[ToScheduler],
        now: float,
        *,
        worker_full: bool = False,
        detokenizer_full: bool = False,
        max_batches: int = 2,
    ) -> StepOutput:
        """Take in ``messages``, schedule, and say what to send. ``now`` is time.time() and never falls.

        ``worker_full``, ``detokenizer_full``: the channel did not take the last message; nothing more is made
        for it in this step. ``max_batches``: the process makes one decision at a time, so that each has its
        record in the trace; ``wake_at`` then is ``now`` while there is room for another. Raises InvariantError
        when our own bookkeeping is wrong.
        """
        for message in messages:
            self._take(message, now)
        self.ingest.expire(now)
        self.gateways.expire(now)
        out = StepOutput()
        out.to_worker = self._schedule(now, 0 if worker_full else max_batches)
        self.controls.settle(now)
        if not detokenizer_full:
            out.tokens = self.output.batch()
        self._tell(out, now, detokenizer_full)
        return out

    def _take(self, message: ToScheduler, now: float) -> None:
        match message:
            case StepResult():
                if message.epoch == self.state.epoch:
                    self.state.pacing.returned(message, now)
                self.commit.result(message)
            case Tokenized():
                self.ingest.tokenized(message, now)
            case Abort():
                self.ingest.abort(message)
            case StopHit():
                self.ingest.stop_hit(message)
            case GatewayLease():
                self.gateways.renew(message, now)
            case GatewayStuck():
                self.gateways.drop(message.gateway)
            case Control():
                self.controls.control(message, now)
            case WorkerControlReply():
                self.controls.worker_reply(message)
            case WorkerReady():
                self.workers.ready(message)
            case Fleet():
                self.gateways.replaced(message.generations)
                if self.ingest.fleet(message, self.generations):
                    self.workers.lost("the worker was replaced")
            case TokenizerReady():
                self.gateways.resend_addresses()  # what else it says is for gateways

    def _schedule(self, now: float, max_batches: int) -> list[ToWorker]:
        """Resets, profiler orders, and batches until enough are in flight."""
        self._more = False
        if max_batches == 0:
            return []
        out = self.workers.resets(now)
        out += self.controls.to_worker
        self.controls.to_worker.clear()
        for _ in range(max_batches):
            batch = self.batcher.next_batch(now)
            if batch is None:
                return out
            out.append(batch)
        self._more = self.batcher.send_at <= now
        return out

    def _tell(self, out: StepOutput, now: float, detokenizer_full: bool) -> None:
        """Everything that is not tokens: addresses, replies, status, the next time to wake."""
        state = self.state
        out.addresses, self.gateways.addresses = self.gateways.addresses, []
        out.replies, self.controls.replies = self.controls.replies, []
        out.log, state.log = state.log, []
        out.preempted, state.preempted = state.preempted, []
        news = (state.pool is not None, state.draining, tuple(self.generations.items()))
        idle = self.idle
        if not idle:
            self.next_status = min(self.next_status, now + STATUS_S)
        elif not self.told_idle:
            self.next_status = now  # the counts of what has just ended
        self.told_idle = idle
        if now >= self.next_status or news != self.announced or out.addresses:
            self.announced = news
            self.next_status = now + (IDLE_STATUS_S if idle else STATUS_S)
            out.status = engine_status(state, self.generations)
        timers, send_at = self.ingest.timers, self.batcher.send_at
        out.wake_at = min(
            self.next_status,
            timers[0][0] if timers else float("inf"),
            self.gateways.next_expiry(),
            self.controls.next_deadline(now),
            self.workers.next_reset if state.pool is None else float("inf"),
            now if self._more else float("inf"),
            send_at if send_at > now else float("inf"),
            now if self.output.pending and not detokenizer_full else float("inf"),
        )

    def snapshot(self) -> bytes:
        """The whole state between two steps; see ``snapshot.py``."""
        return snapshot.take(self)

    @classmethod
    def restore(cls, config: ServerConfig, generation: int, data: bytes) -> Scheduler:
        """A scheduler that goes on from a snapshot. Raises msgspec.ValidationError for other bytes."""
        scheduler = cls(config, generation)
        snapshot.put(scheduler, data)
        return scheduler

    @property
    def ready(self) -> bool:
        """A worker is there and requests are scheduled."""
        return self.state.pool is not None

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is in flight."""
        pool = self.state.pool
        return not self.state.queue and (pool is None or (pool.table.num_taken == 0 and not pool.in_flight))

    def check_invariants(self) -> None:
        """Raise InvariantError unless the page equation and all counts hold (tests: after every step)."""
        check_invariants(self.state)

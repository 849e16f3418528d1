"""The scheduler, a worker and a clock, moved by one step at a time.

With ``disable_overlap_schedule`` (the default here) a step is: take in the result of the batch before, decide
the next. With two batches in flight, as the server runs, a step first fills the pipeline and from then on
takes in one result and sends one batch.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from common.config import ServerConfig
from common.errors import ConfigError
from common.messages import (
    Abort,
    Control,
    ForwardBatch,
    GatewayLease,
    SamplingParams,
    StepResult,
    TextParams,
    Tokenized,
    ToScheduler,
    WorkerReady,
    pack_i32,
)
from scheduler_proc.request import Req
from scheduler_proc.scheduler import Scheduler, StepOutput
from tools.replay.rows import RowDone, SlotReader
from tools.step.links import Link
from tools.step.words import Words

GATEWAY = "gateway-0"
FAKE_STEP_S = 0.02
_TEXT = TextParams()


@dataclass
class Shown:
    """What the last step did, for the screen."""

    messages: list[ToScheduler] = field(default_factory=list)
    batch: ForwardBatch | None = None
    begun: dict[str, int] = field(default_factory=dict)
    """rid -> tokens found in the cache."""
    returned: list[RowDone] = field(default_factory=list)
    """Rows of the result that was taken in."""
    returned_step: int = 0
    took_s: float = 0.0
    events: list[str] = field(default_factory=list)
    """Preemptions, endings, log lines."""


class Engine:
    """Call ``start`` once, then ``step`` per key press. ``now`` is real time, or a clock of its own."""

    def __init__(self, config: ServerConfig, link: Link, words: Words, *, real_time: bool) -> None:
        self.scheduler = Scheduler(config)
        self.link = link
        self.words = words
        self.shown = Shown()
        self.num_steps = 0
        self.now = time.time() if real_time else 0.0
        self.depth = 1 if config.scheduler.disable_overlap_schedule else 2
        self.texts: dict[str, list[int]] = {}
        """rid -> output ids so far."""
        self._real_time = real_time
        self._inputs: deque[ToScheduler] = deque()
        self._results: deque[ToScheduler] = deque()
        self._slots = SlotReader()
        self._num_requests = 0

    def start(self, timeout_s: float) -> None:
        """The handshake with the worker. Raises ConfigError when it takes too long."""
        until = time.monotonic() + timeout_s
        while not self.scheduler.ready:
            answers = self.link.receive(0.5 if self._real_time else 0.0)
            ready = [answer for answer in answers if isinstance(answer, WorkerReady)]
            self._slots.page_size = ready[-1].page_size if ready else self._slots.page_size
            self._send(self._advance(answers))
            if time.monotonic() > until:
                raise ConfigError(f"the worker was not ready within {timeout_s:g} s")

    # ------------------------------------------------------------------ what the keys do

    def add(self, prompt: str, max_tokens: int, priority: int = 0) -> str:
        """A new request; it is taken in with the next step. Returns its rid."""
        self._num_requests += 1
        rid = f"r{self._num_requests}"
        self.texts[rid] = []
        self._inputs.append(
            Tokenized(
                rid=rid,
                gateway=GATEWAY,
                input_ids=pack_i32(self.words.encode(prompt)),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                eos_token_ids=self.words.eos_token_ids,
                text=_TEXT,
                priority=priority,
                received=self.now,
            )
        )
        return rid

    def abort(self, rid: str) -> None:
        """As if its client had left."""
        self._inputs.append(Abort(rid=rid, gateway=GATEWAY))

    def flush(self) -> None:
        """Empty the prefix cache (refused while requests run, as over HTTP)."""
        self._inputs.append(Control(request_id="flush", gateway=GATEWAY, action="flush_cache"))

    def kill_worker(self, timeout_s: float) -> None:
        """The worker dies with all pages; the requests stay."""
        self.link.kill()
        self._results.clear()
        self._slots = SlotReader(self._slots.page_size)
        self.shown.events = ["the worker was killed"]
        self._send(self._advance(self._await_new_worker(timeout_s)))
        self.start(timeout_s)

    def _await_new_worker(self, timeout_s: float) -> list[ToScheduler]:
        """What a worker that has just started says; what its predecessor had still answered is dropped."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for answer in self.link.receive(0.5 if self._real_time else 0.0):
                if isinstance(answer, WorkerReady) and answer.epoch == 0:
                    return [answer]
        raise ConfigError(f"the new worker was not ready within {timeout_s:g} s")

    @property
    def num_arriving(self) -> int:
        """Messages of users that the next step takes in."""
        return len(self._inputs)

    @property
    def idle(self) -> bool:
        """Nothing waits or runs."""
        return self.scheduler.idle and not self._inputs

    def running(self) -> list[Req]:
        """Requests with a slot, by arrival."""
        pool = self.scheduler.state.pool
        return [] if pool is None else sorted(pool.table.taken(), key=lambda req: req.seq)

    # ------------------------------------------------------------------ one step

    def step(self, timeout_s: float = 60.0) -> None:
        """Take in what arrived, and when the pipeline is full the oldest result; decide; send."""
        messages: list[ToScheduler] = []
        pool = self.scheduler.state.pool
        in_flight = len(pool.in_flight) if pool is not None else 0
        if in_flight >= self.depth or (in_flight and self.shown.batch is None):
            messages += self._await(timeout_s)
        messages += self._inputs
        self._inputs.clear()
        self.shown = Shown(messages=messages)
        for message in messages:
            if isinstance(message, StepResult):
                self._take_result(message)
        out = self._advance(messages)
        self._note(out)
        self._send(out)
        self.num_steps += 1

    def _await(self, timeout_s: float) -> list[ToScheduler]:
        """The oldest answer of the worker. Raises ConfigError without one."""
        if not self._results:
            self._results.extend(self.link.receive(timeout_s))
        if not self._results:
            raise ConfigError(f"the worker did not answer within {timeout_s:g} s")
        return [self._results.popleft()]

    def _advance(self, messages: list[ToScheduler]) -> StepOutput:
        self.now = max(self.now, time.time()) if self._real_time else self.now + FAKE_STEP_S
        lease = GatewayLease(gateway=GATEWAY, address="none", generation=0)
        began = time.perf_counter()
        out = self.scheduler.step([lease, *messages], self.now, max_batches=1)
        self.shown.took_s = time.perf_counter() - began
        return out

    def _take_result(self, result: StepResult) -> None:
        done = self._slots.returned(result, self.now)
        if done is None:
            return
        self.shown.returned, self.shown.returned_step = done.rows, result.step
        for row in done.rows:
            self.texts.setdefault(row.rid, []).extend(row.ids)

    def _note(self, out: StepOutput) -> None:
        shown = self.shown
        shown.events += [f"{rid} preempted: {why}" for rid, why in out.preempted]
        for level, words in out.log:
            shown.events.append(f"{level}: {words}")
        for row in out.tokens.rows if out.tokens else []:
            if row.finish is not None:
                shown.events.append(f"{row.rid} finished: {row.finish.reason}")
        for refused in out.tokens.refused if out.tokens else []:
            shown.events.append(f"{refused.rid} refused: {refused.finish.message}")
        shown.events += [f"{reply.request_id}: {reply.status} {reply.body}" for _, reply in out.replies]

    def _send(self, out: StepOutput) -> None:
        for order in out.to_worker:
            if isinstance(order, ForwardBatch):
                self.shown.batch = order
                self.shown.begun = {begin.rid: begin.computed_len for begin in order.begins}
                self._slots.sent(order, self.now)
            self.link.send(order)

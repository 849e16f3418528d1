"""The event loop of the simulation: the real scheduler between simulated clients and a fake worker.

As in the server, the scheduler keeps up to two steps in flight and sends the second when it wants to (the step's
``wake_at``). Arrivals while the pipeline is full are taken in with the next result: nothing could be scheduled
for them sooner. The scheduler's own time is
not part of the simulated time (the server overlaps it with the worker's), but it is measured.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.config import ServerConfig
from common.errors import InvariantError
from common.messages import (
    ForwardBatch,
    GatewayLease,
    Reset,
    SamplingParams,
    StepResult,
    TextParams,
    TokenBatch,
    Tokenized,
    ToScheduler,
    unpack_i32,
)
from common.trace import TraceWriter
from scheduler_proc.record import StepRecorder
from scheduler_proc.scheduler import Scheduler, StepOutput
from tools.simulate.cost import CostModel
from tools.simulate.measure import Outcome, Recorder, summarize
from tools.simulate.plugin import Plugin
from tools.simulate.worker import EOS, FakeWorker, WorkerShape, output_ids
from tools.simulate.workload import SimRequest, Workload

I32 = NDArray[np.int32]
GATEWAY = "gateway-0"
PIPELINE = 2
LEASE_EVERY_S = 1.0
STUCK_TURNS = 1000
_TEXT = TextParams()


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: SimRequest
    prompt: I32


@dataclass
class Simulation:
    """One run: a configuration, a worker, a cost model, a workload. Call ``run`` once."""

    config: ServerConfig
    shape: WorkerShape
    cost: CostModel
    workload: Workload
    plugin: Plugin | None = None
    check: bool = False
    """Verify the scheduler's invariants after every step and every token that comes out (slow)."""
    trace: TraceWriter | None = None
    """Records every step, as the server does with ``--trace``."""
    recorder: Recorder = field(default_factory=Recorder)
    scheduler_s: float = 0.0
    """Real time spent in ``Scheduler.step``."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.recording = None if self.trace is None else StepRecorder(self.trace, self.scheduler)
        self._lengths: dict[str, int] = {}
        self.worker = FakeWorker(self.shape, self._lengths.__getitem__)
        self._depth = 1 if self.config.scheduler.disable_overlap_schedule else PIPELINE
        self._arrivals = [(r.time, i, r) for i, r in enumerate(self.workload.requests)]
        heapq.heapify(self._arrivals)
        self._num_arrivals = len(self._arrivals)
        self._open: dict[str, _Open] = {}
        self._flying: deque[tuple[float, StepResult]] = deque()
        self._free_at = 0.0
        self._wake_at = 0.0
        self._lease_at = 0.0
        self._start()

    def _start(self) -> None:
        if self.plugin is not None:
            self.plugin.apply_policy(self.scheduler)
        orders = self._decide([self.worker.ready(0)], 0.0).to_worker
        epoch = next(order.epoch for order in orders if isinstance(order, Reset))
        self._decide([self.worker.ready(epoch)], 0.0)
        if self.plugin is not None:
            self.plugin.apply_tree(self.scheduler)

    def run(self) -> dict[str, float]:
        """Until every client has its last answer; the numbers of ``measure.summarize``.

        Raises InvariantError when nothing moves any more while requests are open.
        """
        began, began_cpu = time.perf_counter(), time.process_time()
        now, idle_turns = 0.0, 0
        while self._arrivals or self._flying or self._open:
            wake_at = now
            if self._flying or self._arrivals:
                wake_at = self._flying[0][0] if self._flying else self._arrivals[0][0]
                if self._arrivals and len(self._flying) < self._depth:
                    wake_at = min(wake_at, self._arrivals[0][0])
                if self._flying and len(self._flying) < self._depth:
                    wake_at = min(wake_at, max(self._wake_at, now))
            now = max(now, wake_at)
            messages = self._due(now)
            out = self._step(messages, now)
            if self.recording is not None:  # one decision per record: the rest of the pipeline is filled after it
                while out.wake_at <= now:
                    out = self._step([], now)
            idle_turns = 0 if messages or out.to_worker or out.tokens else idle_turns + 1
            if idle_turns > STUCK_TURNS:
                raise InvariantError(f"nothing moves at {now:.3f} s with {len(self._open)} requests open")
        result = summarize(self.recorder, self.scheduler.state.metrics.num_preemptions_total)
        result["wall_s"], result["cpu_s"] = time.perf_counter() - began, time.process_time() - began_cpu
        result["scheduler_us_per_step"] = self.scheduler_s / max(self.recorder.steps, 1) * 1e6
        return result

    def _due(self, now: float) -> list[ToScheduler]:
        messages: list[ToScheduler] = []
        if now >= self._lease_at:
            self._lease_at = now + LEASE_EVERY_S
            messages.append(GatewayLease(gateway=GATEWAY, address="sim://", generation=0))
        while self._flying and self._flying[0][0] <= now:
            messages.append(self._flying.popleft()[1])
        while self._arrivals and self._arrivals[0][0] <= now:
            messages.append(self._arrive(heapq.heappop(self._arrivals)[2]))
        return messages

    def _arrive(self, request: SimRequest) -> Tokenized:
        prompt = self.workload.prompt(request)
        self._open[request.rid] = _Open(request, prompt)
        self._lengths[request.rid] = request.output_len
        self.recorder.outcomes[request.rid] = Outcome(
            request.user, request.priority > 0, request.time, len(prompt)
        )
        return Tokenized(
            rid=request.rid,
            gateway=GATEWAY,
            input_ids=prompt.astype("<i4").tobytes(),
            sampling=SamplingParams(max_tokens=request.max_tokens),
            eos_token_ids=(EOS,),
            text=_TEXT,
            priority=request.priority,
            received=request.time,
        )

    def _decide(self, messages: list[ToScheduler], now: float) -> StepOutput:
        if self.recording is None:
            return self.scheduler.step(messages, now)
        self.recording.before()
        out = self.scheduler.step(messages, now, max_batches=1)
        self.recording.after(messages, now, out, worker_full=False, detokenizer_full=False)
        return out

    def _step(self, messages: list[ToScheduler], now: float) -> StepOutput:
        began = time.perf_counter()
        out = self._decide(messages, now)
        self.scheduler_s += time.perf_counter() - began
        self._wake_at = out.wake_at
        if self.check:
            self.scheduler.check_invariants()
        for order in out.to_worker:
            if isinstance(order, ForwardBatch):
                self._send(order, now)
        if out.tokens is not None:
            self._tokens(out.tokens, now)
        return out

    def _send(self, batch: ForwardBatch, now: float) -> None:
        result, load = self.worker.execute(batch)
        duration = self.cost.seconds(load) if batch.slots else 0.0
        started = max(now, self._free_at)
        result = msgspec.structs.replace(
            result, started=started, forward_s=duration, idle_s=max(now - self._free_at, 0.0)
        )
        self._free_at = started + duration
        self._flying.append((self._free_at, result))
        recorder, pool = self.recorder, self.scheduler.state.need_pool()
        recorder.steps += 1
        recorder.busy_s += duration
        recorder.prefill_tokens += load.prefill_tokens
        recorder.in_use.append((now, 1 - pool.num_available / pool.allocator.num_pages))

    def _tokens(self, batch: TokenBatch, now: float) -> None:
        recorder = self.recorder
        for begin in batch.begins:
            recorder.outcomes[begin.rid].cached_len = begin.cached_len
        for row in batch.rows:
            if row.ids:
                if self.check:
                    self._check_ids(row.rid, row.index, row.ids)
                recorder.tokens(row.rid, len(row.ids) // 4, now)
            if row.finish is not None:
                self._finish(row.rid, row.finish.reason, now)
        for refused in batch.refused:
            self._finish(refused.rid, "refused", now)

    def _finish(self, rid: str, reason: str, now: float) -> None:
        opened = self._open.pop(rid)
        outcome = self.recorder.outcomes[rid]
        outcome.finished, outcome.reason = now, reason
        if reason == "refused":
            return
        outputs = output_ids(rid, 0, outcome.num_tokens, self.shape.vocab_size)
        follow = self.workload.next_turn(opened.request, opened.prompt, outputs, now)
        if follow is not None:
            self._num_arrivals += 1
            heapq.heappush(self._arrivals, (follow.time, self._num_arrivals, follow))

    def _check_ids(self, rid: str, index: int, ids: bytes) -> None:
        got = unpack_i32(ids)
        expected = output_ids(rid, index, index + len(got), self.shape.vocab_size)
        if index != self.recorder.outcomes[rid].num_tokens:
            raise InvariantError(f"{rid}: index {index} came after {self.recorder.outcomes[rid].num_tokens} tokens")
        end = self._lengths[rid] - 1 - index
        if 0 <= end < len(got):
            expected[end] = EOS
        if not np.array_equal(got, expected):
            raise InvariantError(f"{rid}: other ids came out at {index} than the worker gives this request alone")

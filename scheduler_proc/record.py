"""Every step's inputs and decisions into the trace, so that it can be replayed to the last decision."""

from __future__ import annotations

import time
import zlib

import msgspec

from common.messages import TokenRow, ToScheduler
from common.trace import SchedulerState, SchedulerStep, TraceWriter
from scheduler_proc.explain import held
from scheduler_proc.scheduler import Scheduler, StepOutput

_encoder = msgspec.msgpack.Encoder()


def digest(out: StepOutput) -> int:
    """CRC-32 of what a step put out besides its orders: who begins, who ends and how, refusals, replies.

    Plain rows of ids are counted, not hashed: they follow from the worker's results, which are inputs.
    """
    return _digest(out, _ended(out))


def _ended(out: StepOutput) -> list[TokenRow]:
    return [] if out.tokens is None else [row for row in out.tokens.rows if row.finish is not None]


def _digest(out: StepOutput, ended: list[TokenRow]) -> int:
    parts: list[object] = [out.addresses, out.replies]
    if out.tokens is not None:
        tokens = out.tokens
        parts += [tokens.begins, len(tokens.rows), ended, tokens.refused, tokens.gone_gateways]
    return zlib.crc32(_encoder.encode(parts))


class StepRecorder:
    """Writes a record per step. ``before`` and ``after`` enclose ``Scheduler.step``."""

    def __init__(self, trace: TraceWriter, scheduler: Scheduler) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._began = 0.0
        trace.opening = self._opening

    def _opening(self) -> list[SchedulerState]:
        return [SchedulerState(time.time(), self._scheduler.snapshot())]

    def before(self) -> None:
        """A segment may begin here: with the state in which the step will find the scheduler."""
        self._began = time.perf_counter()
        self._trace.make_room()

    def after(
        self,
        messages: list[ToScheduler],
        now: float,
        out: StepOutput,
        *,
        worker_full: bool,
        detokenizer_full: bool,
    ) -> None:
        """Record what the step was given and what it decided."""
        pool = self._scheduler.state.pool
        ended = _ended(out)
        self._trace.write(
            SchedulerStep(
                now,
                time.perf_counter() - self._began,
                messages,
                out.to_worker,
                _digest(out, ended),
                worker_full,
                detokenizer_full,
                0 if pool is None else pool.table.num_taken,
                len(self._scheduler.state.queue),
                0 if pool is None else pool.allocator.num_free,
                0 if pool is None else pool.tree.num_evictable,
                held(self._scheduler),
                out.preempted,
                [(row.rid, row.finish.reason) for row in ended if row.finish is not None],
            )
        )

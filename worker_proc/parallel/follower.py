"""The loop of every rank but the first: compute what rank 0 computes, answer nothing."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from common.channels import Receiver
from common.errors import InvariantError
from common.messages import RankStep, unpack_i32
from common.process import HEARTBEAT_S, ProcessContext
from worker_proc.loop import Pulse
from worker_proc.parallel.late import SharedLateIds
from worker_proc.runner import AheadRunner, ModelRunner, PackedBatch

ALONE_S = 2.0
"""Asked to stop and without a word from rank 0 for so long: it has gone, so nobody needs this rank."""


class FollowerLoop:
    """Receives rank 0's steps and runs them in order.

    Asked to stop it goes on until rank 0 says that it has ended: rank 0 may be within a step, which no
    rank can finish without the others. A follower that fails ends its process; the supervisor
    then replaces the whole group.
    """

    def __init__(
        self, context: ProcessContext, runner: ModelRunner | AheadRunner, inbox: Receiver[Any], pulse: Pulse,
        late: SharedLateIds | None = None,
    ) -> None:  # fmt: skip
        """``late``: where the ids come from that rank 0's host does not know."""
        self._context, self._runner, self._inbox, self._pulse = context, runner, inbox, pulse
        self._late = late
        self._number = 0
        self._over = False

    def run(self) -> None:
        """Until rank 0 has ended."""
        heard = time.monotonic()
        while not self._over:
            steps = self._inbox.receive(limit=1)
            if steps:
                self._handle(steps[0])
                heard = time.monotonic()
            elif self._context.stopping and time.monotonic() - heard > ALONE_S:
                return
            else:
                self._inbox.wait(HEARTBEAT_S)

    def _handle(self, step: RankStep) -> None:
        if step.generation != self._context.generation:
            return  # left in the pipe by a group that is no more
        self._number += 1
        if step.number != self._number:
            raise InvariantError(f"step {step.number} of rank 0 came where {self._number} was due: one is lost")
        self._pulse.busy_since = time.time()
        if step.copies:
            pairs = unpack_i32(step.copies).reshape(-1, 2)
            self._runner.copy_pages(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
        if step.ids:
            self._compute(unpack_step(step))
        self._over = step.last
        self._pulse.progress += 1
        self._pulse.busy_since = 0.0

    def _compute(self, batch: PackedBatch) -> None:
        late = None if self._late is None else self._late.take(batch.ids)
        if late is None:
            self._runner.forward(batch)
        elif hasattr(self._runner, "forward_late"):
            self._runner.forward_late(batch, late)
        else:
            raise InvariantError(f"{self._runner.name} does not take ids from a device, as rank 0's does")


def unpack_step(step: RankStep) -> PackedBatch:
    """The batch that rank 0 packed, in arrays of its own (what is decoded is read-only)."""
    context_lens = unpack_i32(step.context_lens).copy()
    return PackedBatch(
        ids=unpack_i32(step.ids).copy(),
        positions=unpack_i32(step.positions).copy(),
        query_start=unpack_i32(step.query_start).copy(),
        context_lens=context_lens,
        page_table=unpack_i32(step.page_table).reshape(context_lens.size, -1).copy(),
        logit_rows=unpack_i32(step.logit_rows).copy(),
    )

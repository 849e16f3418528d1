"""A step between its launch and its result.

On a GPU the host only launches a step; what it drew is on the host some time later. So that the device never waits
for Python, the step after it is launched before, in two parts:

- Its **forward pass** needs the ids that were drawn, and those are on the device: it takes them from there.
- Its **drawing** may need what the host makes of these ids: a grammar's next mask, the counts of a penalty
  (``Slot.needs_host``). Then it is launched when they have been seen, while its forward pass runs; else at once.

    device   forward N | draw N | forward N+1    | draw N+1 | forward N+2 ...
    host                 launch forward N+1, see N, launch draw N+1, launch forward N+2

What the host learns too late makes a row one that was computed in vain, never one that gives another id. A request
that ended: its row is skipped. A grammar that forces ids after the one drawn: these are not computed yet, so the row
draws nothing, and the next one computes them (its forward pass has computed the drawn one). It cannot be drawn under
the mask instead: a mask allows every way of cutting the forced text into tokens, and jumping ahead takes one.

On a CPU everything follows each other at once.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.messages import ForwardBatch, RowFailure, TopLogprobs
from worker_proc.packing import Row
from worker_proc.runner import LateIds, PackedBatch
from worker_proc.sampling.request import Drawn, Reports
from worker_proc.slots import Slot


@dataclass(slots=True)
class RowOutcome:
    """What a step gave one row."""

    ids: list[int] = field(default_factory=list)
    flags: int = 0
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class LaunchedStep:
    """What ``StepExecutor.finish`` needs of a step."""

    batch: ForwardBatch
    idle_s: float
    started: float
    """time.time()."""
    begun: float
    """The executor's clock."""
    forwarded: float = 0.0
    outcomes: list[RowOutcome] = field(default_factory=list)
    """One per row of the batch."""
    failures: list[RowFailure] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """Those that compute something."""
    logits: Any = None
    """Until the drawing is launched."""
    masks: Future[None] | None = None
    is_drawn: bool = False
    """Its drawing is launched too; none of its rows may need any."""
    drawn: Drawn | None = None
    drawn_rows: list[Row] = field(default_factory=list)
    """Request r of ``drawn`` is that of row r here."""
    reports: Reports | None = None
    """Of the prompts' ids. Also of a step that draws nothing, to tell when it has ended."""

    def fail(self, index: int, slot: Slot, message: str) -> None:
        """The request of row ``index`` cannot go on; its later rows are skipped."""
        slot.finished = True
        self.failures.append(RowFailure(index, message))

    @property
    def ready(self) -> bool:
        """What it gave is on the host."""
        under_way = (self.drawn, self.reports)
        return self.is_drawn and all(each is None or each.ready() for each in under_way)


def late_ids(rows: list[Row], batch: PackedBatch, before: LaunchedStep | None) -> LateIds | None:
    """Where the ids are that ``before`` drew and the host has not seen; None if there are none."""
    late = [s for s, row in enumerate(rows) if row.is_late]
    if not late or before is None or before.drawn is None:
        return None
    sources = np.array([rows[s].slot.drawn_at for s in late], np.int32)
    return LateIds(before.drawn.ids, sources, batch.query_start[late])

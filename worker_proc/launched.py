"""A step between its launch and its result.

On a GPU the host only launches a step; what it drew is on the host some time later. A step can be launched before
the ids of the one before it are there (``StepExecutor.can_follow``): the device takes them from its own memory, so
it never waits for Python. On a CPU both halves follow each other at once.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.messages import ForwardBatch, RowFailure, TopLogprobs
from worker_proc.packing import Row
from worker_proc.runner import LateIds, PackedBatch
from worker_proc.sampling.request import Drawn
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
    masks: Future[None] | None = None
    is_early: bool = False
    """Nothing of it needs the host: the next step may be launched before this one's ids are seen."""
    drawn: Drawn | None = None
    """Of an early step, if any of its rows samples."""
    drawn_rows: list[Row] = field(default_factory=list)

    def fail(self, index: int, slot: Slot, message: str) -> None:
        """The request of row ``index`` cannot go on; its later rows are skipped."""
        slot.finished = True
        self.failures.append(RowFailure(index, message))

    @property
    def ready(self) -> bool:
        """Its ids are on the host."""
        return self.drawn is None or self.drawn.ready()


def late_ids(rows: list[Row], batch: PackedBatch, before: LaunchedStep | None) -> LateIds | None:
    """Where the ids are that ``before`` drew and the host has not seen; None if there are none."""
    late = [s for s, row in enumerate(rows) if row.is_late]
    if not late or before is None or before.drawn is None:
        return None
    sources = np.array([rows[s].slot.drawn_at for s in late], np.int32)
    return LateIds(before.drawn.ids, sources, batch.query_start[late])

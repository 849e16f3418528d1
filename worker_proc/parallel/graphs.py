"""CUDA graphs of a model that is split over ranks: recorded by all of them, or by none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from worker_proc.generic.graphs import Capture, Graph


class Agreement(Protocol):
    """What of a ``RankGroup`` is needed here."""

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        ...


class AgreedCapture:
    """A ``Capture`` that fails on every rank where it fails on one.

    A rank that replays a graph and one that launches the same step make the same sums in the same order, but the
    ranks of NCCL must agree on what is recorded before the next size is warmed up: its sums run on all of them.
    """

    def __init__(self, capture: Capture, group: Agreement) -> None:
        self._capture, self._group = capture, group

    def __call__(self, work: Callable[[], Tensor]) -> Graph:
        """See ``Capture``. Raises ``RuntimeError`` on all ranks alike."""
        graph: Graph | None = None
        failure: RuntimeError | None = None
        try:
            graph = self._capture(work)
        except RuntimeError as error:
            failure = error
        everywhere = self._group.least(int(failure is None))
        if failure is not None:
            raise failure
        if graph is None or not everywhere:
            raise RuntimeError("another rank could not record it")
        return graph

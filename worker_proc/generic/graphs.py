"""Decode steps as CUDA graphs: recorded once for some numbers of rows, replayed for every step that fits one.

A replay is one launch, so a decode step no longer waits for Python between its hundreds of kernels. A graph reads
from buffers that stay where they are; a step with fewer rows than its graph is padded with rows that attend to
themselves alone, in a page that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker_proc.attention.plan import cells_of
from worker_proc.device_io import DeviceIo
from worker_proc.runner import LateIds, PackedBatch

DEFAULT_MOST_ROWS = 64


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> Tensor:
        """Do it again; the result is in the same tensor as every time."""
        ...


class Capture(Protocol):
    """Records work. ``CudaCapture`` on a GPU; what calls the function again, in tests."""

    def __call__(self, work: Callable[[], Tensor]) -> Graph:
        """Run ``work`` to warm up, then record it."""
        ...


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph, self._result = graph, result

    def replay(self) -> Tensor:
        """See ``Graph``."""
        self._graph.replay()
        return self._result


class CudaCapture:
    """Records on the current device; all graphs share one pool of memory, since one runs at a time.

    ``beside_threads``: other threads of the process ask CUDA things meanwhile (NCCL's watchdog does), which does not
    spoil the recording.
    """

    def __init__(self, beside_threads: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._error_mode = "thread_local" if beside_threads else "global"

    def __call__(self, work: Callable[[], Tensor]) -> Graph:
        """See ``Capture``."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and lets libraries choose theirs, outside of the recording
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._error_mode):
            result = work()
        return _CudaGraph(graph, result)


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """The buffers that the graphs read, for as many rows as the largest has."""

    ids: Tensor
    """int64 [B]."""
    positions: Tensor
    """int64 [B]."""
    cells: Tensor
    """int64 [B]."""
    lens: Tensor
    """int32 [B]."""
    table: Tensor
    """int32 [B, P], P pages hold the longest context."""

    @classmethod
    def create(cls, most_rows: int, num_pages: int, device: torch.device) -> StaticInputs:
        """Zeroed buffers, all rows one position long."""
        ids, positions, cells = (torch.zeros(most_rows, dtype=torch.int64, device=device) for _ in range(3))
        lens = torch.ones(most_rows, dtype=torch.int32, device=device)
        return cls(
            ids, positions, cells, lens, torch.zeros((most_rows, num_pages), dtype=torch.int32, device=device)
        )

    def first(self, rows: int) -> StaticInputs:
        """Views of the first rows."""
        return StaticInputs(self.ids[:rows], self.positions[:rows], self.cells[:rows], self.lens[:rows],
                            self.table[:rows])  # fmt: skip


def put_late_ids(ids: Tensor, late: LateIds, io: DeviceIo) -> None:
    """Write into ``ids`` (int64 [T], on the device) those that only the device has."""
    sources, targets = io.upload(np.stack([late.sources, late.targets]).astype(np.int64))
    ids.index_copy_(0, targets, late.drawn.index_select(0, sources).to(torch.int64))


def graph_sizes(most_rows: int) -> list[int]:
    """Numbers of rows that are recorded: 1, 2, 4, then steps of 8 up to 64, of 16 up to 128, of 32 beyond."""
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, most_rows + 32, 32)]
    return sorted({min(size, most_rows) for size in steps})


class DecodeGraphs:
    """The graphs of a runner, largest first.

    ``launch(inputs)`` computes the logits [B, vocab] of one decode step over ``inputs``. ``spare_page`` is where
    padding writes. ``progress`` is told of each size.
    """

    def __init__(
        self, launch: Callable[[StaticInputs], Tensor], most_rows: int, context_length: int, page_size: int,
        spare_page: int, io: DeviceIo, capture: Capture, progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.sizes = graph_sizes(most_rows)
        self._page_size, self._spare_cell, self._io = page_size, spare_page * page_size, io
        self._inputs = StaticInputs.create(self.sizes[-1], -(-context_length // page_size), io.device)
        self._inputs.cells.fill_(self._spare_cell)
        self._inputs.table[:, 0] = spare_page
        self._spare_page = spare_page
        self._graphs: dict[int, Graph] = {}
        for done, size in enumerate(reversed(self.sizes), 1):  # the largest first: the others fit into its memory
            progress(f"recording CUDA graphs: {done} of {len(self.sizes)} ({size} rows)")
            inputs = self._inputs.first(size)
            self._graphs[size] = capture(lambda inputs=inputs: launch(inputs))  # type: ignore[misc]

    def size_for(self, batch: PackedBatch) -> int:
        """Rows of the graph that runs this step; 0 if none does: only steps with one token per sequence."""
        rows = batch.context_lens.size
        if batch.ids.size != rows or rows == 0 or batch.logit_rows.size == 0:
            return 0
        if batch.page_table.shape[1] > self._inputs.table.shape[1]:
            return 0
        return next((size for size in self.sizes if size >= rows), 0)

    def run(self, batch: PackedBatch, late: LateIds | None = None) -> Tensor:
        """Logits [R, vocab] of ``batch.logit_rows``, valid until the next call. ``size_for`` must not be 0."""
        size, rows = self.size_for(batch), batch.context_lens.size
        self._fill(batch, size)
        if late is not None:
            put_late_ids(self._inputs.ids, late, self._io)
        logits = self._graphs[size].replay()
        if batch.logit_rows.size == rows:
            return logits[:rows]
        return logits[self._io.upload(batch.logit_rows.astype(np.int64))]

    def _fill(self, batch: PackedBatch, size: int) -> None:
        """Bring a step into the buffers: two copies to the device, whatever the number of rows."""
        rows, inputs = batch.context_lens.size, self._inputs.first(size)
        columns = np.zeros((4, size), np.int64)
        columns[0, :rows], columns[1, :rows] = batch.ids, batch.positions
        pages = batch.page_table[np.arange(rows), batch.positions // self._page_size]
        columns[2], columns[3] = self._spare_cell, 1
        columns[2, :rows] = cells_of(pages, batch.positions, self._page_size)
        columns[3, :rows] = batch.context_lens
        targets = (inputs.ids, inputs.positions, inputs.cells, inputs.lens)
        for target, column in zip(targets, self._io.upload(columns), strict=True):
            target.copy_(column)
        width = batch.page_table.shape[1]
        table = np.full((size, width), self._spare_page, np.int32)
        table[:rows] = batch.page_table
        inputs.table[:, :width].copy_(self._io.upload(table))

"""What the attention of all layers shares in one step, worked out once from the packed batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_proc.runner import PackedBatch

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several tokens in the step (a prefill chunk)."""

    first_row: int
    end_row: int
    start: int
    """Position of the first token."""
    cells: Tensor
    """int64 [context length], on the device: pool cell of each position of the sequence."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where K/V of the step's tokens go, and the sequences grouped by how they are attended.

    A *cell* is the place of one token's K/V in a pool: ``page * page_size + offset``.
    """

    cells: Tensor
    """int64 [T], on the device: cell that each packed token writes."""
    chunks: tuple[Chunk, ...]
    """Sequences with more than one token."""
    decode_rows: I32
    """[S1] packed rows of the sequences with a single token."""
    decode_rows_device: Tensor
    """int64 [S1], the same on the device."""
    decode_lens: I32
    """[S1] their context lengths."""
    decode_table: I32
    """[S1, P] their page tables."""
    decode_lens_device: Tensor
    """int64 [S1], on the device."""
    decode_table_device: Tensor
    """int64 [S1, P], on the device: uploaded once a step, not once a layer."""
    page_size: int


def make_plan(batch: PackedBatch, page_size: int, device: torch.device) -> StepPlan:
    """Group the sequences of a packed batch. Host work only, apart from small copies to the device."""
    query_lens = np.diff(batch.query_start)
    sequence_of_row = np.repeat(np.arange(query_lens.size), query_lens)
    cells = cells_of(batch.page_table[sequence_of_row, batch.positions // page_size], batch.positions, page_size)
    chunks = []
    for s in np.flatnonzero(query_lens > 1):
        length = int(batch.context_lens[s])
        positions = np.arange(length, dtype=np.int32)
        sequence_cells = cells_of(batch.page_table[s, positions // page_size], positions, page_size)
        first, end = int(batch.query_start[s]), int(batch.query_start[s + 1])
        chunks.append(Chunk(first, end, length - (end - first), torch.from_numpy(sequence_cells).to(device)))
    single = np.flatnonzero(query_lens == 1)
    decode_rows = np.ascontiguousarray(batch.query_start[:-1][single], dtype=np.int32)
    return StepPlan(
        cells=torch.from_numpy(cells).to(device),
        chunks=tuple(chunks),
        decode_rows=decode_rows,
        decode_rows_device=torch.from_numpy(decode_rows.astype(np.int64)).to(device),
        decode_lens=np.ascontiguousarray(batch.context_lens[single], dtype=np.int32),
        decode_table=np.ascontiguousarray(batch.page_table[single], dtype=np.int32),
        decode_lens_device=torch.from_numpy(batch.context_lens[single].astype(np.int64)).to(device),
        decode_table_device=torch.from_numpy(batch.page_table[single].astype(np.int64)).to(device),
        page_size=page_size,
    )


def cells_of(pages: I32, positions: I32, page_size: int) -> I64:
    """Pool cells of positions whose pages are ``pages``."""
    return pages.astype(np.int64) * page_size + positions % page_size

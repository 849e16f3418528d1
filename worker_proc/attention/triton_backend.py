"""Attention through our Triton kernels. Imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_proc.attention.plan import cells_of
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.device_io import DeviceIo
from worker_proc.kernels.cuda.decode_attention import choose_split_len, decode_attention
from worker_proc.kernels.cuda.extend_attention import extend_attention, query_block
from worker_proc.kernels.cuda.kv_write import write_kv
from worker_proc.runner import PackedBatch


@dataclass(frozen=True, slots=True)
class Singles:
    """The sequences with one token in the step."""

    rows: Tensor
    """int32 [S1]: their packed rows."""
    table: Tensor
    """int32 [S1, P]."""
    lens: Tensor
    """int32 [S1]."""
    max_len: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """The sequences with several, cut into blocks of queries."""

    blocks: tuple[Tensor, Tensor]
    """int32 (sequence, first query within it) of each block."""
    block_m: int
    query_start: Tensor
    """int32 [S + 1]."""
    table: Tensor
    """int32 [S, P]."""
    lens: Tensor
    """int32 [S]."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step, on the device."""

    cells: Tensor
    """int64 [T]."""
    singles: Singles | None
    chunks: Chunks | None


class TritonBackend:
    """The ``AttentionBackend`` of our own kernels.

    ``context_length``: the longest sequence there can be; it alone decides where contexts are cut.
    ``dtype``: of the queries.
    """

    name = "triton"
    fits_graphs = True

    def __init__(
        self, specs: tuple[LayerSpec, ...], page_size: int, context_length: int, dtype: torch.dtype, io: DeviceIo
    ) -> None:
        self._page_size = page_size
        self._split_len = choose_split_len(context_length)
        self._widest = max((max(spec.key_dim, spec.value_dim) for spec in specs), default=0)
        self._itemsize = dtype.itemsize
        self._io = io

    def plan(self, batch: PackedBatch) -> DevicePlan:
        """See ``AttentionBackend``. One upload."""
        page, query_lens = self._page_size, np.diff(batch.query_start)
        sequence_of_row = np.repeat(np.arange(query_lens.size), query_lens)
        cells = cells_of(batch.page_table[sequence_of_row, batch.positions // page], batch.positions, page)
        single, several = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
        block_m = query_block(int(query_lens.max(initial=1)), self._widest, self._itemsize)
        num_blocks = -(-query_lens[several] // block_m)
        first = np.concatenate([np.arange(n) * block_m for n in num_blocks]) if several.size else several
        tensors = self._upload(
            cells.view(np.int32), batch.query_start[:-1][single], batch.page_table[single], batch.context_lens[single],
            np.repeat(several, num_blocks), first, batch.query_start, batch.page_table, batch.context_lens,
        )  # fmt: skip
        cells_32, rows, single_table, single_lens, sequence, first_row, query_start, table, lens = tensors
        max_len = int(batch.context_lens[single].max(initial=0))
        return DevicePlan(
            cells=cells_32.view(torch.int64),
            singles=Singles(rows, single_table, single_lens, max_len) if single.size else None,
            chunks=Chunks((sequence, first_row), block_m, query_start, table, lens) if several.size else None,
        )

    def _upload(self, *arrays: NDArray[np.signedinteger]) -> list[Tensor]:
        """int32 arrays on the device, in one copy. The first begins at an even word, so it may hold int64."""
        sizes = [array.size for array in arrays]
        packed = np.concatenate([np.ravel(array).astype(np.int32, copy=False) for array in arrays])
        parts = self._io.upload(packed).split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def decode_plan(self, cells: Tensor, table: Tensor, lens: Tensor, max_len: int) -> DevicePlan:
        """See ``AttentionBackend``."""
        rows = torch.arange(cells.shape[0], dtype=torch.int32, device=cells.device)
        return DevicePlan(cells, Singles(rows, table, lens, max_len), None)

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, plan: DevicePlan) -> None:
        """See ``AttentionBackend``."""
        write_kv(key, keys, plan.cells)
        write_kv(value, values, plan.cells)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: DevicePlan, spec: LayerSpec, args: AttentionArgs
    ) -> Tensor:
        """See ``AttentionBackend``."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = query.new_empty((*query.shape[:2], spec.value_dim))
        chunks, singles = plan.chunks, plan.singles
        if chunks is not None:
            extend_attention(
                query, keys, values, chunks.blocks, chunks.block_m, chunks.query_start, chunks.table, chunks.lens,
                self._page_size, spec, args, out,
            )  # fmt: skip
        if singles is not None:
            decode_attention(
                query, keys, values, singles.rows, singles.table, singles.lens, singles.max_len, self._page_size,
                self._split_len, spec, args, out,
            )  # fmt: skip
        return out

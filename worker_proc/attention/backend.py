"""The one interface of attention over pages, and its plain implementation in torch."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from worker_proc.attention.kv_types import FP8, read_cells, write_cells
from worker_proc.attention.plan import StepPlan, make_plan
from worker_proc.attention.reference import attend_sequence
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.runner import PackedBatch


class AttentionBackend(Protocol):
    """Writes a layer's new K and V into its pools and attends over them.

    ``plan`` once a step; then for each layer ``write`` and ``attend`` with what it returned.
    """

    name: str
    """Shown to users: ``torch``, ``triton``, ``varlen``."""
    fits_graphs: bool
    """Decode steps are launches alone, on tensors of :meth:`decode_plan`, so a CUDA graph can hold them."""

    def plan(self, batch: PackedBatch) -> Any:
        """What the layers of one step share."""
        ...

    def decode_plan(self, cells: Tensor, table: Tensor, lens: Tensor, max_len: int) -> Any:
        """The plan of a step with one token per sequence, on device tensors that are refilled between steps.

        ``cells`` int64 [S], ``table`` int32 [S, P], ``lens`` int32 [S], none above ``max_len``. Only where
        ``fits_graphs``.
        """
        ...

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, plan: Any) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, Dv] in the pools [cells, Hkv, D or Dv]."""
        ...

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: Any, spec: LayerSpec, args: AttentionArgs
    ) -> Tensor:
        """query [T, H, D] -> [T, H, Dv], in the query's dtype."""
        ...


class DecodeKernel(Protocol):
    """Attention of many single-token sequences over their pages."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, spec: LayerSpec, args: AttentionArgs
    ) -> Tensor:
        """query [S1, H, D] -> [S1, H, Dv], in the query's dtype; keys and values are a layer's pools."""
        ...


class TorchBackend:
    """Chunks one by one through torch's own attention; single tokens through a ``DecodeKernel``. Any device."""

    name = "torch"
    fits_graphs = False

    def __init__(self, page_size: int, device: torch.device, decode: DecodeKernel) -> None:
        self._page_size = page_size
        self._device = device
        self._decode = decode

    def plan(self, batch: PackedBatch) -> StepPlan:
        """See ``AttentionBackend``."""
        return make_plan(batch, self._page_size, self._device)

    def decode_plan(self, cells: Tensor, table: Tensor, lens: Tensor, max_len: int) -> StepPlan:
        """Not here: chunks and lengths are worked out on the host."""
        raise NotImplementedError(f"attention backend {self.name} has no plan for CUDA graphs")

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, plan: StepPlan) -> None:
        """See ``AttentionBackend``."""
        write_cells(keys, plan.cells, key)
        write_cells(values, plan.cells, value)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, spec: LayerSpec, args: AttentionArgs
    ) -> Tensor:
        """See ``AttentionBackend``."""
        decode = decode_gather if keys.dtype == FP8 else self._decode
        if not plan.chunks:
            return decode(query, keys, values, plan, spec, args)
        out = query.new_empty((*query.shape[:2], spec.value_dim))
        for chunk in plan.chunks:
            cells = chunk.cells[spec.lower_bound(chunk.start) :]
            rows = slice(chunk.first_row, chunk.end_row)
            key, value = (read_cells(pool, cells, query.dtype) for pool in (keys, values))
            out[rows] = attend_sequence(query[rows], key, value, chunk.start, spec, args)
        if plan.decode_rows.size:
            rows_device = plan.decode_rows_device
            out[rows_device] = decode(query[rows_device], keys, values, plan, spec, args)
        return out


def decode_gather(
    query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, spec: LayerSpec, args: AttentionArgs
) -> Tensor:
    """The plain ``DecodeKernel``, any device and pool dtype: one sequence after the other."""
    out = query.new_empty((*query.shape[:2], spec.value_dim))
    page = plan.page_size
    for s, length in enumerate(plan.decode_lens.tolist()):
        low = spec.lower_bound(length - 1)
        positions = np.arange(low, length)
        cells = plan.decode_table[s, positions // page].astype(np.int64) * page + positions % page
        index = torch.from_numpy(cells).to(query.device)
        key, value = (read_cells(pool, index, query.dtype) for pool in (keys, values))
        out[s : s + 1] = attend_sequence(query[s : s + 1], key, value, length - 1, spec, args)
    return out


def decode_padded(
    query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, spec: LayerSpec, args: AttentionArgs
) -> Tensor:
    """A ``DecodeKernel`` for devices where calls are dear: gathers all sequences, padded, and attends at once."""
    lengths, table = plan.decode_lens_device, plan.decode_table_device
    width = int(plan.decode_lens.max())
    positions = torch.arange(width, device=query.device)
    cells = table[:, positions // plan.page_size] * plan.page_size + positions % plan.page_size
    seen = positions[None] < lengths[:, None]
    if spec.window:
        seen &= positions[None] >= lengths[:, None] - spec.window
    if spec.chunk:
        seen &= positions[None] // spec.chunk == (lengths[:, None] - 1) // spec.chunk
    num_heads = query.shape[1]
    grouped = query.unflatten(1, (spec.num_kv_heads, num_heads // spec.num_kv_heads))
    scores = torch.einsum("shgd,slhd->shgl", grouped.float(), keys[cells].float()) * args.scaling
    if args.softcap:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if args.sinks is not None:
        sinks = args.sinks.float().view(1, spec.num_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    # What lies in cells that a sequence does not see may be another request's NaN, and 0 * NaN is NaN.
    visible_values = values[cells].float().masked_fill(~seen[:, :, None, None], 0.0)
    return torch.einsum("shgl,slhd->shgd", weights, visible_values).flatten(1, 2).to(query.dtype)

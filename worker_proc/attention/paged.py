"""Attention over a paged KV pool, in the form transformers' attention interface calls.

The pool of a layer is two tensors [num_pages * page_size, num_kv_heads, head_dim]; see ``plan.py``
for cells. Layers are told apart by the order of their calls in a forward pass: a model's own
``layer_idx`` need not be there, nor be unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import InvariantError
from worker_proc.attention.plan import StepPlan, make_plan
from worker_proc.attention.reference import attend_sequence
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.runner import PackedBatch


class DecodeKernel(Protocol):
    """Attention of many single-token sequences over their pages."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, spec: LayerSpec, args: AttentionArgs
    ) -> Tensor:
        """query [S1, H, D] -> [S1, H, Dv], in the query's dtype; keys and values are a layer's pools."""
        ...


class PagedAttention:
    """The KV pools of a model and the attention over them.

    ``begin_step`` before and ``end_step`` after each forward pass; in between the model calls the
    instance once per layer.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], page_size: int, dtype: torch.dtype, device: torch.device, decode: DecodeKernel
    ) -> None:
        self.specs = tuple(specs)
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self._decode = decode
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._plan: StepPlan | None = None
        self._layer = 0

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return sum(spec.bytes_per_token(self.dtype.itemsize) for spec in self.specs)

    def allocate(self, num_pages: int) -> None:
        """Create zeroed pools of ``num_pages`` pages (dropping earlier ones)."""
        self.release()
        cells = num_pages * self.page_size
        for spec in self.specs:
            for pools, dim in ((self._keys, spec.key_dim), (self._values, spec.value_dim)):
                pools.append(torch.zeros((cells, spec.num_kv_heads, dim), dtype=self.dtype, device=self.device))

    def release(self) -> None:
        """Drop the pools."""
        self._keys.clear()
        self._values.clear()

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Copy whole pages in every layer, in order: a later copy sees an earlier one."""
        page = self.page_size
        for pool in (*self._keys, *self._values):
            for source, target in zip(src.tolist(), dst.tolist(), strict=True):
                pool[target * page : (target + 1) * page].copy_(pool[source * page : (source + 1) * page])

    def begin_step(self, batch: PackedBatch) -> None:
        """Prepare for the layers' calls of one forward pass."""
        self._plan = make_plan(batch, self.page_size, self.device)
        self._layer = 0

    def end_step(self) -> None:
        """Check that every layer was called."""
        self._plan = None
        if self._layer != len(self.specs):
            raise InvariantError(f"{self._layer} attention layers ran, the model has {len(self.specs)}")

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Transformers' attention interface: [1, heads, T, dim] each -> [1, T, heads, dim].

        ``attention_mask`` is ignored: the layer's ``LayerSpec`` says what it sees.
        """
        plan = self._plan
        if plan is None:
            raise InvariantError("attention was called outside of a step")
        spec, keys, values = self.specs[self._layer], self._keys[self._layer], self._values[self._layer]
        self._layer += 1
        args = attention_args(query, scaling, kwargs)
        packed_query = query[0].transpose(0, 1)
        keys.index_copy_(0, plan.cells, key[0].transpose(0, 1).to(self.dtype))
        values.index_copy_(0, plan.cells, value[0].transpose(0, 1).to(self.dtype))
        if not plan.chunks:
            return self._decode(packed_query, keys, values, plan, spec, args)[None], None
        out = query.new_empty((packed_query.shape[0], query.shape[1], spec.value_dim))
        for chunk in plan.chunks:
            cells = chunk.cells[spec.lower_bound(chunk.start) :]
            rows = slice(chunk.first_row, chunk.end_row)
            out[rows] = attend_sequence(packed_query[rows], keys[cells], values[cells], chunk.start, spec, args)
        if plan.decode_rows.size:
            rows_device = plan.decode_rows_device
            out[rows_device] = self._decode(packed_query[rows_device], keys, values, plan, spec, args)
        return out[None], None


def attention_args(query: Tensor, scaling: float | None, kwargs: dict[str, Any]) -> AttentionArgs:
    """The per-call arguments that change the arithmetic; the probe refuses layers that pass others."""
    return AttentionArgs(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=kwargs.get("s_aux"),
    )


def decode_gather(
    query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, spec: LayerSpec, args: AttentionArgs
) -> Tensor:
    """The plain ``DecodeKernel``, any device: one sequence after the other."""
    out = query.new_empty((*query.shape[:2], spec.value_dim))
    page = plan.page_size
    for s, length in enumerate(plan.decode_lens.tolist()):
        low = spec.lower_bound(length - 1)
        positions = np.arange(low, length)
        cells = plan.decode_table[s, positions // page].astype(np.int64) * page + positions % page
        index = torch.from_numpy(cells).to(query.device)
        out[s : s + 1] = attend_sequence(query[s : s + 1], keys[index], values[index], length - 1, spec, args)
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

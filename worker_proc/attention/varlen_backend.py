"""Attention through PyTorch's own ``torch.nn.attention.varlen`` (FlashAttention) with block tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker_proc.attention.kv_types import write_cells
from worker_proc.attention.plan import cells_of
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.device_io import DeviceIo
from worker_proc.runner import PackedBatch

PAGE_MULTIPLE = 256
"""FlashAttention 2, which torch is built with, reads pages of multiples of this."""
MOST_HEAD_DIM = 256

VarlenAttention = Callable[..., Any]
"""``varlen_attn``: gives a tensor, as long as nothing else is asked for."""


def find_varlen() -> VarlenAttention | None:
    """The installed torch's function, None where it is missing or takes no block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"block_table", "seqused_k", "enable_gqa", "scale", "window_size"} <= set(signature(varlen_attn).parameters):
        return None
    return varlen_attn


def varlen_refusal(specs: tuple[LayerSpec, ...], page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Why these layers cannot go this way; empty if they can."""
    if dtype not in (torch.float16, torch.bfloat16) or kv_dtype != dtype:
        return f"it needs float16 or bfloat16 for both model and KV pool, not {dtype} and {kv_dtype}"
    if page_size % PAGE_MULTIPLE:
        return f"it reads pages of multiples of {PAGE_MULTIPLE} tokens, not {page_size} (--page-size {PAGE_MULTIPLE})"
    for spec in specs:
        if spec.key_dim != spec.value_dim or spec.key_dim % 8 or spec.key_dim > MOST_HEAD_DIM:
            return f"head sizes {spec.key_dim} and {spec.value_dim}: must be equal, multiples of 8, at most 256"
        if spec.chunk or spec.shaped:
            return "a layer has chunked attention, a soft cap or sinks"
    return ""


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """A step, on the device."""

    cells: Tensor
    query_start: Tensor
    """int32 [S + 1]."""
    table: Tensor
    """int32 [S, P]."""
    lens: Tensor
    """int32 [S]."""
    max_query: int
    max_len: int


class VarlenBackend:
    """The ``AttentionBackend`` around ``varlen_attn``; see :func:`varlen_refusal` for what it covers."""

    name = "varlen"
    fits_graphs = True

    def __init__(self, page_size: int, io: DeviceIo, attention: VarlenAttention) -> None:
        self._page_size = page_size
        self._io = io
        self._attention = attention

    def plan(self, batch: PackedBatch) -> VarlenPlan:
        """See ``AttentionBackend``."""
        page, query_lens = self._page_size, np.diff(batch.query_start)
        sequence_of_row = np.repeat(np.arange(query_lens.size), query_lens)
        cells = cells_of(batch.page_table[sequence_of_row, batch.positions // page], batch.positions, page)
        upload = self._io.upload
        return VarlenPlan(
            upload(cells), upload(batch.query_start), upload(batch.page_table), upload(batch.context_lens),
            int(query_lens.max(initial=1)), int(batch.context_lens.max(initial=1)),
        )  # fmt: skip

    def decode_plan(self, cells: Tensor, table: Tensor, lens: Tensor, max_len: int) -> VarlenPlan:
        """See ``AttentionBackend``."""
        query_start = torch.arange(cells.shape[0] + 1, dtype=torch.int32, device=cells.device)
        return VarlenPlan(cells, query_start, table, lens, 1, max_len)

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan) -> None:
        """See ``AttentionBackend``."""
        write_cells(keys, plan.cells, key)
        write_cells(values, plan.cells, value)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, spec: LayerSpec, args: AttentionArgs
    ) -> Tensor:
        """See ``AttentionBackend``."""
        paged: list[Any] = [pool.view(-1, self._page_size, *pool.shape[1:]) for pool in (keys, values)]
        out: Tensor = self._attention(
            query.contiguous(), *paged, plan.query_start, None, plan.max_query, plan.max_len, scale=args.scaling,
            # Flash counts the positions to the left of a query, ours the query's own among them.
            window_size=(spec.window - 1 if spec.window else -1, 0), enable_gqa=query.shape[1] != spec.num_kv_heads,
            seqused_k=plan.lens, block_table=plan.table,
        )  # fmt: skip
        return out

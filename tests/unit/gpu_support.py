"""Random ragged batches over shuffled pages, and what plain torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from worker_proc.attention.reference import attend_plain, visible
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.runner import PackedBatch

pytest.importorskip("triton", reason="the GPU kernels are Triton's (linux x86_64: pip install -e .[test])")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Absolute and relative, of values of about 1. The interpreter truncates to bfloat16 where a GPU rounds."""


@dataclass(frozen=True)
class Ragged:
    """A batch and the whole context that it attends to."""

    batch: PackedBatch
    query: Tensor
    """[T, H, D]"""
    new_key: Tensor
    """[T, Hkv, D]"""
    new_value: Tensor
    keys: Tensor
    """Pool [cells, Hkv, D]: the cached positions are filled, all other cells hold NaN."""
    values: Tensor
    expected: Tensor
    """[T, H, Dv]: attention over cached and new positions."""


def ragged(
    lens: list[tuple[int, int]], page: int, num_heads: int, spec: LayerSpec, args: AttentionArgs,
    dtype: torch.dtype, seed: int = 0, kv_dtype: torch.dtype | None = None,
) -> Ragged:  # fmt: skip
    """Sequences of (cached, new) positions. With ``kv_dtype`` everything is expected to pass through it."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    widths = [-(-(cached + new) // page) for cached, new in lens]
    order = rng.permutation(sum(widths) + 3).astype(np.int32)
    table = np.zeros((len(lens), max(widths)), np.int32)
    keys = torch.full(((sum(widths) + 3) * page, spec.num_kv_heads, spec.key_dim), float("nan"))
    values = torch.full((keys.shape[0], spec.num_kv_heads, spec.value_dim), float("nan"))
    queries, new_keys, new_values, expected, positions = [], [], [], [], []
    for s, (cached, new) in enumerate(lens):
        table[s, : widths[s]], order = order[: widths[s]], order[widths[s] :]
        at = torch.arange(cached + new)
        cells = torch.from_numpy(table[s].astype(np.int64))[at // page] * page + at % page
        q = torch.randn((new, num_heads, spec.key_dim), generator=generator).to(dtype)
        k = torch.randn((cached + new, spec.num_kv_heads, spec.key_dim), generator=generator).to(dtype)
        v = torch.randn((cached + new, spec.num_kv_heads, spec.value_dim), generator=generator).to(dtype)
        stored_k, stored_v = k.to(kv_dtype).float(), v.to(kv_dtype).float()
        keys[cells[:cached]], values[cells[:cached]] = stored_k[:cached], stored_v[:cached]
        expected.append(attend_plain(q.float(), stored_k, stored_v, visible(spec, at[cached:], at), args))
        queries.append(q)
        new_keys.append(k[cached:])
        new_values.append(v[cached:])
        positions.append(np.arange(cached, cached + new, dtype=np.int32))
    num_new = [new for _, new in lens]
    starts = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)
    batch = PackedBatch(
        ids=np.zeros(starts[-1], np.int32), positions=np.concatenate(positions), query_start=starts,
        context_lens=np.array([cached + new for cached, new in lens], np.int32), page_table=table,
        logit_rows=starts[1:] - 1,
    )  # fmt: skip
    tensors = (*(torch.cat(parts) for parts in (queries, new_keys, new_values)), keys.to(kv_dtype), values.to(kv_dtype))
    return Ragged(batch, *(tensor.to(DEVICE) for tensor in tensors), torch.cat(expected))


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Equal as far as the dtype can tell."""
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(got.float().cpu(), want.float(), atol=tolerance, rtol=tolerance)

"""Paged attention of decode rows on CPU, in Numba: one pass over the pages, no gather.

Each (sequence, KV head) is one work item that walks its sequence's pages with a running softmax
(Milakov and Gimelshein, 2018; the arrangement of FlashAttention). Items share nothing, so a row's
result does not depend on its neighbours. ``decode_gather`` in ``backend.py`` is the reference.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from worker_proc.attention.backend import decode_gather
from worker_proc.attention.plan import StepPlan
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.vector_math import FAST_MATH, exp_in_place

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def decode_numba(
    query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, spec: LayerSpec, args: AttentionArgs
) -> Tensor:
    """A ``DecodeKernel`` for float32 and bfloat16 pools; other dtypes take the plain way."""
    if keys.dtype not in (torch.float32, torch.bfloat16):
        return decode_gather(query, keys, values, plan, spec, args)
    num_rows, num_heads = query.shape[0], query.shape[1]
    out = np.empty((num_rows, num_heads, spec.value_dim), np.float32)
    queries = query.float().contiguous().numpy()
    lows = np.array([spec.lower_bound(n - 1) for n in plan.decode_lens.tolist()], np.int32)
    sinks = _NO_SINKS if args.sinks is None else args.sinks.detach().float().numpy()
    _attend(
        queries, raw_view(keys), raw_view(values), plan.decode_table, lows, plan.decode_lens, plan.page_size,
        np.float32(args.scaling), np.float32(args.softcap), sinks, out,
    )  # fmt: skip
    return torch.from_numpy(out).to(query.dtype)


def raw_view(pool: Tensor) -> NDArray[np.generic]:
    """The pool as NumPy sees it; bfloat16 as its uint16 bits."""
    if pool.dtype == torch.bfloat16:
        return pool.view(torch.int16).numpy().view(np.uint16)
    return pool.numpy()


_NO_SINKS = np.empty(0, np.float32)


def _load(source, target, bits):  # type: ignore[no-untyped-def]
    """Copy pool entries [n, dim] to the float32 ``target``, whose bits are ``bits``; see :func:`_overload_load`."""


@overload(_load)
def _overload_load(source, target, bits):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The only thing in which the pool dtypes differ. An overload, not a closure: Numba does not cache closures."""
    if source.dtype == types.uint16:

        def widen(source, target, bits):  # type: ignore[no-untyped-def]
            for t in range(source.shape[0]):
                for d in range(source.shape[1]):
                    bits[t, d] = np.uint32(source[t, d]) << np.uint32(16)

        return widen

    def copy(source, target, bits):  # type: ignore[no-untyped-def]
        for t in range(source.shape[0]):
            for d in range(source.shape[1]):
                target[t, d] = source[t, d]

    return copy


@numba.njit(parallel=True, fastmath=FAST_MATH, cache=True, nogil=True)
def _attend(  # type: ignore[no-untyped-def]  # pragma: no cover
    query, keys, values, table, lows, lens, page_size, scaling, softcap, sinks, out
):  # fmt: skip
    num_kv_heads = keys.shape[1]
    groups = query.shape[1] // num_kv_heads
    dim, value_dim = keys.shape[2], values.shape[2]
    for item in numba.prange(query.shape[0] * num_kv_heads):
        s, kv_head = item // num_kv_heads, item % num_kv_heads
        tile_bits = np.empty((page_size, max(dim, value_dim)), np.uint32)
        tile = tile_bits.view(np.float32)
        scores = np.empty(page_size, np.float32)
        exp_bits = np.empty(page_size, np.int32)
        weights = np.empty((groups, page_size), np.float32)
        rescale = np.empty(groups, np.float32)
        high = np.full(groups, -np.inf, np.float32)
        total = np.zeros(groups, np.float32)
        acc = np.zeros((groups, value_dim), np.float32)
        position = lows[s]
        while position < lens[s]:
            first = position % page_size
            count = min(page_size - first, lens[s] - position)
            cell = np.int64(table[s, position // page_size]) * page_size + first
            _load(keys[cell : cell + count, kv_head], tile, tile_bits)
            for g in range(groups):
                peak = high[g]
                for t in range(count):
                    dot = np.float32(0)
                    for d in range(dim):
                        dot += query[s, kv_head * groups + g, d] * tile[t, d]
                    dot *= scaling
                    if softcap > 0:
                        dot = softcap * np.tanh(dot / softcap)
                    scores[t] = dot
                    peak = max(peak, dot)
                rescale[g] = 1.0
                if peak > high[g]:
                    rescale[g] = np.exp(high[g] - peak) if total[g] > 0 else np.float32(0)
                    high[g] = peak
                for t in range(count):
                    scores[t] -= peak
                exp_in_place(scores[:count], exp_bits)
                part = np.float32(0)
                for t in range(count):
                    weights[g, t] = scores[t]
                    part += scores[t]
                total[g] = total[g] * rescale[g] + part
            _load(values[cell : cell + count, kv_head], tile, tile_bits)
            for g in range(groups):
                for d in range(value_dim):
                    acc[g, d] *= rescale[g]
                for t in range(count):
                    w = weights[g, t]
                    for d in range(value_dim):
                        acc[g, d] += w * tile[t, d]
            position += count
        for g in range(groups):
            head = kv_head * groups + g
            denominator = total[g]
            if sinks.size:
                denominator += np.exp(sinks[head] - high[g])
            for d in range(value_dim):
                out[s, head, d] = acc[g, d] / denominator

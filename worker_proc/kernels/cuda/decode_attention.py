"""Attention of sequences with one new token, over their pages: two stages (split-KV, "Flash-Decoding").

First stage: one program per (sequence, group of query heads that share a KV head, piece of context)
walks its pages with a running softmax. Second stage: one program per (sequence, head) joins the pieces.
Pieces are cut by absolute position, never by what else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.kernels.cuda.common import add_values, cells_at, lower_bound, needs_upcast, padded, scores_of

MOST_SPLITS = 64
LEAST_SPLIT = 128
MOST_HEADS = 64
"""Query heads of one program: more would not fit its registers."""


@triton.jit
def _attend_split(query, keys, values, rows, table, lens, partial, lse, stride_qt, stride_qh, table_width, split_len,
                  num_splits, num_heads, scaling, softcap, NUM_KV: tl.constexpr, GROUPS: tl.constexpr,
                  KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
                  CHUNK: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr, BLOCK_H: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head_blocks: tl.constexpr = (GROUPS + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // head_blocks
    group = tl.program_id(1) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUPS + group
    length = tl.load(lens + s)
    begin = tl.maximum(split * split_len, lower_bound(length - 1, WINDOW, CHUNK))
    end = tl.minimum((split + 1) * split_len, length)
    if begin < end:
        at_k, at_v, at_n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)
        live_h = group < GROUPS
        q_row = query + tl.load(rows + s).to(tl.int64) * stride_qt
        q = tl.load(q_row + head[:, None] * stride_qh + at_k[None, :],
                    mask=live_h[:, None] & (at_k < KEY_DIM)[None, :], other=0.0)  # fmt: skip
        peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
        for first in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
            positions = first + at_n
            live = (positions >= begin) & (positions < end)
            entry = cells_at(table + s * table_width, positions, live, PAGE) * NUM_KV + kv_head
            scores = scores_of(q, keys, entry, live, scaling, softcap, KEY_DIM, BLOCK_K, CAPPED, UPCAST)
            scores = tl.where(live[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))  # finite: every block holds a live position
            weights = tl.exp(scores - new_peak[:, None])
            rescale = tl.exp(peak - new_peak)
            acc = add_values(acc, weights, rescale, values, entry, live, q.dtype, VALUE_DIM, BLOCK_V, UPCAST)
            total = total * rescale + tl.sum(weights, 1)
            peak = new_peak
        piece = (s * num_heads + head) * num_splits + split
        tl.store(partial + piece[:, None] * VALUE_DIM + at_v[None, :], acc / total[:, None],
                 mask=live_h[:, None] & (at_v < VALUE_DIM)[None, :])  # fmt: skip
        tl.store(lse + piece, peak + tl.log(total), mask=live_h)


@triton.jit
def _join(partial, lse, rows, lens, sinks, out, stride_ot, stride_oh, split_len, num_splits, num_heads,
          VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
          BLOCK_V: tl.constexpr):  # fmt: skip
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at_v = tl.arange(0, BLOCK_V)
    length = tl.load(lens + s)
    first, last = lower_bound(length - 1, WINDOW, CHUNK) // split_len, (length - 1) // split_len
    piece = (s * num_heads + head) * num_splits
    peak = tl.load(lse + piece + first)
    if SINKS:
        peak = tl.maximum(peak, tl.load(sinks + head).to(tl.float32))
    for split in range(first + 1, last + 1):
        peak = tl.maximum(peak, tl.load(lse + piece + split))
    total = 0.0
    if SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - peak)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for split in range(first, last + 1):
        weight = tl.exp(tl.load(lse + piece + split) - peak)
        total += weight
        at = partial + (piece + split) * VALUE_DIM + at_v
        acc += weight * tl.load(at, mask=at_v < VALUE_DIM, other=0.0)
    target = out + tl.load(rows + s).to(tl.int64) * stride_ot + head * stride_oh + at_v
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=at_v < VALUE_DIM)


def choose_split_len(context_length: int) -> int:
    """Positions of a piece of context, a power of two: a function of the model's context length alone."""
    return max(LEAST_SPLIT, padded(-(-context_length // MOST_SPLITS)))


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, table: Tensor, lens: Tensor, max_len: int,
    page_size: int, split_len: int, spec: LayerSpec, args: AttentionArgs, out: Tensor,
) -> None:  # fmt: skip
    """Attend ``query`` [T, H, D] at ``rows`` int32 [S] and write ``out`` [T, H, Dv] there; last dimensions contiguous.

    ``keys``, ``values``: a layer's pools [cells, Hkv, D]. ``table`` int32 [S, P] and ``lens`` int32 [S] are the
    sequences' pages and lengths (at least 1, at most ``max_len``); all on the device, so that the launch
    itself depends on ``max_len`` alone and a CUDA graph can hold it.
    """
    num_rows, num_heads = rows.shape[0], query.shape[1]
    num_splits = -(-max_len // split_len)
    groups = num_heads // spec.num_kv_heads
    block_h = min(padded(groups), MOST_HEADS)
    block_k, block_v = padded(spec.key_dim), padded(spec.value_dim)
    partial = torch.empty((num_rows, num_heads, num_splits, spec.value_dim), dtype=torch.float32, device=query.device)
    lse = torch.empty((num_rows, num_heads, num_splits), dtype=torch.float32, device=query.device)
    _attend_split[(num_rows, spec.num_kv_heads * -(-groups // block_h), num_splits)](
        query, keys, values, rows, table, lens, partial, lse, query.stride(0), query.stride(1), table.stride(0),
        split_len, num_splits, num_heads, args.scaling, args.softcap, NUM_KV=spec.num_kv_heads, GROUPS=groups,
        KEY_DIM=spec.key_dim, VALUE_DIM=spec.value_dim, PAGE=page_size, WINDOW=spec.window, CHUNK=spec.chunk,
        CAPPED=args.softcap > 0, UPCAST=needs_upcast(query.dtype), BLOCK_H=block_h,
        BLOCK_N=64 if block_k <= 128 else 32, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4, num_stages=3,
    )  # fmt: skip
    sinks = lse if args.sinks is None else args.sinks
    _join[(num_rows, num_heads)](
        partial, lse, rows, lens, sinks, out, out.stride(0), out.stride(1), split_len, num_splits, num_heads,
        VALUE_DIM=spec.value_dim, WINDOW=spec.window, CHUNK=spec.chunk, SINKS=args.sinks is not None,
        BLOCK_V=block_v, num_warps=2,
    )  # fmt: skip

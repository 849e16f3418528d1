"""Attention of sequences with several new tokens over their pages, the new tokens' own among them.

K and V of the new tokens are written to their pages first, so there is one place to read from, and a token's
result does not depend on how its prompt was cut into chunks. One program per (block of queries, head) walks
the context with a running softmax (FlashAttention-2's arrangement: Dao, 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.kernels.cuda.common import add_values, cells_at, lower_bound, needs_upcast, padded, scores_of


@triton.jit
def _extend(query, keys, values, block_sequence, block_first, query_start, table, lens, sinks, out, stride_qt,
            stride_qh, stride_ot, stride_oh, table_width, scaling, softcap, NUM_KV: tl.constexpr, GROUPS: tl.constexpr,
            KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
            CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUPS
    s, first_row = tl.load(block_sequence + block).to(tl.int64), tl.load(block_first + block)
    row_0 = tl.load(query_start + s)
    num_rows = tl.load(query_start + s + 1) - row_0
    start = tl.load(lens + s) - num_rows
    at_m, at_n = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at_k, at_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    live_m = at_m < num_rows
    q_row = (row_0 + at_m).to(tl.int64)
    q = tl.load(query + q_row[:, None] * stride_qt + head * stride_qh + at_k[None, :],
                mask=live_m[:, None] & (at_k < KEY_DIM)[None, :], other=0.0)  # fmt: skip
    q_position = start + at_m
    q_low = lower_bound(q_position, WINDOW, CHUNK)
    begin = lower_bound(start + first_row, WINDOW, CHUNK)
    end = start + tl.minimum(first_row + BLOCK_M, num_rows)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for first in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        positions = first + at_n
        live = (positions >= begin) & (positions < end)
        entry = cells_at(table + s * table_width, positions, live, PAGE) * NUM_KV + kv_head
        scores = scores_of(q, keys, entry, live, scaling, softcap, KEY_DIM, BLOCK_K, CAPPED, UPCAST)
        seen = (positions[None, :] <= q_position[:, None]) & (positions[None, :] >= q_low[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row may see nothing of this block (a window further on): no peak yet, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - base[:, None])
        rescale = tl.exp(peak - base)
        acc = add_values(acc, weights, rescale, values, entry, live, q.dtype, VALUE_DIM, BLOCK_V, UPCAST)
        total = total * rescale + tl.sum(weights, 1)
        peak = new_peak
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        new_peak = tl.maximum(peak, sink)
        rescale = tl.exp(peak - new_peak)
        acc = acc * rescale[:, None]
        total = total * rescale + tl.exp(sink - new_peak)
    total = tl.where(live_m, total, 1.0)
    tl.store(out + q_row[:, None] * stride_ot + head * stride_oh + at_v[None, :],
             (acc / total[:, None]).to(out.dtype.element_ty),
             mask=live_m[:, None] & (at_v < VALUE_DIM)[None, :])  # fmt: skip


def query_block(longest: int, widest: int, itemsize: int) -> int:
    """Queries of one program: 16 to 128, for the longest run of new tokens in the step and the widest head.

    float32 products do not run on tensor cores, and larger tiles of them spill registers.
    """
    most = 32 if itemsize > 2 else 128 if padded(widest) <= 128 else 64
    return min(padded(longest), most)


def extend_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: tuple[Tensor, Tensor], block_m: int, query_start: Tensor,
    table: Tensor, lens: Tensor, page_size: int, spec: LayerSpec, args: AttentionArgs, out: Tensor,
) -> None:  # fmt: skip
    """Attend the rows of ``query`` [T, H, D] that ``blocks`` names; write ``out`` [T, H, Dv] there.

    ``blocks``: int32 arrays (sequence, first query within it) of the blocks of ``block_m`` queries;
    ``query_start`` int32 [S + 1], ``table`` int32 [S, P], ``lens`` int32 [S] as in ``PackedBatch``.
    ``keys``, ``values``: a layer's pools [cells, Hkv, D], the new tokens' entries written already.
    """
    num_heads = query.shape[1]
    block_k = padded(spec.key_dim)
    sinks = query if args.sinks is None else args.sinks
    _extend[(blocks[0].shape[0], num_heads)](
        query, keys, values, *blocks, query_start, table, lens, sinks, out, query.stride(0), query.stride(1),
        out.stride(0), out.stride(1), table.stride(0), args.scaling, args.softcap, NUM_KV=spec.num_kv_heads,
        GROUPS=num_heads // spec.num_kv_heads, KEY_DIM=spec.key_dim, VALUE_DIM=spec.value_dim, PAGE=page_size,
        WINDOW=spec.window, CHUNK=spec.chunk, CAPPED=args.softcap > 0, SINKS=args.sinks is not None,
        UPCAST=needs_upcast(query.dtype), BLOCK_M=block_m,
        BLOCK_N=64 if block_k <= 128 and query.itemsize == 2 else 32,
        BLOCK_K=block_k, BLOCK_V=padded(spec.value_dim), num_warps=8 if block_m >= 128 else 4, num_stages=2,
    )  # fmt: skip

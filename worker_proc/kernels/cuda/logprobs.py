"""Log-probabilities of ids, and the likeliest ids, in the raw distributions of rows of logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _logprobs(logits, asked, tokens, out, stride_logits, stride_token, stride_out, size, most, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(asked + 3 * r).to(tl.int64) * stride_logits
    token = tl.load(tokens + tl.load(asked + 3 * r + 1).to(tl.int64) * stride_token)
    num_top = tl.load(asked + 3 * r + 2)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32))
    peak = tl.max(best, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        sums += tl.exp(tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32) - peak)
    normaliser = peak.to(tl.float64) + tl.log(tl.sum(sums.to(tl.float64), 0))
    # An id out of range would be another row's bug; it must not become an access out of bounds.
    known = (token >= 0) & (token < size)
    logit = tl.load(row + token, mask=known, other=float("nan")).to(tl.float64)
    tl.store(out + r * stride_out, (logit - normaliser).to(tl.float32).to(tl.int32, bitcast=True))
    last, last_at = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for n in range(0, num_top):
        # The largest entry after the one found before, in order of value (descending, ties by id).
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_at = tl.zeros((BLOCK,), tl.int32) + size
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < size, other=0.0).to(tl.float32)
            after = (at < size) & ((x < last) | ((x == last) & (at > last_at)))
            better = after & ((x > best) | (best_at == size))
            best_at = tl.where(better, at, best_at)
            best = tl.where(better, x, best)
        last = tl.max(best, 0)
        last_at = tl.min(tl.where(best == last, best_at, size), 0)
        tl.store(out + r * stride_out + 1 + n, last_at)
        value = (last.to(tl.float64) - normaliser).to(tl.float32)
        tl.store(out + r * stride_out + 1 + most + n, value.to(tl.int32, bitcast=True))


def logprobs(logits: Tensor, asked: Tensor, tokens: Tensor, out: Tensor, most: int, block: int = 4096) -> None:
    """Write (log-probability, ``most`` ids, their ``most`` log-probabilities) of each request to ``out`` int32.

    ``out`` is [L, 1 + 2 * most] (any row stride); log-probabilities are float32 bit patterns, and a request's entries
    past its own k are not written. ``asked`` int32 [L, 3]: row of ``logits`` [N, V], place in ``tokens``, k.
    """
    _logprobs[(asked.shape[0],)](
        logits, asked, tokens, out, logits.stride(0), tokens.stride(0), out.stride(0), logits.shape[1], most,
        BLOCK=block, num_warps=8,
    )  # fmt: skip

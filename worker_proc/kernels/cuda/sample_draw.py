"""The choice of an id: the likeliest, or a draw after top-k, top-p and min-p. One program per row, no sorting.

A cut is the shortest prefix, in order of value (descending, ties by id), that holds a count or a mass. Its last
value is found by bisecting over the bit patterns of -x, which order as the floats do: each turn is one pass over
the row, and it ends as soon as a single entry is left between "not enough" and "enough".
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker_proc.kernels.cuda.sample_adjust import (
    GREEDY,
    INVERSE_TEMPERATURE,
    LOG_MIN_P,
    NUM_PARAMETERS,
    TOP_K,
    TOP_P,
    UNIFORM,
)

LARGEST = tl.constexpr(0x7F7FFFFF)
"""Key of the largest finite float32; -inf, never a candidate, is above."""


@triton.jit
def scaled_at(row, at, size, peak, inverse):
    """x <= 0: log-weights relative to the likeliest; -inf beyond ``size``."""
    return (tl.load(row + at, mask=at < size, other=float("-inf")) - peak) * inverse


@triton.jit
def key_of(x):
    """int32 that grows as x <= 0 falls."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _within(row, size, peak, inverse, bound, BLOCK: tl.constexpr):
    """(count, mass) of the entries whose key is at most ``bound``."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        x = scaled_at(row, begin + tl.arange(0, BLOCK), size, peak, inverse)
        inside = key_of(x) <= bound
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(x), 0.0)
    return tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0)


@triton.jit
def _nth_equal(row, size, peak, inverse, key, number, BLOCK: tl.constexpr):
    """Id of the ``number``-th entry, counted from 1 in order of ids, whose key is ``key``."""
    found = size
    before = number * 0
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        equal = (key_of(scaled_at(row, at, size, peak, inverse)) == key).to(tl.int32)
        rank = before + tl.cumsum(equal, 0)
        found = tl.minimum(found, tl.min(tl.where((equal == 1) & (rank == number), at, size), 0))
        before += tl.sum(equal, 0)
    return found


@triton.jit
def _cut(row, size, peak, inverse, want_count, want_mass, BLOCK: tl.constexpr):
    """(key, id, mass) of the shortest prefix that holds ``want_count`` entries or ``want_mass``."""
    low, high = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32) + LARGEST
    count_low, mass_low = low * 0, tl.full((), 0.0, tl.float64)
    count_high, mass_high = _within(row, size, peak, inverse, high, BLOCK)
    last = high * 0 + size
    if (count_high > want_count) | (mass_high > want_mass):
        while (high - low > 1) & (count_high - count_low > 1):
            middle = low + (high - low) // 2
            count, mass = _within(row, size, peak, inverse, middle, BLOCK)
            enough = (count >= want_count) | (mass >= want_mass)
            high, low = tl.where(enough, middle, high), tl.where(enough, low, middle)
            count_high, count_low = tl.where(enough, count, count_high), tl.where(enough, count_low, count)
            mass_high, mass_low = tl.where(enough, mass, mass_high), tl.where(enough, mass_low, mass)
        equals = count_high - count_low
        if equals > 1:  # of equal entries, those with the lowest ids
            weight = tl.exp(-high.to(tl.float32, bitcast=True)).to(tl.float64)
            by_mass = tl.minimum(tl.ceil((want_mass - mass_low) / weight), 1e9).to(tl.int32)
            number = tl.maximum(tl.minimum(tl.minimum(want_count - count_low, by_mass), equals), 1)
            if number < equals:
                last = _nth_equal(row, size, peak, inverse, high, number, BLOCK)
                mass_high = mass_low + number.to(tl.float64) * weight
    return high, last, mass_high


@triton.jit
def _kept(row, at, size, peak, inverse, key_k, last_k, key_p, last_p, floor):
    """Weights of a block after all filters, float32."""
    x = scaled_at(row, at, size, peak, inverse)
    key = key_of(x)
    keep = (key < key_k) | ((key == key_k) & (at <= last_k))
    keep = keep & ((key < key_p) | ((key == key_p) & (at <= last_p))) & (x >= floor)
    return tl.where(keep, tl.exp(x), 0.0)


@triton.jit
def _draw(work, parameters, has_nan, out, stride_out, size, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row, own = work + r * size, parameters + r * NUM_PARAMETERS
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < size, other=float("-inf"))
        best_at = tl.where(x > best, at, best_at)
        best = tl.where(x > best, x, best)
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, best_at, size), 0)
    # A finite peak less itself is 0; that of inf, -inf and NaN is NaN.
    good = (tl.load(has_nan + r) == 0) & (peak - peak == 0.0)
    if good & (tl.load(own + GREEDY) == 0.0):
        inverse = tl.load(own + INVERSE_TEMPERATURE).to(tl.float32)
        top_k, top_p = tl.load(own + TOP_K).to(tl.int32), tl.load(own + TOP_P)
        key_k, last_k = token * 0 + LARGEST, token * 0 + size
        key_p, last_p = key_k, last_k
        mass = tl.full((), 0.0, tl.float64)
        cuts_k = (top_k > 0) & (top_k < size)
        if cuts_k:
            key_k, last_k, mass = _cut(row, size, peak, inverse, top_k, float("inf"), BLOCK)
        if top_p < 1.0:
            if cuts_k == 0:
                mass = _within(row, size, peak, inverse, key_k, BLOCK)[1]
            key_p, last_p, mass = _cut(row, size, peak, inverse, token * 0 + 2147483647, top_p * mass, BLOCK)
        floor = tl.load(own + LOG_MIN_P).to(tl.float32)
        total = tl.full((), 0.0, tl.float64)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            weights = _kept(row, at, size, peak, inverse, key_k, last_k, key_p, last_p, floor)
            total += tl.max(tl.cumsum(weights.to(tl.float64), 0), 0)
        target = tl.load(own + UNIFORM) * total
        before = tl.full((), 0.0, tl.float64)
        chosen, last = token * 0 + size, token * 0
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            weights = _kept(row, at, size, peak, inverse, key_k, last_k, key_p, last_p, floor)
            sums = tl.cumsum(weights.to(tl.float64), 0)
            hit = (weights > 0.0) & (before + sums > target)
            chosen = tl.minimum(chosen, tl.min(tl.where(hit, at, size), 0))
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), 0))
            before += tl.max(sums, 0)
        token = tl.where(chosen < size, chosen, last)  # the draw ran past the end by rounding
    tl.store(out + r * stride_out, token)
    tl.store(out + r * stride_out + 1, 1 - good.to(tl.int32))


def draw(work: Tensor, parameters: Tensor, has_nan: Tensor, out: Tensor, block: int = 4096) -> None:
    """Choose an id for each row of ``work`` [R, V] and write (id, row is unusable) to ``out`` int32 [R, 2 or more].

    A row is unusable if a logit was NaN, or its largest is not finite. Draws are by inverse CDF in order of ids,
    from the uniform number in ``parameters``.
    """
    _draw[(work.shape[0],)](work, parameters, has_nan, out, out.stride(0), work.shape[1], BLOCK=block, num_warps=8)

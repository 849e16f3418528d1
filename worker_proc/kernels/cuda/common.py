"""What the kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn; the format has no infinity, so larger values are clamped."""


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """Matrix product with float32 sums; float32 inputs without TF32's rounding.

    ``UPCAST``: the interpreter multiplies the bit patterns of bfloat16, so it is given float32.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def capped(scores, softcap):
    """``softcap * tanh(scores / softcap)``; tanh by one exponential that cannot overflow."""
    x = scores / softcap
    e = tl.exp(-2.0 * tl.abs(x))
    tanh = (1.0 - e) / (1.0 + e)
    return softcap * tl.where(x < 0, -tanh, tanh)


@triton.jit
def lower_bound(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First position that a query at ``position`` sees: ``LayerSpec.lower_bound``."""
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(low, position - WINDOW + 1)
    if CHUNK > 0:
        low = tl.maximum(low, position // CHUNK * CHUNK)
    return low


@triton.jit
def cells_at(table_row, positions, live, PAGE: tl.constexpr):
    """int64 pool cells of a sequence's positions; 0 where not ``live``."""
    page = tl.load(table_row + positions // PAGE, mask=live, other=0)
    return page.to(tl.int64) * PAGE + positions % PAGE


@triton.jit
def scores_of(q, keys, entry, live, scaling, softcap, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
              CAPPED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """float32 [M, N]: queries ``q`` [M, BLOCK_K] against the keys at pool entries ``entry`` [N], scaled and capped."""
    at_k = tl.arange(0, BLOCK_K)
    k = tl.load(keys + entry[None, :] * KEY_DIM + at_k[:, None],
                mask=live[None, :] & (at_k < KEY_DIM)[:, None], other=0.0).to(q.dtype)  # fmt: skip
    scores = product(q, k, UPCAST) * scaling
    if CAPPED:
        scores = capped(scores, softcap)
    return scores


@triton.jit
def add_values(acc, weights, rescale, values, entry, live, dtype: tl.constexpr, VALUE_DIM: tl.constexpr,
               BLOCK_V: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """``acc`` [M, BLOCK_V] times ``rescale`` [M], plus ``weights`` [M, N] of the values at entries ``entry`` [N]."""
    at_v = tl.arange(0, BLOCK_V)
    v = tl.load(values + entry[:, None] * VALUE_DIM + at_v[None, :],
                mask=live[:, None] & (at_v < VALUE_DIM)[None, :], other=0.0).to(dtype)  # fmt: skip
    return acc * rescale[:, None] + product(weights.to(dtype), v, UPCAST)


@triton.jit
def to_fp8(x):
    """float32 to float8_e4m3fn: nearest even, clamped. Rounded before the conversion, which is then exact
    everywhere; the interpreter's own rounds wrongly."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576  # three bits of mantissa stay
    normal = rounded.to(tl.float32, bitcast=True)
    # Below 2**-6 the step is 2**-9: adding 1.5 * 2**14 leaves exactly that many bits.
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv)


def is_interpreted() -> bool:
    """The kernels run under Triton's interpreter, on CPU tensors."""
    return isinstance(product, InterpretedFunction)


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether :func:`product` has to be given float32 (see there)."""
    return dtype == torch.bfloat16 and is_interpreted()


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds ``size``: tile sides are powers of two, and matrix products need 16."""
    return max(least, 1 << (size - 1).bit_length())

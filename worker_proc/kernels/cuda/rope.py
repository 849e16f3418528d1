"""Rotary position embedding of queries or keys, in place: halves rotated against each other (GPT-NeoX's layout)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker_proc.kernels.cuda.common import padded


@triton.jit
def _rotate(x, cos, sin, stride_t, stride_h, stride_c, num_heads, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = tl.arange(0, BLOCK)
    live_at = at < HALF
    live = (head < num_heads)[:, None] & live_at[None, :]
    first = x + token * stride_t + head[:, None] * stride_h + at[None, :]
    a = tl.load(first, mask=live, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=live, other=0.0).to(tl.float32)
    # Both halves of a row of cosines are the same for most models, but not by definition.
    row = token * stride_c + at
    cos_a = tl.load(cos + row, mask=live_at, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + row, mask=live_at, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + row + HALF, mask=live_at, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + row + HALF, mask=live_at, other=0.0).to(tl.float32)[None, :]
    tl.store(first, (a * cos_a - b * sin_a).to(x.dtype.element_ty), mask=live)
    tl.store(first + HALF, (b * cos_b + a * sin_b).to(x.dtype.element_ty), mask=live)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first R entries of each head of ``x`` [T, H, D] in place; the others stay (partial rotary).

    ``cos``, ``sin`` [T, R] with one row stride, R even, at most D. Last dimensions contiguous.
    """
    num_tokens, num_heads, _ = x.shape
    half, block_h = cos.shape[1] // 2, min(padded(num_heads, 1), 16)
    if num_tokens:
        _rotate[(num_tokens, triton.cdiv(num_heads, block_h))](
            x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), num_heads, HALF=half, BLOCK_H=block_h,
            BLOCK=padded(half),
        )  # fmt: skip

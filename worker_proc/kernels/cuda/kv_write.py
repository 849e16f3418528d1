"""New keys and values into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.kernels.cuda.common import padded, to_fp8


@triton.jit
def _write(new, pool, cells, stride_t, stride_h, stride_d, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
           FP8: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < NUM_HEADS * DIM
    x = tl.load(new + token * stride_t + (at // DIM) * stride_h + (at % DIM) * stride_d, mask=live, other=0.0)
    target = pool + tl.load(cells + token) * (NUM_HEADS * DIM) + at
    if FP8:
        tl.store(target, to_fp8(x.to(tl.float32)), mask=live)
    else:
        tl.store(target, x.to(pool.dtype.element_ty), mask=live)


def write_kv(new: Tensor, pool: Tensor, cells: Tensor) -> None:
    """Store ``new`` [T, Hkv, D] (any strides) in ``pool`` [cells, Hkv, D] at ``cells`` int64 [T].

    A float8_e4m3fn pool gets values rounded to the nearest and clamped to +-448.
    """
    num_tokens, num_heads, dim = new.shape
    if num_tokens:
        _write[(num_tokens,)](
            new, pool, cells, *new.stride(), NUM_HEADS=num_heads, DIM=dim,
            FP8=pool.dtype == torch.float8_e4m3fn, BLOCK=padded(num_heads * dim),
        )  # fmt: skip

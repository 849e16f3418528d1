"""RMS norm, and the residual sum before it, in one pass over the row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker_proc.kernels.cuda.common import padded


@triton.jit
def _rms_norm(x, residual, weight, out, stride_x, stride_residual, stride_out, size, eps, ADD: tl.constexpr,
              OFFSET: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < size
    dtype = out.dtype.element_ty
    values = tl.load(x + row * stride_x + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * stride_residual + at, mask=live, other=0.0).to(tl.float32)
        # The model's sum is rounded to its dtype before it is normed; so is ours.
        rounded = values.to(dtype)
        tl.store(residual + row * stride_residual + at, rounded, mask=live)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    factor = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    normed = values * scale
    if OFFSET:  # Gemma: one more than the weight, and one rounding
        factor += 1.0
    else:  # Llama: the norm is rounded, then multiplied
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + row * stride_out + at, (normed * factor).to(dtype), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None,
             offset: bool = False) -> None:  # fmt: skip
    """``out`` [N, D] = x / rms(x) * weight, or * (1 + weight) with ``offset`` (Gemma).

    With ``residual`` [N, D] its sum with ``x`` is normed, and written to it. Last dimensions contiguous.
    """
    num_rows, size = x.shape
    if num_rows:
        source = x if residual is None else residual
        block = padded(size)
        _rms_norm[(num_rows,)](
            x, source, weight, out, x.stride(0), source.stride(0), out.stride(0), size, eps, ADD=residual is not None,
            OFFSET=offset, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip

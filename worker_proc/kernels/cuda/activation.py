"""The gate of a gated MLP: SiLU or tanh-GELU of one half times the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gate(gate, up, out, stride_gate, stride_up, stride_out, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    x = tl.load(gate + row * stride_gate + at, mask=live, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    # tanh(z) = 2 * sigmoid(2 z) - 1, so 0.5 * (1 + tanh(z)) = sigmoid(2 z).
    z = x
    if GELU:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    e = tl.exp(-tl.abs(z))  # never overflows
    active = x * tl.where(z >= 0, 1.0, e) / (1.0 + e)
    factor = tl.load(up + row * stride_up + at, mask=live, other=0.0).to(tl.float32)
    # The model rounds the activation to its dtype before the product.
    tl.store(out + row * stride_out + at, (active.to(dtype).to(tl.float32) * factor).to(dtype), mask=live)


def gate_mul(gate: Tensor, up: Tensor, gelu: bool = False) -> Tensor:
    """silu(gate) * up, or gelu_tanh(gate) * up: [N, I] each, last dimensions contiguous -> [N, I]."""
    num_rows, size = gate.shape
    out = torch.empty((num_rows, size), dtype=gate.dtype, device=gate.device)
    if num_rows:
        _gate[(num_rows, triton.cdiv(size, 1024))](
            gate, up, out, gate.stride(0), up.stride(0), out.stride(0), size, GELU=gelu, BLOCK=1024
        )  # fmt: skip
    return out

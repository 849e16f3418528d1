"""Norms, rotary embedding and gates in Triton against torch's own operations, with odd sizes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.unit.gpu_support import DEVICE, assert_near

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def plain_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """As transformers writes it for Llama, and with ``offset`` for Gemma."""
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype) if offset else weight * normed.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True], ids=["llama", "gemma"])
def test_norms_with_and_without_the_residual_sum(dtype: torch.dtype, offset: bool) -> None:
    from worker_proc.kernels.cuda.norm import rms_norm

    for size in (48, 333):
        x = random(5, size + 7, dtype=dtype)[:, :size]  # rows further apart than their length
        weight, out = random(size, dtype=dtype, seed=1), torch.empty(5, size, dtype=dtype, device=DEVICE)
        rms_norm(x, weight, 1e-5, out, offset=offset)
        assert_near(out, plain_norm(x, weight, 1e-5, offset).cpu(), dtype)
        residual = random(5, size, dtype=dtype, seed=2)
        total = x + residual
        rms_norm(x, weight, 1e-5, out, residual=residual, offset=offset)
        assert_near(residual, total.cpu(), dtype)
        assert_near(out, plain_norm(total, weight, 1e-5, offset).cpu(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(4, 64, 64), (19, 80, 80), (3, 96, 24)])
def test_rotation_whole_and_partial(dtype: torch.dtype, heads: int, dim: int, rotary: int) -> None:
    from worker_proc.kernels.cuda.rope import rotate

    tokens = 6
    x = random(tokens, heads * dim + 5, dtype=dtype)[:, : heads * dim].unflatten(1, (heads, dim))
    angles = torch.arange(tokens)[:, None] * torch.linspace(1.0, 0.01, rotary // 2)[None]
    cos, sin = (torch.cat([f(angles)] * 2, dim=1).to(dtype).to(DEVICE) for f in (torch.cos, torch.sin))
    part, rest = x[..., :rotary].float(), x[..., rotary:].clone()
    turned = torch.cat([-part[..., rotary // 2 :], part[..., : rotary // 2]], dim=-1)
    want = (part * cos.float()[:, None] + turned * sin.float()[:, None]).cpu()
    rotate(x, cos, sin)
    assert_near(x[..., :rotary], want, dtype)
    assert torch.equal(x[..., rotary:], rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
def test_gates_of_a_joined_projection(dtype: torch.dtype, gelu: bool) -> None:
    from worker_proc.kernels.cuda.activation import gate_mul

    for size in (17, 1300):
        both = random(3, 2 * size, dtype=dtype) * 20  # large arguments must not overflow
        gate, up = both.split(size, dim=1)
        active = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        assert_near(gate_mul(gate, up, gelu), (active * up).cpu(), dtype)

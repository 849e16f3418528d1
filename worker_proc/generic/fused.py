"""Norms and gated MLPs of a transformers model through our Triton kernels, where they give the model's numbers.

A module is recognised by its parts and then tried: one that gives other numbers than the kernel stays as it is.
Imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.kernels.cuda.activation import gate_mul
from worker_proc.kernels.cuda.norm import rms_norm

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest accepted error of the trial, relative to the norm of what the model gives."""
TRIAL_ROWS = 5


class FusedNorm(nn.Module):
    """Stands in for an RMS norm: x / rms(x) * weight, or * (1 + weight) with ``offset``."""

    def __init__(self, norm: Any, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = self.eps = eps
        self._offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        rms_norm(rows, self.weight, self.eps, out, offset=self._offset)
        return out.view(x.shape)


class FusedMlp(nn.Module):
    """Stands in for down(act(gate(x)) * up(x)), act SiLU or tanh-GELU."""

    def __init__(self, mlp: Any, gelu: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self._gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, up = self.gate_proj(x).flatten(0, -2), self.up_proj(x).flatten(0, -2)
        out: Tensor = self.down_proj(gate_mul(gate, up, self._gelu))
        return out.view(*x.shape[:-1], out.shape[-1])


def fuse_modules(model: Any) -> tuple[int, int]:
    """Replace what can be, in place: (norms, MLPs) that were."""
    counts = [0, 0]
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                for kind, fused in enumerate((_fused_norm, _fused_mlp)):
                    replacement = fused(child)
                    if replacement is not None:
                        setattr(parent, name, replacement)
                        counts[kind] += 1
                        break
    return counts[0], counts[1]


def _fused_norm(module: nn.Module) -> nn.Module | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or set(parameters) != {"weight"}:
        return None
    if parameters["weight"].dim() != 1:
        return None
    return _first_that_agrees(module, parameters["weight"], lambda offset: FusedNorm(module, eps, offset))


def _fused_mlp(module: nn.Module) -> nn.Module | None:
    parts = dict(module.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
    # A layer of another type may calculate otherwise, or with other ranks.
    if type(gate) is not nn.Linear or type(up) is not nn.Linear or type(down) is not nn.Linear:
        return None
    return _first_that_agrees(module, gate.weight[0], lambda gelu: FusedMlp(module, gelu))


def _first_that_agrees(module: nn.Module, like: Tensor, make: Callable[[bool], nn.Module]) -> nn.Module | None:
    """The variant that gives the module's numbers for random rows as wide as ``like``, of its dtype and device."""
    if like.dtype not in TOLERANCE:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, TRIAL_ROWS, like.shape[0]), generator=generator).to(like.dtype).to(like.device)
    want = module(x)
    for choice in (False, True):
        candidate = make(choice)
        got = candidate(x)
        if got.shape == want.shape and got.dtype == want.dtype:
            error = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30)
            if error <= TOLERANCE[like.dtype]:
                return candidate
    return None

"""Norms and gates of a transformers model through our Triton kernels, where a trial gives the model's numbers.

A module is recognised by its parts and then tried: one that gives other numbers than the kernel stays as it is.
Imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from worker_proc.kernels.cuda.activation import gate_mul
from worker_proc.kernels.cuda.norm import rms_norm

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest accepted error of a trial, relative to the norm of what the model gives."""
TRIAL_ROWS = 3
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)
"""What a trial may raise where a module is not what it looks like."""

Candidate = TypeVar("Candidate", bound=Callable[[Tensor], Tensor])


class FusedNorm(nn.Module):
    """Stands in for an RMS norm: x / rms(x) * weight, or * (1 + weight) with ``offset``.

    Whoever adds what this norm is asked for next can do both at once (:meth:`add_ahead`).
    """

    def __init__(self, norm: Any, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = self.eps = eps
        self._offset = offset
        self._ahead: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        rms_norm(rows, self.weight, self.eps, out, offset=self._offset)
        return out.view(x.shape)

    def add(self, x: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """``x + fresh`` and its norm, [..., D] each, in one kernel. ``fresh`` is overwritten where it is contiguous:
        nobody else may hold it. ``ValueError`` if shapes or dtypes differ."""
        if x.shape != fresh.shape or x.dtype != fresh.dtype:
            raise ValueError(
                f"{tuple(x.shape)} {x.dtype} and {tuple(fresh.shape)} {fresh.dtype} are not a residual sum"
            )
        total = fresh.contiguous()
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        rms_norm(rows, self.weight, self.eps, out, residual=total.view(rows.shape), offset=self._offset)
        return total, out.view(x.shape)

    def add_ahead(self, x: Tensor, fresh: Tensor) -> Tensor:
        """:meth:`add`, its norm kept for the next :meth:`forward` if that is asked for the very tensor returned."""
        self._ahead = total, _ = self.add(x, fresh)
        return total


class FusedMlp(nn.Module):
    """Stands in for down(act(gate(x)) * up(x)), act SiLU or tanh-GELU."""

    def __init__(self, mlp: Any, gelu: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self._gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = self.down_proj(_gated(self.gate_proj(x), self.up_proj(x), self._gelu))
        return out


class FusedJoinedMlp(nn.Module):
    """Stands in for an MLP whose gate and up projections are one layer (Phi-3's, GLM's)."""

    def __init__(self, mlp: Any, gelu: bool) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = mlp.gate_up_proj, mlp.down_proj
        self.activation_fn = mlp.activation_fn
        self._gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(_gated(gate, up, self._gelu))
        return out


def _gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    width = gate.shape[-1]
    return gate_mul(gate.reshape(-1, width), up.reshape(-1, width), gelu).view(gate.shape)


def fused_norm(module: nn.Module) -> nn.Module | None:
    """What stands in for an RMS norm; None if ``module`` is none."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or set(parameters) != {"weight"}:
        return None
    if parameters["weight"].dim() != 1:
        return None
    return _agreeing(module, parameters["weight"], lambda offset: FusedNorm(module, eps, offset))


def fused_mlp(module: Any) -> nn.Module | None:
    """What stands in for a gated MLP; None if ``module`` is none."""
    parts = dict(module.named_children())
    make: Callable[[Any, bool], nn.Module]
    if set(parts) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        first, make = "gate_proj", FusedMlp
    elif set(parts) == {"gate_up_proj", "down_proj", "activation_fn"}:
        first, make = "gate_up_proj", FusedJoinedMlp
    else:
        return None
    # A layer of another type may calculate otherwise, or with other ranks.
    if any(type(part) is not nn.Linear for name, part in parts.items() if name.endswith("_proj")):
        return None
    return _agreeing(module, getattr(module, first).weight[0], lambda gelu: make(module, gelu))


def fused_gate(experts: Any) -> Callable[[Tensor], Tensor] | None:
    """What stands in for ``_apply_gate`` of stacked experts: [N, 2 I] -> [N, I]; None where they have none such."""
    weight, gate = getattr(experts, "gate_up_proj", None), getattr(experts, "_apply_gate", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 3 or gate is None:
        return None
    like = weight[0, 0] if getattr(experts, "is_transposed", False) else weight[0, :, 0]

    def make(gelu: bool) -> Callable[[Tensor], Tensor]:
        def gated(both: Tensor) -> Tensor:
            gate, up = both.chunk(2, dim=-1)
            return _gated(gate, up, gelu)

        return gated

    return _agreeing(gate, like, make)


def _agreeing(
    original: Callable[[Tensor], Tensor], like: Tensor, make: Callable[[bool], Candidate]
) -> Candidate | None:
    """The variant that gives the original's numbers for random rows as wide as ``like``, of its dtype and device.

    Both are tried whatever the first gives: ranks that split a module between them make the same calls.
    """
    if like.dtype not in TOLERANCE:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((TRIAL_ROWS, like.shape[0]), generator=generator).to(like.dtype).to(like.device)
    want = original(x)
    found = None
    for choice in (True, False):
        candidate = make(choice)
        try:
            if same_numbers(candidate(x), want):
                found = candidate
        except REFUSALS:
            continue
    return found


def same_numbers(got: Any, want: Any) -> bool:
    """Equal shape, dtype and, but for rounding, values.

    Worst row in float32, median row else, where a rounding may send a token to another expert.
    """
    if not isinstance(got, Tensor) or not isinstance(want, Tensor) or got.shape != want.shape:
        return False
    if got.dtype != want.dtype or want.dtype not in TOLERANCE:
        return False
    rows = [side.float().reshape(-1, side.shape[-1]) for side in (got, want)]
    errors = (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1).clamp_min(1e-30)
    error = errors.max() if want.dtype == torch.float32 else errors.median()
    return bool(error <= TOLERANCE[want.dtype])

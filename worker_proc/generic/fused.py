"""A transformers model with our Triton kernels between its matrix products.

Each replacement is recognised by what a module has, tried beside the module, and left out where the numbers differ.
At the end the whole model is compared with itself as it was; if that fails everything is put back. Imports Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_proc.generic.fused_layers import (
    SummingForward,
    followers,
    is_summing,
    rotated_forward,
    trial_step,
    try_forwards,
)
from worker_proc.generic.fused_modules import FusedNorm, fused_gate, fused_mlp, fused_norm
from worker_proc.generic.selfcheck import TOLERANCE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fused:
    """How many modules calculate through our kernels."""

    norms: int = 0
    gates: int = 0
    """Gated MLPs, and groups of experts."""
    rotations: int = 0
    """Attention modules whose rotary embedding is ours."""
    sums: int = 0
    """Layers whose residual sums happen in the norms after them."""

    def __str__(self) -> str:
        """For the log."""
        return f"{self.norms} norms, {self.gates} gates, {self.rotations} rotations, {self.sums} layers' residual sums"


class Fusion:
    """Replacements in one model, and how to take them back."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> Fused:
        """Replace what can be, in place. The model's attention implementation is left set to eager."""
        with torch.inference_mode():
            before = trial_step(self._model)
            norms, mlps = self._modules()
            fused = Fused(norms, mlps + self._gates(), self._rotations(), self._sums())
            error, tolerance = relative_error(trial_step(self._model), before)
        if error <= tolerance:
            return fused
        log.warning("our kernels are not used: with %s the logits differ by %.4f (tolerance %.4f)",
                    fused, error, tolerance)  # fmt: skip
        self.undo()
        return Fused()

    def undo(self) -> None:
        """The model as it was."""
        while self._undo:
            self._undo.pop()()

    def _modules(self) -> tuple[int, int]:
        counts = [0, 0]
        for parent in list(self._model.modules()):
            for name, child in list(parent.named_children()):
                for kind, fused in enumerate((fused_norm, fused_mlp)):
                    replacement = fused(child)
                    if replacement is not None:
                        setattr(parent, name, replacement)
                        self._undo.append(lambda at=(parent, name, child): setattr(*at))  # type: ignore[misc]
                        counts[kind] += 1
                        break
        return counts[0], counts[1]

    def _gates(self) -> int:
        count = 0
        for module in self._model.modules():
            gate = fused_gate(module)
            if gate is not None:
                self._override(module, "_apply_gate", gate)
                count += 1
        return count

    def _rotations(self) -> int:
        candidates = [(module, rotated_forward(module)) for module in self._model.modules()]
        found = try_forwards(lambda: trial_step(self._model), [(m, f) for m, f in candidates if f is not None])
        for module, forward in found:
            self._override(module, "forward", forward)
        return len(found)

    def _sums(self) -> int:
        layers = [module for module in self._model.modules() if is_summing(module)]
        norms = [module for module in self._model.modules() if isinstance(module, FusedNorm)]
        if not layers:
            return 0
        following = followers(lambda: trial_step(self._model), layers, norms)
        candidates = [(layer, SummingForward(layer, following.get(id(layer)))) for layer in layers]
        found = try_forwards(lambda: trial_step(self._model), candidates)
        for layer, forward in found:
            self._override(layer, "forward", forward)
        return len(found)

    def _override(self, module: Any, name: str, value: Any) -> None:
        """An attribute of one instance in front of its class's."""
        setattr(module, name, value)
        self._undo.append(lambda: module.__dict__.pop(name))


def fuse_model(model: Any) -> Fused:
    """Replace what can be, in place; see :class:`Fusion`. The caller sets the model's attention next."""
    return Fusion(model).apply()


def relative_error(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(error, tolerance) of logits [1, T, vocab], as in the start-up check: worst row in float32, median row else."""
    finite = want.isfinite()
    difference = torch.where(finite, got.float() - want.float(), 0.0).norm(dim=-1)
    errors = difference / torch.where(finite, want.float(), 0.0).norm(dim=-1).clamp_min(1e-30)
    error = errors.max() if want.dtype == torch.float32 else errors.median()
    return (float(error) if error.isfinite() else float("inf")), TOLERANCE[str(want.dtype).removeprefix("torch.")]

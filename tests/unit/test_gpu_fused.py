"""Which modules of a model our kernels stand in for, and that the model's numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.tiny_models import tiny_model
from tests.unit.gpu_support import DEVICE


@pytest.mark.parametrize(
    ("name", "expected"),
    # Each layer's norms (Qwen 3: of queries and keys too; Gemma 2: around both blocks) and the last one.
    [("llama", (7, 3)), ("qwen3", (13, 3)), ("gemma2", (13, 3)), ("mixtral", (7, 0)), ("gpt2", (0, 0))],
)
def test_norms_and_gates_are_found_by_trial(name: str, expected: tuple[int, int]) -> None:
    from worker_proc.generic.fused import fuse_modules

    model = tiny_model(name).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.4, parameter.numel(), device=DEVICE))
    ids = torch.arange(5, 11, device=DEVICE)[None]
    with torch.inference_mode():
        want = model(ids, use_cache=False).logits
        assert fuse_modules(model) == expected
        torch.testing.assert_close(model(ids, use_cache=False).logits, want, atol=1e-3, rtol=1e-3)


def test_what_calculates_otherwise_is_left_alone() -> None:
    from worker_proc.generic.fused import fuse_modules

    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x: Any) -> Any:
            return x / x.abs().mean(-1, keepdim=True) * self.weight

    class ReluMlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(16, 24), torch.nn.Linear(16, 24)
            self.down_proj, self.act_fn = torch.nn.Linear(24, 16), torch.nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    model = torch.nn.Sequential(OddRMSNorm(), ReluMlp()).to(DEVICE)
    assert fuse_modules(model) == (0, 0)
    assert [type(part).__name__ for part in model] == ["OddRMSNorm", "ReluMlp"]

"""Where our kernels stand in for parts of a model, that its numbers stay, and that what differs is left alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as hf

from tests.integration.tiny_models import CONFIGS
from tests.unit.gpu_support import DEVICE

BF16 = torch.bfloat16


def small_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Two layers, so that one hands its sum to the next; norms with weights that are not all alike."""
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.4, parameter.numel()).to(parameter))
            else:
                parameter.mul_(4.0)
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(5, 11, device=DEVICE)[None], use_cache=False).logits
    return logits


class Calls:
    """Counts the calls of a function that modules of ours have imported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.keywords: list[dict[str, Any]] = []
        original = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.keywords.append(kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    # Norms of each layer (Qwen 3: of queries and keys too; Gemma 2: around both blocks) and the last one.
    [
        ("llama", BF16, (5, 2, 2, 2)),
        ("qwen3", torch.float32, (9, 2, 2, 2)),
        ("gemma2", BF16, (9, 2, 2, 2)),
        ("mixtral", BF16, (5, 2, 2, 2)),
    ],
)
def test_a_models_layers_call_the_kernels(
    name: str, dtype: torch.dtype, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker_proc.generic import fused_layers, fused_modules
    from worker_proc.generic.fused import Fused, fuse_model

    model = small_model(CONFIGS[name](), dtype)
    want = logits_of(model)
    assert fuse_model(model) == Fused(*expected)
    norms = Calls(monkeypatch, fused_modules, "rms_norm")
    gates = Calls(monkeypatch, fused_modules, "gate_mul")
    rotations = Calls(monkeypatch, fused_layers, "rotate")
    got = logits_of(model)
    error = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
    assert error.median() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert len(norms.keywords) == expected[0], "the norm after a sum is not computed again"
    assert sum(words.get("residual") is not None for words in norms.keywords) == 2 * expected[3]
    assert len(rotations.keywords) == 2 * expected[2] and len(gates.keywords) >= expected[1]


@pytest.mark.parametrize(
    ("config", "rotations", "sums"),
    [
        (hf.GPTNeoXConfig, 2, 0),  # a part of each head is rotated; its norms are another kind
        (hf.CohereConfig, 0, 0),  # its pairs lie side by side
        (hf.GraniteConfig, 2, 0),  # its residual sums are weighted
    ],
)
def test_what_a_layer_does_otherwise_it_goes_on_doing(config: Any, rotations: int, sums: int) -> None:
    from worker_proc.generic.fused import fuse_model

    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
    more = {"residual_multiplier": 0.5} if config is hf.GraniteConfig else {}
    model = small_model(config(**shape, **more))
    want = logits_of(model)
    fused = fuse_model(model)
    assert (fused.rotations, fused.sums) == (rotations, sums)
    torch.testing.assert_close(logits_of(model), want, atol=1e-3, rtol=1e-3)


def test_a_model_that_comes_out_otherwise_is_put_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each module passed its trial, the whole did not: the model is as before, and the log says by how much."""
    from worker_proc.generic import fused
    from worker_proc.generic.fused_modules import FusedNorm

    model = small_model(CONFIGS["mixtral"]())
    model.set_attn_implementation("eager")  # as the trial leaves it
    want, kinds = logits_of(model), [type(module) for module in model.modules()]
    monkeypatch.setattr(fused, "relative_error", lambda got, want: (0.5, 0.002))
    caplog.set_level(logging.WARNING)
    assert fused.fuse_model(model) == fused.Fused()
    assert "our kernels are not used: with 5 norms, 2 gates, 2 rotations, 2 layers' residual sums" in caplog.text
    assert [type(module) for module in model.modules()] == kinds and FusedNorm not in kinds
    assert not any(name in vars(module) for module in model.modules() for name in ("forward", "_apply_gate"))
    assert torch.equal(logits_of(model), want)


def test_modules_that_calculate_otherwise_are_left_alone() -> None:
    from worker_proc.generic.fused_modules import fused_mlp, fused_norm

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

    with torch.inference_mode():
        assert fused_norm(OddRMSNorm().to(DEVICE)) is None
        assert fused_mlp(ReluMlp().to(DEVICE)) is None


def test_a_sum_kept_ahead_serves_only_the_tensor_it_was_made_for() -> None:
    from worker_proc.generic.fused_modules import FusedNorm

    norm = FusedNorm(hf.models.llama.modeling_llama.LlamaRMSNorm(16).to(DEVICE), 1e-6, offset=False)
    x, fresh, other = (torch.randn(1, 2, 16, device=DEVICE) for _ in range(3))
    want_total, want_other = x + fresh, norm(other)
    total = norm.add_ahead(x, fresh)
    torch.testing.assert_close(total, want_total)
    torch.testing.assert_close(norm(other), want_other)
    torch.testing.assert_close(norm(total), norm(want_total))
    with pytest.raises(ValueError, match="are not a residual sum"):
        norm.add(x, fresh.double())


def test_joined_projections_are_gated_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker_proc.generic import fused_modules

    config = hf.Phi3Config(hidden_size=24, intermediate_size=40, vocab_size=64, pad_token_id=0)
    mlp = hf.models.phi3.modeling_phi3.Phi3MLP(config).to(DEVICE)
    x = torch.randn(1, 3, 24, device=DEVICE)
    with torch.inference_mode():
        fused = fused_modules.fused_mlp(mlp)
        assert fused is not None
        gates = Calls(monkeypatch, fused_modules, "gate_mul")
        torch.testing.assert_close(fused(x), mlp(x))
    assert len(gates.keywords) == 1

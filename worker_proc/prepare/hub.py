"""Hugging Face ids: the snapshot in the local cache first, the network only if something is missing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from common.config import ModelConfig
from common.errors import ConfigError
from worker_proc.prepare.folder import TOKENIZER_SOURCES, missing_weights

log = logging.getLogger(__name__)

_SMALL = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


def snapshot(model: ModelConfig, may_work: bool) -> Path | None:
    """The folder of the id's snapshot; None when it has to be fetched and ``may_work`` is false.

    Weights only as safetensors, Python files only with ``--trust-remote-code``. Raises
    ``ConfigError`` for an id that does not exist, needs a login, or cannot be reached.
    """
    import huggingface_hub  # slow to import, and most starts do not need it

    wanted: dict[str, Any] = {"repo_id": model.model, "revision": model.revision or None}
    wanted["allow_patterns"] = _patterns(model)
    try:
        folder = Path(huggingface_hub.snapshot_download(**wanted, local_files_only=True))
        if _is_complete(folder, model):
            return folder
    except (huggingface_hub.errors.LocalEntryNotFoundError, OSError):
        pass
    if not may_work:
        return None
    log.info("fetching %s from %s", model.model, huggingface_hub.constants.ENDPOINT)
    try:
        return Path(huggingface_hub.snapshot_download(**wanted))
    except huggingface_hub.errors.GatedRepoError:
        raise ConfigError(f"{model.model}: accept its licence on the hub and log in (`hf auth login`)") from None
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise ConfigError(f"{model.model}: no such model on the hub, or it is private (`hf auth login`)") from None
    except huggingface_hub.errors.RevisionNotFoundError:
        raise ConfigError(f"{model.model} has no revision {model.revision!r}") from None
    except Exception as error:  # network libraries' errors are many; all mean: not here and not to be had
        words = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{model.model} is not in the local cache and could not be fetched ({words}). Without a network, "
            "copy the model's folder here and give --model FOLDER, or start without --model"
        ) from error


def _patterns(model: ModelConfig) -> list[str]:
    weights = [] if model.load_format == "dummy" else ["*.safetensors"]
    return [*_SMALL, *weights, *(["*.py"] if model.trust_remote_code else [])]


def _is_complete(folder: Path, model: ModelConfig) -> bool:
    if not (folder / "config.json").is_file():
        return False
    names = ("tokenizer.json", *TOKENIZER_SOURCES)
    if not model.tokenizer and not any((folder / name).is_file() for name in names):
        return False
    return model.load_format == "dummy" or not missing_weights(folder)

"""Is a model folder in order? No torch, no network."""

from __future__ import annotations

import json
from pathlib import Path

from common.config import ModelConfig
from common.errors import ConfigError

TOKENIZER_SOURCES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
"""Files of which transformers can make a tokenizer.json."""


def check_folder(folder: Path, model: ModelConfig) -> None:
    """Raise ``ConfigError`` unless the folder has a config and (but for dummy weights) safetensors."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json in it; --model wants a folder in Hugging Face's layout")
    if model.load_format == "dummy":
        return
    missing = missing_weights(folder)
    if not missing:
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigError(
            f"{folder}: its weights are pickles, which can run code and are not loaded; convert them to safetensors "
            "(transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
        )
    raise ConfigError(f"{folder}: {', '.join(missing)} missing; --load-format dummy starts with random weights")


def missing_weights(folder: Path) -> list[str]:
    """Names of the weight files that should be in the folder and are not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return [index.name + " (unreadable)"]
    return [name for name in names if not (folder / name).is_file()]

"""What the tokenizer process knows of a model, read from the JSON files of its folder.

Nothing of transformers is imported: a few files and a few rules are all that validation needs, and
the process is ready in a fraction of a second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config import ServerConfig
from common.errors import ConfigError

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
"""Names under which the configurations of the model families give the most positions."""
DEFAULT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 2),
}
"""Sampling defaults that are taken from generation_config.json, and what a client may set them to (top_p: above 0)."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NO_LIMIT = 10**9
"""``model_max_length`` is a huge number where a tokenizer states no limit."""


@dataclass(frozen=True)
class ModelInfo:
    """The model's limits, special tokens, defaults and chat templates."""

    context_len: int
    """Most positions of a request (prompt and output together)."""
    vocab_size: int
    """Rows of the embedding: every id below this is valid, padding rows included."""
    eos_token_ids: tuple[int, ...]
    """End ids named by generation_config.json and config.json, ascending."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """``bos_token`` -> its text, and so on, as chat templates see them."""
    default_sampling: dict[str, float] = field(default_factory=dict)
    """Sampling defaults that generation_config.json names."""
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name; ``default`` is the usual one. Empty: the model has none."""
    template_source: str = ""
    """Where the default template came from, for messages."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def tokenizer_folder(config: ServerConfig) -> Path:
    """The folder that holds tokenizer.json: ``--tokenizer``, else the model's own.

    Raises:
        ConfigError: there is no tokenizer.json in it.
    """
    folder = Path(config.model.tokenizer or config.model_dir)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"no tokenizer.json in {folder}: name a folder that has one with --tokenizer")
    return folder


def load_model_info(config: ServerConfig) -> ModelInfo:
    """Read everything from ``config.model_dir`` and the tokenizer's folder.

    Raises:
        ConfigError: a file is broken, the vocabulary or the context length is unknown, a sampling default is
            out of range, or ``--chat-template`` names nothing usable.
    """
    model_dir, folder = Path(config.model_dir), tokenizer_folder(config)
    top = read_json(model_dir / "config.json")
    nested = top.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else top
    generation = read_json(model_dir / "generation_config.json")
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    special = _special_tokens(tokenizer_config, read_json(folder / "special_tokens_map.json"))
    templates, source = _templates(config.model.chat_template, folder, tokenizer_config)
    vocab_size = text.get("vocab_size", top.get("vocab_size"))
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{model_dir / 'config.json'} gives no vocab_size")
    return ModelInfo(
        context_len=_context_len(config, text, tokenizer_config),
        vocab_size=vocab_size,
        eos_token_ids=_eos_ids(generation, text, top),
        special_tokens=special,
        default_sampling=_default_sampling(generation, model_dir) if config.model.sampling_defaults == "model" else {},
        templates=templates,
        template_source=source,
    )


def _context_len(config: ServerConfig, text: dict[str, Any], tokenizer_config: dict[str, Any]) -> int:
    if config.model.context_length > 0:
        return config.model.context_length
    limit = next((text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), 0)
    if limit < 1:
        limit = tokenizer_config.get("model_max_length") or 0
    if not 0 < limit < _NO_LIMIT:
        raise ConfigError("the model's files give no context length: set it with --context-length")
    return int(limit)


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _eos_ids(generation: dict[str, Any], text: dict[str, Any], top: dict[str, Any]) -> tuple[int, ...]:
    # generation_config.json is the newer and more complete place (several ids for chat models).
    for source in (generation, text, top):
        if ids := _as_ids(source.get("eos_token_id")):
            return tuple(sorted(set(ids)))
    return ()


def _default_sampling(generation: dict[str, Any], folder: Path) -> dict[str, float]:
    found = {}
    for key, (low, high) in DEFAULT_RANGES.items():
        value = generation.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (key == "top_p" and value == 0):
            bounds = f"{'above ' if key == 'top_p' else ''}{low:g} to {high:g}"
            raise ConfigError(
                f"{folder / 'generation_config.json'}: the default {key} is {value!r}, must be a number from {bounds}: "
                "correct it, or start with --sampling-defaults openai"
            )
        found[key] = float(value)
    return found


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):  # a serialised AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(tokenizer_config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    found = {}
    for source in (special_map, tokenizer_config):  # the later one wins, as in transformers
        for key, value in source.items():
            named = key in _NAMED_TOKENS or (key.endswith("_token") and not key.startswith("add_"))
            text = _token_text(value) if named else None
            if text is not None:
                found[key] = text
    return found


def _templates(chosen: str, folder: Path, tokenizer_config: dict[str, Any]) -> tuple[dict[str, str], str]:
    if chosen:
        return {"default": _chosen_template(chosen)}, "--chat-template"
    templates: dict[str, str] = {}
    source = "tokenizer_config.json"
    own = tokenizer_config.get("chat_template")
    if isinstance(own, list):
        own = {entry["name"]: entry["template"] for entry in own if isinstance(entry, dict) and "template" in entry}
    if isinstance(own, str):
        templates["default"] = own
    elif isinstance(own, dict):
        templates.update({name: text for name, text in own.items() if isinstance(text, str)})
    if isinstance(text := read_json(folder / "chat_template.json").get("chat_template"), str):
        templates["default"], source = text, "chat_template.json"
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"], source = file.read_text(encoding="utf-8"), "chat_template.jinja"
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates, source


def _chosen_template(chosen: str) -> str:
    """``--chat-template``: a file, or the template itself (anything with a Jinja bracket in it)."""
    if "{{" in chosen or "{%" in chosen:
        return chosen
    path = Path(chosen).expanduser()
    if not path.is_file():
        raise ConfigError(f"--chat-template {chosen!r} is neither a file nor a Jinja template")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        wrapped = read_json(path).get("chat_template")
        if not isinstance(wrapped, str):
            raise ConfigError(f"--chat-template {chosen!r} has no string under 'chat_template'")
        return wrapped
    return text

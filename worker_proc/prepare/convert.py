"""Conversions that need torch and transformers; imported only when one is to be made."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from common.errors import ConfigError

log = logging.getLogger(__name__)

TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<turn|>")
"""Tokens that end a turn in known chat formats; one counts when the model's own template writes it."""
_GGUF_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def convert_gguf(source: Path, dtype: str, out: Path) -> None:
    """Write a GGUF file as a plain folder: safetensors in ``dtype``, tokenizer, template, generation config.

    transformers keeps GGUF weights packed unless told to dequantize. Raises ``ConfigError`` for a
    file or an architecture that transformers does not read.
    """
    import torch
    import transformers
    from transformers.utils.quantization_config import GgufConfig

    log.info("converting %s to safetensors (%s), once", source.name, dtype)
    transformers.utils.logging.set_verbosity_error()
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except (ValueError, KeyError, NotImplementedError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"{source}: transformers {transformers.__version__} cannot read this GGUF file: {_first_line(error)}. "
            "Give the model's safetensors folder instead"
        ) from error
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _write_generation_config(transformers, model, tokenizer, gguf_end_ids(source), out)


def gguf_end_ids(source: Path) -> list[int]:
    """The ids that a GGUF file itself names as ends: of a sequence, of a turn, of a message."""
    import gguf

    reader = gguf.GGUFReader(str(source))
    fields = [reader.get_field(key) for key in _GGUF_END_KEYS]
    return [int(field.contents()) for field in fields if field is not None]


def _write_generation_config(transformers: Any, model: Any, tokenizer: Any, end_ids: list[int], out: Path) -> None:
    template = tokenizer.chat_template or ""
    vocab = tokenizer.get_vocab()
    written = [vocab[token] for token in TURN_ENDS if token in vocab and token in str(template)]
    own = model.generation_config.eos_token_id
    ids = [*([] if own is None else own if isinstance(own, list) else [own]), *end_ids, *written]
    unique = list(dict.fromkeys(int(i) for i in ids if i is not None))
    if not unique:
        log.warning("the model names no end token: only max_tokens and stop strings will end its outputs")
    config = transformers.GenerationConfig(
        bos_token_id=model.generation_config.bos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        eos_token_id=unique or None,
    )
    config.save_pretrained(out)


def convert_tokenizer(source: Path, out: Path, *, trust_remote_code: bool) -> None:
    """Write ``source``'s tokenizer as tokenizer.json into ``out`` and link the folder's other files there.

    Raises ``ConfigError`` when transformers cannot make a fast tokenizer of it.
    """
    import transformers

    log.info("converting the tokenizer of %s to tokenizer.json, once", source)
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(out)
    except Exception as error:  # each tokenizer class fails in its own way, and all mean the same to the user
        raise ConfigError(f"{source}: its tokenizer cannot be converted: {_first_line(error)}") from error
    if not (out / "tokenizer.json").is_file():
        raise ConfigError(f"{source}: its tokenizer has no fast (tokenizer.json) form; give --tokenizer FOLDER")
    for path in source.iterdir():
        if not (out / path.name).exists():
            os.symlink(path.resolve(), out / path.name)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

"""What is read of a model's folder: limits, end ids, defaults, templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import ModelConfig, ServerConfig
from common.errors import ConfigError
from gateway.fields import GenerationFields
from tests.unit.text_tokenizers import byte_level_json
from tokenizer_proc.main import load
from tokenizer_proc.model_info import DEFAULT_RANGES, ModelInfo, load_model_info


def folder(path: Path, **files: Any) -> Path:
    """A model folder; keyword ``config`` is config.json and so on."""
    files.setdefault("config", {"vocab_size": 420, "max_position_embeddings": 128})
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    (path / "tokenizer.json").write_text(byte_level_json())
    return path


def info(path: Path, **model: Any) -> ModelInfo:
    return load_model_info(ServerConfig(model_dir=str(path), model=ModelConfig(**model)))


def test_limits_come_from_the_config(tmp_path: Path) -> None:
    found = info(folder(tmp_path))
    assert (found.vocab_size, found.context_len) == (420, 128)
    assert info(tmp_path, context_length=32).context_len == 32


def test_limits_of_a_nested_text_config(tmp_path: Path) -> None:
    nested = {"text_config": {"vocab_size": 99, "max_position_embeddings": 7}, "eos_token_id": 3}
    found = info(folder(tmp_path, config=nested))
    assert (found.vocab_size, found.context_len, found.eos_token_ids) == (99, 7, (3,))


@pytest.mark.parametrize("key", ["n_positions", "max_seq_len", "n_ctx", "seq_length"])
def test_other_names_of_the_context_length(tmp_path: Path, key: str) -> None:
    assert info(folder(tmp_path, config={"vocab_size": 420, key: 77})).context_len == 77


def test_an_unknown_context_length_names_the_flag(tmp_path: Path) -> None:
    folder(tmp_path, config={"vocab_size": 420}, tokenizer_config={"model_max_length": 1e30})
    with pytest.raises(ConfigError, match="--context-length"):
        info(tmp_path)


def test_end_ids_of_the_generation_config_come_first(tmp_path: Path) -> None:
    config = {"vocab_size": 420, "max_position_embeddings": 8, "eos_token_id": 5}
    assert info(folder(tmp_path, config=config)).eos_token_ids == (5,)
    assert info(folder(tmp_path, config=config, generation_config={"eos_token_id": [9, 6]})).eos_token_ids == (6, 9)


def test_sampling_defaults_can_be_switched_off(tmp_path: Path) -> None:
    folder(tmp_path, generation_config={"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 9})
    assert info(tmp_path).default_sampling == {"temperature": 0.6, "top_k": 20.0}
    assert info(tmp_path, sampling_defaults="openai").default_sampling == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 5), ("temperature", float("nan")), ("temperature", "hot"), ("top_p", 0), ("top_p", True),
     ("top_k", -2), ("min_p", 1.5), ("repetition_penalty", 0)],
)  # fmt: skip
def test_sampling_defaults_out_of_range_end_the_start(tmp_path: Path, key: str, value: Any) -> None:
    folder(tmp_path, generation_config={key: value})
    with pytest.raises(ConfigError, match=f"default {key} is .* --sampling-defaults openai"):
        info(tmp_path)
    assert info(tmp_path, sampling_defaults="openai").default_sampling == {}


def test_sampling_defaults_have_the_ranges_of_requests(tmp_path: Path) -> None:
    generation = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": None, "repetition_penalty": 2}
    found = info(folder(tmp_path, generation_config=generation)).default_sampling
    assert found == {"temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 2}
    for key, (low, high) in DEFAULT_RANGES.items():
        limits = {type(limit).__name__: limit for limit in GenerationFields.model_fields[key].metadata}
        assert limits["Le"].le == high
        assert (limits["Gt"].gt if key == "top_p" else limits["Ge"].ge) == low


def test_special_tokens_as_text_or_as_objects(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True})
    assert info(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_templates_from_each_place(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_config={"chat_template": "A"})
    assert info(tmp_path).templates == {"default": "A"}
    both = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    folder(tmp_path, tokenizer_config={"chat_template": both})
    assert info(tmp_path).templates == {"default": "A", "tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("J")
    assert info(tmp_path).templates == {"default": "J", "tool_use": "T"}
    assert info(tmp_path, chat_template="{{ 1 }}").templates == {"default": "{{ 1 }}"}
    (tmp_path / "mine.jinja").write_text("M")
    assert info(tmp_path, chat_template=str(tmp_path / "mine.jinja")).templates == {"default": "M"}
    with pytest.raises(ConfigError, match="nowhere"):
        info(tmp_path, chat_template="/nowhere")


def test_files_that_cannot_be_used_name_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        info(tmp_path)
    folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(ServerConfig(model_dir=str(tmp_path)), 0)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="JSON"):
        info(tmp_path)


def test_ready_says_what_a_gateway_needs(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    folder(tmp_path, tokenizer_config={"chat_template": template}, generation_config={"top_p": 0.9})
    _, ready = load(ServerConfig(model_dir=str(tmp_path), model=ModelConfig(reasoning_parser="deepseek-r1")), 4)
    assert (ready.generation, ready.context_len, ready.vocab_size, ready.has_chat_template) == (4, 128, 420, True)
    assert (ready.default_sampling, ready.chat_template, ready.reasoning_opens) == ({"top_p": 0.9}, template, True)
    assert (ready.tool_parser, ready.reasoning_parser) == ("", "deepseek-r1")

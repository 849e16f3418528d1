"""The KV size calculator: shapes read from config.json, sizes read from words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from tools.size import main, parse_size, read_shape

LLAMA = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
    "dtype": "bfloat16",
    "max_position_embeddings": 8192,
}


def test_counts_kv_heads_not_query_heads() -> None:
    assert read_shape(LLAMA).bytes_per_token() == 2 * 30 * 3 * 64 * 2


def test_reads_gpt2_names_and_the_older_dtype_field() -> None:
    shape = read_shape({"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32", "n_positions": 1024})
    assert (shape.bytes_per_token(), shape.context_len) == (2 * 12 * 768 * 4, 1024)


def test_counts_attention_layers_of_a_hybrid_and_the_text_part_of_a_multimodal_model() -> None:
    hybrid = {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 15}
    assert read_shape(hybrid).layers == 15
    assert read_shape({"text_config": LLAMA, "vision_config": {}}) == read_shape(LLAMA)


def test_splits_heads_over_ranks_but_never_below_one() -> None:
    assert read_shape(LLAMA).bytes_per_token(tp_size=3) * 3 == read_shape(LLAMA).bytes_per_token()
    assert read_shape(LLAMA).bytes_per_token(tp_size=6) == read_shape(LLAMA).bytes_per_token(tp_size=3)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("24G", 24 * 10**9), ("500 MB", 500 * 10**6), ("1.5KiB", 1536), ("77", 77)],
)
def test_reads_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-4G", "4 parsecs"])
def test_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


def test_prints_the_flag_that_uses_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    assert main(["--model", str(tmp_path), "--memory", "24MiB"]) == 0
    pages = (23 << 20) // (23040 * 16)
    assert f"--max-total-tokens {pages * 16}" in capsys.readouterr().out


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nowhere"]) == 2
    assert "--model /nowhere: no config.json there" in capsys.readouterr().err

"""What a model's files decide, on live servers: no chat template, sampling defaults, a reasoning block that closes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.scripted_folder import make_scripted_folder
from tests.integration.server import Server

pytestmark = pytest.mark.integration
Start = Callable[..., Server]
USER = [{"role": "user", "content": "hi"}]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>{{ '\n' }}"
)


def folder_with(tiny_folder: Path, target: Path, **generation: Any) -> Path:
    """A copy of the tiny model without a chat template, with a generation_config.json."""
    shutil.copytree(tiny_folder, target)
    about = json.loads((target / "tokenizer_config.json").read_text())
    del about["chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(about))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    return target


def texts(server: Server) -> set[str]:
    """What eight seeds give at temperature 2."""
    body = {"prompt": "to be", "max_tokens": 12, "temperature": 2, "ignore_eos": True}
    found = set()
    for seed in range(8):
        answer = httpx.post(server.url + "/v1/completions", json={**body, "seed": seed}, timeout=60)
        assert answer.status_code == 200, answer.text
        found.add(answer.json()["choices"][0]["text"])
    return found


def test_defaults_of_the_model_hold_and_a_chat_needs_a_template(
    server: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    one = server(model=folder_with(tiny_folder, tmp_path / "model", top_k=1))
    assert len(texts(one)) == 1, "top_k 1 leaves no choice"
    for stream in (False, True):
        body = {"messages": USER, "max_tokens": 4, "stream": stream}
        refused = httpx.post(one.url + "/v1/chat/completions", json=body, timeout=60)
        assert refused.status_code == 400
        assert "--chat-template" in refused.json()["error"]["message"]
    refused = httpx.post(one.url + "/tokenize", json={"messages": USER}, timeout=60)
    assert refused.status_code == 400 and "--chat-template" in refused.json()["error"]["message"]


def test_sampling_defaults_openai_leaves_the_models_out(server: Start, tiny_folder: Path, tmp_path: Path) -> None:
    one = server("--sampling-defaults", "openai", model=folder_with(tiny_folder, tmp_path / "model", top_k=1))
    assert len(texts(one)) > 1
    info = httpx.get(one.url + "/get_server_info", timeout=60).json()
    assert "default_sampling" not in info["model"]


def test_a_default_out_of_range_ends_the_start_with_the_way_out(
    server: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    one = server(model=folder_with(tiny_folder, tmp_path / "model", temperature=5), wait=False)
    assert one.process.wait(90) != 0
    assert "generation_config.json" in one.last_line and "temperature is 5" in one.last_line, one.last_line
    assert "--sampling-defaults openai" in one.last_line


@pytest.mark.parametrize("parser", ["qwen3", "deepseek-r1"])
def test_a_reasoning_block_that_closes_is_told_apart(server: Start, tmp_path: Path, parser: str) -> None:
    folder = make_scripted_folder(tmp_path / "model", "\n", "Ab</think>Yes")
    template = THINKING
    if parser == "qwen3":  # the other way to name one
        template = str(tmp_path / "thinking.jinja")
        Path(template).write_text(THINKING)
    one = server("--reasoning-parser", parser, "--chat-template", template, model=folder)
    body = {"messages": USER, "temperature": 0, "max_tokens": 64}
    whole = httpx.post(one.url + "/v1/chat/completions", json=body, timeout=60).json()
    (choice,) = whole["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Ab", "Yes")
    assert choice["finish_reason"] == "stop"
    plain = httpx.post(one.url + "/tokenize", json={"prompt": "Ab</think>"}, timeout=60).json()["tokens"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(plain)
    # This stop string holds the mark's tokens and the answer's back, and they come together.
    together = httpx.post(one.url + "/v1/chat/completions", json={**body, "stop": "</think>Yes!"}, timeout=60).json()
    assert together["usage"] == whole["usage"] | {"prompt_tokens_details": together["usage"]["prompt_tokens_details"]}

    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = httpx.post(one.url + "/v1/chat/completions", json=body, timeout=60).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Ab"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes"
    kinds = [key for delta in deltas for key in ("reasoning_content", "content") if delta.get(key)]
    assert kinds == sorted(kinds, reverse=True), "content comes behind all reasoning"
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] > len(plain)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(plain)

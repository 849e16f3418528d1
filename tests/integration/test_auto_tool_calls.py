"""tool_choice auto with a model that opens a call by itself: from that token on the grammar holds.

The model is a random one, and a bias on the family's opening token makes it open a call somewhere in its text:
everything it writes after that, at temperature 1, would be noise without the grammar.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.integration.client import TIMEOUT_S, events
from tests.integration.conftest import CPU_ARGS
from tests.integration.server import Server
from tests.integration.tiny_folder import make_tiny_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
CHAT = "/v1/chat/completions"
QUICK = {"hermes", "mistral", "qwen3_coder"}
"""Families of the suite; the others are slow tests."""
OPENING = {
    "hermes": "<tool_call>", "qwen3_coder": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]",
    "glm45": "<tool_call>", "deepseek_v3": "<｜tool▁calls▁begin｜>", "kimi_k2": "<|tool_calls_section_begin|>",
}  # fmt: skip
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 2, "maxLength": 12}, "copies": {"type": "integer", "maximum": 99},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "gift": {"type": "boolean"},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
    },
    "required": ["title", "copies", "code", "day"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS = {"order_book": BOOK, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NUM_CHOICES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = sorted({mark for mark in OPENING.values() if mark != "<tool_call>"})
    return make_tiny_folder(tmp_path_factory.mktemp("models") / "tiny", special=special, plain=["<tool_call>"])


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(OPENING)],
)
def family(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Server]]:
    server = Server(
        ["--model", str(folder), "--served-model-name", "tiny", "--tool-call-parser", request.param, *CPU_ARGS]
    )
    try:
        yield request.param, server.wait_ready(300)
    finally:
        server.close()


def body(folder: Path, name: str, bias: float, **more: Any) -> dict[str, Any]:
    opening = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(OPENING[name])
    assert opening is not None
    messages = [{"role": "user", "content": "Order me a book."}]
    return {
        "model": "tiny", "messages": messages, "tools": TOOLS, "tool_choice": "auto", "temperature": 1, "seed": 5,
        "logit_bias": {str(opening): bias}, "max_tokens": 400, "n": NUM_CHOICES, **more,
    }  # fmt: skip


def whole(url: str, asked: dict[str, Any]) -> dict[int, dict[str, Any]]:
    response = httpx.post(url + CHAT, json=asked, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return {choice["index"]: choice for choice in response.json()["choices"]}


def streamed(url: str, asked: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices put together from their deltas, each call's name checked to come before its arguments."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events(url, CHAT, asked):
        for choice in event["choices"]:
            own = choices.setdefault(choice["index"], {"message": {"content": "", "tool_calls": []}})
            message, delta = own["message"], choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    message["tool_calls"].append({"id": call["id"], "function": dict(call["function"], arguments="")})
                assert call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["function"]["arguments"] += call["function"].get("arguments") or ""
            own["finish_reason"] = choice["finish_reason"] or own.get("finish_reason")
    return choices


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    found = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


def content_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] or ""


@pytest.mark.parametrize("parallel", [False, True])
def test_a_call_the_model_opens_is_valid_whole_and_streamed(
    family: tuple[str, Server], folder: Path, parallel: bool
) -> None:
    name, server = family
    names: Counter[str] = Counter()
    num_with_text = 0
    ids: list[str] = []
    for bias in (7, 4):
        asked = body(folder, name, bias, parallel_tool_calls=parallel)
        one, other = whole(server.url, asked), streamed(server.url, asked)
        assert one.keys() == other.keys() == set(range(NUM_CHOICES))
        for index, choice in one.items():
            if choice["finish_reason"] == "tool_calls":
                found = calls_of(choice)
                assert found and (parallel or len(found) == 1)
                for called, arguments in found:
                    jsonschema.Draft202012Validator(SCHEMAS[called]).validate(arguments)
                    names[called] += 1
                num_with_text += bool(content_of(choice).strip())
            calls = [each["message"].get("tool_calls") or () for each in (choice, other[index])]
            mine, theirs = ([call["function"] for call in each] for each in calls)
            assert mine == theirs and content_of(choice) == content_of(other[index])
            assert choice["finish_reason"] == other[index]["finish_reason"]
            ids += [call["id"] for each in calls for call in each]
    assert set(names) == set(SCHEMAS) and num_with_text > 0, (names, num_with_text)
    if name != "kimi_k2":  # its ids are the model's own: function and number
        assert len(set(ids)) == len(ids)

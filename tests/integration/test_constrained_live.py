"""Constrained output beside everything else a request may ask for, on the batch-invariant path.

Each combination is asked for alone, and then with all others at once in a KV cache too small for them (so that rows
are preempted and computed again) and prompts cut into chunks: it must be the same, and valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.integration.client import TIMEOUT_S, post
from tests.integration.conftest import CPU_ARGS
from tests.integration.server import Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
PATH = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object", "additionalProperties": False,
    "required": ["a_long_key_that_is_forced", "numbers", "text", "kind"],
    "properties": {
        "a_long_key_that_is_forced": {"type": "boolean"},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 8,
                    "maxItems": 12},
        "text": {"type": "string", "minLength": 40, "maxLength": 80}, "kind": {"enum": ["é", "🙂", "plain"]},
    },
}  # fmt: skip
LONG = "Where is the station? It is over there, by the river. " * 6
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {}, "greedy": {"temperature": 0}, "choices": {"n": 3}, "logprobs": {"logprobs": True, "top_logprobs": 2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "filters": {"top_p": 0.8, "top_k": 20, "min_p": 0.01}, "bias": {"logit_bias": {"100": 5, "120": -100}},
    "chunked": {"messages": [{"role": "user", "content": LONG}]}, "min_tokens": {"min_tokens": 60},
    "stop never found": {"stop": ["\x00never"]},
    "all": {"n": 2, "presence_penalty": 0.4, "top_p": 0.9, "logprobs": True, "stop": ["\x00never"],
            "messages": [{"role": "user", "content": LONG + "!"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[Server]:
    args = ["--model", str(tiny_folder), "--served-model-name", "tiny", *CPU_ARGS, "--dtype", "bfloat16"]
    args += ["--max-total-tokens", "1024", "--chunked-prefill-size", "32", "--schedule-conservativeness", "0.01"]
    server = Server(args)
    try:
        yield server.wait_ready(300)
    finally:
        server.close()


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "messages": [{"role": "user", "content": "to be"}], "temperature": 1, "seed": 11,
        "max_tokens": 220, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        **EXTRAS[name], **more,
    }  # fmt: skip


def choices(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = post(server.url, PATH, body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def num_preemptions(server: Server) -> float:
    lines = httpx.get(server.url + "/metrics", timeout=TIMEOUT_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("quintet:num_preemptions_total"))


def test_every_combination_is_valid_and_the_same_alone_and_under_preemption(small: Server) -> None:
    alone = {name: choices(small, asked(name)) for name in EXTRAS}
    for name, found in alone.items():
        assert len(found) == EXTRAS[name].get("n", 1)
        for choice in found:
            assert choice["finish_reason"] == "stop", name
            jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(choice["message"]["content"]))
    if "path cpu-fast" not in small.log:
        pytest.skip("this machine has no batch-invariant path for bfloat16")
    before = num_preemptions(small)
    with ThreadPoolExecutor(2 * len(EXTRAS)) as pool:
        together = list(pool.map(lambda name: choices(small, asked(name)), [*EXTRAS, *EXTRAS]))
    assert together == [*alone.values(), *alone.values()]
    assert num_preemptions(small) > before


def test_a_stop_string_within_the_json_ends_it(small: Server) -> None:
    (plain,) = choices(small, asked("plain"))
    text = plain["message"]["content"]
    for stop in ('"numbers": [', text[-30:-27], "forced"):
        for name in ("plain", "logprobs"):
            (choice,) = choices(small, asked(name, stop=[stop]))
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == text[: text.index(stop)]


def test_cut_off_at_max_tokens_it_says_length(small: Server) -> None:
    (plain,) = choices(small, asked("plain"))
    for max_tokens in (1, 2, 7, 50):
        body = asked("plain", max_tokens=max_tokens)
        response = post(small.url, PATH, body).json()
        assert response["usage"]["completion_tokens"] == max_tokens
        assert response["choices"][0]["finish_reason"] == "length"
        assert plain["message"]["content"].startswith(response["choices"][0]["message"]["content"])

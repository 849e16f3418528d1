"""Text streamed is text whole, for every combination of stop, log-probabilities, n and tools.

The random model's byte-level tokens join to bytes that are no UTF-8, to halves of characters and to
marks that combine; grammars force emoji, CJK and combining marks. So every request is sent twice,
whole and streamed, and both must give the same text, ending, tokens and counts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.integration.client import TIMEOUT_S
from tests.integration.server import Server

pytestmark = pytest.mark.integration
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WILD = [
    "👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈", "日本語の文章、漢字かな交じり",
    "e\u0301a\u0308n\u0303 Z\u0351\u036ba\u034cl\u033e", "עברית العربية ไทย नमस्ते", "𝒳𝔘🧊 𐍈",
]  # fmt: skip
"""What a grammar forces: joined emoji, CJK, combining marks, other scripts, beyond the basic plane."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"text": {"enum": WILD}, "free": {"type": "string", "maxLength": 12}},
            "required": ["text", "free"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Choice:
    """What a client has of one choice."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Index -> name, arguments."""
    data: bytes = b""
    """Bytes of the tokens with log-probabilities."""
    tokens: int = 0
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Take in a choice of a whole reply, or of an event."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        for position, call in enumerate(message.get("tool_calls") or ()):
            own = self.calls.setdefault(call.get("index", position), ["", ""])
            own[0] += call["function"].get("name") or ""
            own[1] += call["function"]["arguments"]
        table = choice.get("logprobs") or {}
        for item in table.get("content") or ():
            self.data += bytes(item["bytes"])
        self.tokens += len(table.get("content") or table.get("tokens") or ())
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


@dataclass
class Reply:
    """All choices and the usage."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)

    def add(self, body: dict[str, Any]) -> None:
        """Take in a whole reply, or an event."""
        assert "error" not in body, body
        for choice in body["choices"]:
            self.choices.setdefault(choice["index"], Choice()).add(choice)
        if usage := body.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])


def whole_and_streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> Reply:
    """Both forms of one request; fails unless they are equal and all of the text is text."""
    whole, streamed = Reply(), Reply()
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    whole.add(response.json())
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=asked) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        streamed.add(json.loads(line.removeprefix("data: ")))
    assert streamed == whole, body
    for choice in whole.choices.values():
        choice.text.encode()  # no lone surrogates
    return whole


def all_pass(client: httpx.Client, path: str, bodies: list[dict[str, Any]]) -> list[Reply]:
    """All of them, some at once."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda body: whole_and_streamed(client, path, body), bodies))


@pytest.fixture(scope="module")
def client(session_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=session_server.url, timeout=TIMEOUT_S, trust_env=False) as one:
        yield one


def combinations(seeds: int, **more: Any) -> list[dict[str, Any]]:
    """Bodies with every combination of log-probabilities, n and seed; on random text."""
    return [
        {"model": "tiny", "temperature": 1, "max_tokens": 40, "ignore_eos": True, "n": n, "seed": seed, **logprobs,
         **more}
        for logprobs, n, seed in itertools.product(LOGPROBS, (1, 3), range(seeds))
    ]  # fmt: skip


LOGPROBS: list[dict[str, Any]] = [{}, {"logprobs": True, "top_logprobs": 2}]
MESSAGES = [{"role": "user", "content": "à bientôt 🙂"}]


def test_bytes_that_are_no_text(client: httpx.Client) -> None:
    replies = all_pass(client, CHAT, combinations(4, messages=MESSAGES, skip_special_tokens=False))
    texts = [choice.text for reply in replies for choice in reply.choices.values()]
    assert sum("\ufffd" in text for text in texts) > len(texts) / 2
    for reply in replies:
        for choice in reply.choices.values():
            if choice.tokens:
                assert choice.tokens == 40 and choice.data.decode("utf-8", "replace") == choice.text


def test_stop_strings_cut_from_such_text(client: httpx.Client) -> None:
    """Stops taken from what comes: of one character, across tokens, the replacement character, never found."""
    (plain,) = all_pass(client, CHAT, [{**combinations(1, messages=MESSAGES)[0]}])
    text = plain.choices[0].text
    stops = [text[9], text[9:12], text[20:27], "\ufffd", [text[30:32], "never"], "never"]
    bodies = [
        {**body, "stop": stop, "include_stop_str_in_output": include}
        for body in combinations(1, messages=MESSAGES) for stop in stops for include in (False, True)
    ]  # fmt: skip
    for body, reply in zip(bodies, all_pass(client, CHAT, bodies), strict=True):
        stop = body["stop"] if isinstance(body["stop"], str) else body["stop"][0]
        at = text.find(stop)
        expected = text if at < 0 else text[: at + len(stop) * body["include_stop_str_in_output"]]
        assert reply.choices[0].text == expected
        assert reply.choices[0].finish_reason == ("length" if at < 0 else "stop")
        for choice in reply.choices.values():
            assert (stop in choice.text) <= body["include_stop_str_in_output"]


def test_completions_with_echo_and_tables(client: httpx.Client) -> None:
    bodies = [
        {"model": "tiny", "prompt": prompt, "temperature": 1, "seed": 2, "max_tokens": 24, "ignore_eos": True, "n": n,
         "logprobs": logprobs, "echo": echo, "stop": stop}
        for prompt in ("日本 e\u0301🙂", [[200, 201], [70]]) for n in (1, 2) for logprobs in (None, 0, 2)
        for echo in (False, True) for stop in (None, "\ufffd", "zz")
    ]  # fmt: skip
    for body, reply in zip(bodies, all_pass(client, COMPLETIONS, bodies), strict=True):
        assert len(reply.choices) == body["n"] * (1 if isinstance(body["prompt"], str) else 2)
        if body["echo"] and isinstance(body["prompt"], str):
            assert all(choice.text.startswith(body["prompt"]) for choice in reply.choices.values())


@pytest.mark.parametrize("constraint", ["choice", "regex", "json_schema"])
def test_emoji_cjk_and_marks_forced_by_a_grammar(client: httpx.Client, constraint: str) -> None:
    forced: dict[str, Any] = {
        "choice": {"choice": WILD},
        "regex": {"regex": "(" + "|".join(WILD) + "){2}"},
        "json_schema": {"json_schema": {"enum": WILD}},
    }[constraint]
    stops = [None, "👦", "の文", "\u0301a", "\u200d"]
    bodies = [
        {**body, **forced, "ignore_eos": False, "max_tokens": 300, "stop": stop}
        for body in combinations(1, messages=MESSAGES) for stop in stops
    ]  # fmt: skip
    for body, reply in zip(bodies, all_pass(client, CHAT, bodies), strict=True):
        for choice in reply.choices.values():
            assert choice.finish_reason == "stop" and "\ufffd" not in choice.text
            if body["stop"]:
                assert body["stop"] not in choice.text
            elif constraint == "json_schema":
                assert json.loads(choice.text) in WILD
            else:
                assert any(choice.text.startswith(text) for text in WILD)


@pytest.mark.parametrize("tool_choice", ["auto", "required", "none"])
def test_tools(client: httpx.Client, tool_choice: str) -> None:
    tools = {"tools": [TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False}
    stops: list[Any] = [None, "日本", "\ufffd"]
    bodies = [
        {**body, **tools, "ignore_eos": False, "max_tokens": 250 if tool_choice == "required" else 60, "stop": stop}
        for body in combinations(2, messages=MESSAGES) for stop in stops
    ]  # fmt: skip
    for body, reply in zip(bodies, all_pass(client, CHAT, bodies), strict=True):
        for choice in reply.choices.values():
            if tool_choice == "required" and body["stop"] is None:
                ((name, arguments),) = choice.calls.values()
                assert name == "say" and json.loads(arguments)["text"] in WILD
                assert choice.finish_reason == "tool_calls"
            elif tool_choice == "none":
                assert not choice.calls


def test_sglangs_form_repeats_the_text_so_far(client: httpx.Client) -> None:
    def last_event(body: dict[str, Any]) -> dict[str, Any]:
        seen = ""
        with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event: dict[str, Any] = json.loads(line[6:])
                    assert event["text"].startswith(seen)
                    seen = event["text"]
        return event

    for seed in range(4):
        sampling = {"max_new_tokens": 30, "temperature": 1, "sampling_seed": seed, "ignore_eos": True}
        body = {"text": "to be", "sampling_params": sampling, "return_logprob": True}
        whole = client.post("/generate", json=body).json()
        event = last_event(body)
        for one in (whole, event):
            del one["meta_info"]["id"], one["meta_info"]["e2e_latency"], one["meta_info"]["cached_tokens"]
        assert event["text"] == whole["text"] and event["output_ids"] == whole["output_ids"]
        assert event["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]

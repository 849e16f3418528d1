"""Spellings of constrained output, and tools: what the engine is told, what the client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from common.messages import ChatPrompt, Finish
from tests.unit.gateway_live import CHAT, Live, events, joined, live_gateway

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway(engine_options={"tool_parser": "hermes"}) as pair:
        yield pair


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": TAG}, "structural_tag", TAG),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"structural_tag": TAG}, "structural_tag", TAG),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"grammar": "g"}}, "ebnf", "g"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag", TAG),
    ],
)
def test_spelling_becomes_one_grammar(live: Live, fields: dict[str, Any], kind: str, text: Any) -> None:
    grammar = live.sent(**fields).grammar
    assert grammar is not None
    assert grammar.kind == kind
    assert (grammar.text if isinstance(text, str) else json.loads(grammar.text)) == text
    if isinstance(text, dict):  # the order of properties is the order of the output
        assert list(json.loads(grammar.text)) == list(text)


def test_text_is_no_constraint(live: Live) -> None:
    assert live.sent(response_format={"type": "text"}).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": ["json_object"]}}, "response_format.type"),
        ({"response_format": {"type": "text", "extra": 1}}, "response_format.extra"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"jsonn": SCHEMA}}, "structured_outputs.jsonn"),
        ({"regex": "a" * 300_000}, "regex"),
    ],
)
def test_bad_constraint_is_400(live: Live, fields: dict[str, Any], param: str) -> None:
    response = live.chat(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


TOOLS = [tool("get_weather"), tool("get_time")]
CALL = 'Let me see. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_tool_call_whole(live: Live) -> None:
    with live.script(lambda _: Script(pieces=tuple(CALL))):
        choice = live.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert choice["message"]["content"].strip() == "Let me see."


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streamed_tool_call_joins_to_the_whole_one(live: Live, size: int) -> None:
    pieces = tuple(CALL[i : i + size] for i in range(0, len(CALL), size))
    with live.script(lambda _: Script(pieces=pieces)):
        chunks = events(live.chat(tools=TOOLS, stream=True).text)
    deltas = [
        call for chunk in chunks[:-1] for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])
    ]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert deltas[0]["id"] and deltas[0]["type"] == "function" and deltas[0]["index"] == 0
    assert all("name" not in delta["function"] for delta in deltas[1:])
    assert json.loads("".join(delta["function"]["arguments"] for delta in deltas)) == {"city": "Paris"}
    assert joined(chunks).strip() == "Let me see."
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_cut_off_call_keeps_length(live: Live) -> None:
    with live.script(lambda _: Script(pieces=(CALL[:50],), finish=Finish(reason="length"))):
        assert live.chat(tools=TOOLS).json()["choices"][0]["finish_reason"] == "length"


def test_tools_reach_the_template_unless_none(live: Live) -> None:
    prompt = live.sent(tools=TOOLS).prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools == TOOLS
    prompt = live.sent(tools=TOOLS, tool_choice="none").prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools is None


def test_required_and_named_bind_from_the_start_and_auto_later(live: Live) -> None:
    auto = live.sent(tools=TOOLS).grammar
    assert auto is None or auto.lazy_trigger
    for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
        grammar = live.sent(tools=TOOLS, tool_choice=choice).grammar
        assert grammar is not None and not grammar.lazy_trigger


def test_response_format_beside_tools(live: Live) -> None:
    own = {"type": "json_object"}
    grammar = live.sent(tools=TOOLS, response_format=own).grammar
    assert grammar is not None and grammar.kind == "json_object"
    assert live.chat(tools=TOOLS, tool_choice="required", response_format=own).status_code == 400


def test_log_probabilities_survive_the_tool_parser(live: Live) -> None:
    with live.script(lambda _: Script(pieces=tuple(CALL))):
        body = {"messages": CHAT, "tools": TOOLS, "logprobs": True, "stream": True}
        chunks = events(live.post("/v1/chat/completions", body).text)
    tokens = [
        item["token"]
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
        for item in choice["logprobs"]["content"]
    ]
    assert "".join(tokens) == CALL


THOUGHT = "<think>\nParis? Yes.\n</think>\n\nIt is Paris."


@pytest.fixture(scope="module")
def thinker() -> Iterator[Live]:
    with live_gateway(engine_options={"reasoning_parser": "qwen3", "tool_parser": "hermes"}) as pair:
        yield pair


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_reasoning_is_told_from_the_answer(thinker: Live, size: int) -> None:
    pieces = tuple(THOUGHT[i : i + size] for i in range(0, len(THOUGHT), size))
    with thinker.script(lambda _: Script(pieces=pieces)):
        body = thinker.chat().json()
        chunks = events(thinker.chat(stream=True).text)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Paris? Yes.", "It is Paris.")
    assert (joined(chunks, key="reasoning_content"), joined(chunks)) == ("Paris? Yes.", "It is Paris.")
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    num_chars = THOUGHT.index("</think>") + len("</think>")
    assert counted == -(-num_chars // size), "pieces that begin before the end of the mark"


def test_reasoning_then_a_tool_call(thinker: Live) -> None:
    with thinker.script(lambda _: Script(pieces=tuple(f"<think>hm</think>\n{CALL}"))):
        choice = thinker.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert choice["finish_reason"] == "tool_calls"


def test_a_constraint_waits_for_the_end_of_the_reasoning() -> None:
    with live_gateway(engine_options={"reasoning_parser": "deepseek-r1"}) as pair:
        grammar = pair.sent(response_format={"type": "json_object"}).grammar
        assert grammar is not None and grammar.lazy_trigger == "</think>"


def test_completions_are_raw_text(thinker: Live) -> None:
    with thinker.script(lambda _: Script(pieces=(THOUGHT,))):
        assert thinker.complete().json()["choices"][0]["text"] == THOUGHT


HISTORY = [
    {"role": "user", "content": "Time?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "é"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "noon"},
]


def test_a_template_without_tools_gets_them_as_text() -> None:
    with live_gateway(engine_options={"chat_template": "{{ messages }}"}) as pair:
        prompt = pair.sent(messages=HISTORY, tools=TOOLS).prompt
        assert isinstance(prompt, ChatPrompt) and prompt.tools is None
        system, user, assistant, result = prompt.messages
        assert system["role"] == "system" and "get_weather" in system["content"] and "<tool_call>" in system["content"]
        assert user == HISTORY[0]
        call = '<tool_call>\n{"name": "get_time", "arguments": {"city": "é"}}\n</tool_call>'
        assert assistant == {"role": "assistant", "content": f"I look.\n{call}"}
        assert result == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
        prompt = pair.sent(messages=HISTORY).prompt
        assert isinstance(prompt, ChatPrompt) and prompt.messages[0]["role"] == "user"
        prompt = pair.sent(messages=[{"role": "system", "content": "S"}, *HISTORY], tools=TOOLS).prompt
        assert isinstance(prompt, ChatPrompt) and prompt.messages[0]["content"].startswith("S\n\nYou can call")


def test_a_template_with_tools_gets_them_as_they_are() -> None:
    with live_gateway(engine_options={"chat_template": "{% if tools %}<tool_call>{% endif %}"}) as pair:
        prompt = pair.sent(messages=HISTORY, tools=TOOLS).prompt
        assert isinstance(prompt, ChatPrompt) and prompt.tools == TOOLS
        assert prompt.messages == HISTORY


def test_streamed_text_is_the_whole_text_for_every_combination(live: Live) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {"city": "東京😀"}}\n</tool_call>'
    text = f"ß😀漢字e\u0301 \ufffd {call}"
    script = Script(pieces=tuple(text))
    for n in (1, 2):
        for logprobs in (False, True):
            for tools in (None, TOOLS):
                with live.script(lambda _: script):
                    fields = {"n": n, "logprobs": logprobs, "tools": tools}
                    whole = live.chat(**fields).json()["choices"]
                    chunks = events(live.chat(stream=True, **fields).text)
                for index in range(n):
                    message = whole[index]["message"]
                    assert joined(chunks, index) == (message["content"] or "")
                    deltas = [
                        call["function"]["arguments"]
                        for chunk in chunks[:-1]
                        for choice in chunk["choices"]
                        if choice["index"] == index
                        for call in choice["delta"].get("tool_calls", [])
                    ]
                    calls = message.get("tool_calls", [])
                    assert "".join(deltas) == "".join(call["function"]["arguments"] for call in calls)
                    assert len(calls) == (1 if tools else 0)

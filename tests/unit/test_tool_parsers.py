"""Each family's published format becomes calls, and everything else stays text."""

from __future__ import annotations

import json

import pytest

from common.errors import ConfigError
from gateway.tool_parsers.base import Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart, collect
from gateway.tool_parsers.json_scan import JsonScanner
from gateway.tool_parsers.registry import ALIASES, PARSERS, create, detect, resolve_name
from tests.unit.tool_parser_cases import CASES, TEMPLATES, TOOLS, Case


def _events(case: Case) -> list[Event]:
    parser = create(case.parser, TOOLS)
    return parser.feed(case.text) + parser.flush()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parser}-{CASES.index(case)}")
def test_published_format_is_understood(case: Case) -> None:
    events = _events(case)
    content, calls = collect(events)
    assert content == case.content
    assert [(call.name, call.arguments) for call in calls] == case.calls
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == case.reasoning
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("case", [case for case in CASES if case.calls], ids=lambda case: case.parser)
def test_name_comes_before_any_argument(case: Case) -> None:
    begun: list[int] = []
    for event in _events(case):
        if isinstance(event, ToolCallStart):
            assert event.index == len(begun) and event.name and event.id
            begun.append(event.index)
        elif isinstance(event, ToolArgumentsDelta):
            assert event.index == begun[-1] and event.text


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = create("hermes", TOOLS)
    parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')
    assert parser.num_calls == 1
    assert [event.text for event in parser.feed("ri") if isinstance(event, ToolArgumentsDelta)] == ["ri"]


def test_a_string_parameter_is_streamed_while_it_is_written() -> None:
    parser = create("qwen3_coder", TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nPa")
    assert [event.text for event in parser.feed('r"') if isinstance(event, ToolArgumentsDelta)] == ['r\\"']


def test_a_possible_mark_is_held_back_and_released() -> None:
    parser = create("hermes")
    assert collect(parser.feed("a <tool"))[0] == "a "
    assert collect(parser.feed("s"))[0] == "<tools"
    assert collect(parser.feed("<tool_cal"))[0] == ""
    assert collect(parser.flush())[0] == "<tool_cal"


def test_families_ids() -> None:
    mistral = create("mistral").feed('[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    assert isinstance(mistral[0], ToolCallStart) and len(mistral[0].id) == 9 and mistral[0].id.isalnum()
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ids = [event.id for event in create("kimi_k2").feed(call + call) if isinstance(event, ToolCallStart)]
    assert ids == ["functions.now:0", "functions.now:1"]
    later = create("kimi_k2")
    later.used_ids |= set(ids)
    ids = [event.id for event in later.feed(call) if isinstance(event, ToolCallStart)]
    assert ids == ["functions.now:2"], "a call of an earlier turn has that id"


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_family_is_found_from_the_template(name: str, template: str) -> None:
    assert detect(template) == name


def test_names_and_aliases() -> None:
    assert set(ALIASES.values()) <= PARSERS.keys() and not ALIASES.keys() & PARSERS.keys()
    assert resolve_name("qwen25") == "hermes"
    with pytest.raises(ConfigError, match="nope"):
        resolve_name("nope")


@pytest.mark.parametrize("text", ['{"a": [1, -2.5e3, "x\\u00e9", true, null, {}], "b": {"c": []}}', "{}", '{"": ""}'])
def test_scanner_passes_valid_json_through(text: str) -> None:
    scanner = JsonScanner()
    assert scanner.feed(text + " rest") == (text, len(text))
    assert scanner.status == "done"


@pytest.mark.parametrize(
    "text", ['{"a": 1,}', "{'a': 1}", '{"a" 1}', '{"a": 01}', '{"a": tru}', '{"a": "\\u12g4"}', "[1}", ","]
)
def test_scanner_stops_where_text_is_no_json(text: str) -> None:
    scanner = JsonScanner()
    scanner.feed(text)
    assert scanner.status == "error"


def test_scanner_mends_raw_control_characters_and_needless_backslashes() -> None:
    scanner = JsonScanner()
    out, _ = scanner.feed('{"a": "x\n\x01 \\d \\\' \\n"}')
    assert json.loads(out) == {"a": "x\n\x01 \\d ' \n"}


def test_a_long_text_of_beginnings_takes_linear_work() -> None:
    parser = create("hermes")
    text = '<tool_call>{"arguments": {"a": ' * 3000
    content, calls = collect([*parser.feed(text), *parser.flush()])
    assert content == text and not calls

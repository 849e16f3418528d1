"""Any split of a text gives the same events, and no text is lost or crashes a parser."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_parsers.base import ReasoningDelta, ToolCallStart, collect
from gateway.tool_parsers.registry import PARSERS
from tests.unit.tool_parser_cases import CASES, TOOLS

Result = tuple[str, list[tuple[str, str, str]], str]

_FRAGMENTS = [case.text for case in CASES] + [
    "<tool_call>", "</tool_call>", "<function=now>", "<parameter=city>", "</parameter>", "</function>",
    "<arg_key>k</arg_key>", "<arg_value>",
    '{"name": "now", ', '"arguments": ', '"parameters": {', "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "[now(",
    "a=1", ")]", "<|channel|>", "<|message|>", "<|end|>", "{}", "}", "\n", " ", '"', "\\", "é🙂", "<", "[", "text ",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>functions.now:0", "<|tool_call_argument_begin|>",
    "1", ",", ";",
]


def _run(name: str, pieces: list[str]) -> Result:
    ids = iter(range(10_000))
    parser = PARSERS[name](TOOLS, new_id=lambda: str(next(ids)))
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    content, calls = collect(events)
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return content, [(call.id, call.name, call.arguments) for call in calls], reasoning


def _cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(CASES) - 1), st.lists(st.integers(0, 1000), max_size=20))
def test_published_formats_do_not_depend_on_the_split(number: int, places: list[int]) -> None:
    case = CASES[number]
    assert _run(case.parser, _cut(case.text, places)) == _run(case.parser, [case.text])


def test_published_formats_character_by_character_and_cut_off_anywhere() -> None:
    for case in CASES:
        assert _run(case.parser, list(case.text)) == _run(case.parser, [case.text])
        for end in range(len(case.text)):
            text = case.text[:end]
            assert _run(case.parser, list(text)) == _run(case.parser, [text])


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_no_text_depends_on_the_split_or_crashes(name: str, text: str, places: list[int]) -> None:
    assert _run(name, _cut(text, places)) == _run(name, [text])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.text(alphabet="abc <[{\n.", max_size=40))
def test_text_without_marks_is_kept(name: str, text: str) -> None:
    content, calls, _ = _run(name, list(text))
    # Llama's and pythonic parsers drop white space before what might be a call at the very beginning.
    assert content.strip() == text.strip() and not calls


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8,
), max_size=4), st.lists(st.integers(0, 1000), max_size=8))
def test_any_arguments_come_through_whole(arguments: dict[str, object], places: list[int]) -> None:
    text = "<tool_call>\n" + json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"
    parser = PARSERS["hermes"]()
    events = [event for piece in _cut(text, places) for event in parser.feed(piece)] + parser.flush()
    _, calls = collect(events)
    assert json.loads(calls[0].arguments) == arguments
    assert sum(isinstance(event, ToolCallStart) for event in events) == 1

"""Reasoning is told from the answer, for every split of the text."""

from __future__ import annotations

import pytest

from common.messages import pack_i32
from gateway.output import ChoiceOutput
from gateway.reasoning.parser import ReasoningParser
from gateway.reasoning.registry import FORMATS, create, format_of
from gateway.tool_parsers.base import Event, ReasoningDelta, TextDelta
from gateway.tool_parsers.harmony import HarmonyParser
from gateway.tool_parsers.registry import create as tool_parser


def split(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    parts = [*(parser.feed(piece) for piece in pieces), parser.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


CASES = [
    ("<think>\nWhy?\n</think>\n\nBecause.", False, "Why?", "Because."),
    ("  \n<think>a</think>b", False, "a", "b"),
    ("no reasoning <think>here</think>", False, "", "no reasoning <think>here</think>"),
    ("  text", False, "", "  text"),
    ("<thin", False, "", "<thin"),
    ("<thin air", False, "", "<thin air"),
    ("", False, "", ""),
    ("\n", False, "", "\n"),
    ("<think></think>answer", False, "", "answer"),
    ("<think>\n\n</think>\n\nanswer", False, "", "answer"),
    ("<think>a < b </ think> c</think> d", False, "a < b </ think> c", " d"),
    ("<think>cut off </thin", False, "cut off </thin", ""),
    ("<think>cut off \n", False, "cut off \n", ""),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ("<think>a</think>\n\n", False, "a", ""),
    ("thought\n</think>\n\nanswer", True, "thought", "answer"),
    ("<think>thought</think>answer", True, "thought", "answer"),
    ("\nthought <think> more</think>answer", True, "thought <think> more", "answer"),
    ("all of it thought", True, "all of it thought", ""),
    ("<thi", True, "<thi", ""),
    ("</think>answer", True, "", "answer"),
    ("<think>é🙂</think>日本", False, "é🙂", "日本"),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), CASES)
def test_every_split_into_two_and_into_characters_gives_the_same(
    text: str, inside: bool, reasoning: str, content: str
) -> None:
    splits = [[text], list(text), *([text[:n], text[n:]] for n in range(len(text)))]
    for pieces in splits:
        assert split(ReasoningParser(starts_inside=inside), pieces) == (reasoning, content), pieces


def test_nothing_of_a_mark_is_ever_shown() -> None:
    parser = ReasoningParser()
    seen = [parser.feed(char) for char in "<think>deep</think>flat"]
    assert all("<" not in part.reasoning + part.content for part in seen)


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser(starts_inside=True)
    assert parser.feed("one two").reasoning == "one two"
    assert parser.feed(" </").reasoning == ""
    assert parser.feed("x").reasoning == " </x"


def test_a_split_unpacks_as_a_pair() -> None:
    reasoning, content = ReasoningParser().feed("<think>a</think>b")
    assert (reasoning, content) == ("a", "b")


def test_in_reasoning_follows_the_text() -> None:
    parser = ReasoningParser()
    places = [parser.in_reasoning]
    for piece in ("<think>", "a", "</think>", "b"):
        parser.feed(piece)
        places.append(parser.in_reasoning)
    assert places == [False, True, True, False, False]
    assert ReasoningParser(starts_inside=True).in_reasoning


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_reads_its_own_marks(name: str) -> None:
    form = FORMATS[name]
    assert split(create(name), [f"{form.opening}a{form.closing}b"]) == ("a", "b")


@pytest.mark.parametrize(
    ("name", "opens", "kwargs", "inside"),
    [
        ("deepseek-r1", False, {}, True),
        ("qwen3", False, {}, False),
        ("qwen3", True, {}, True),
        ("qwen3", True, {"enable_thinking": False}, False),
        ("qwen3", False, {"enable_thinking": True}, False),
        ("deepseek-v3", False, {}, False),
        ("deepseek-v3", False, {"thinking": True}, True),
    ],
)
def test_where_the_output_begins(name: str, opens: bool, kwargs: dict[str, bool], inside: bool) -> None:
    assert create(name, reasoning_opens=opens, template_kwargs=kwargs).in_reasoning is inside


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="qwen3"):
        format_of("qwen9")


def counted(output: ChoiceOutput, tokens: list[str], size: int) -> tuple[list[int], list[Event]]:
    """Reasoning tokens after every ``size`` tokens, and all events."""
    counts: list[int] = []
    events: list[Event] = []
    place = 0
    for at in range(0, len(tokens), size):
        piece = tokens[at : at + size]
        starts = [place + len("".join(piece[:n])) for n in range(len(piece))]
        place += len("".join(piece))
        events += output.feed("".join(piece), pack_i32(starts), last=at + size >= len(tokens))
        counts.append(output.reasoning_tokens)
    return counts, events


@pytest.mark.parametrize("size", range(1, 15))
def test_reasoning_tokens_are_counted_whatever_comes_together(size: int) -> None:
    text = "abc</think>def"  # one token a character
    counts, events = counted(ChoiceOutput(create("qwen3", reasoning_opens=True), None), list(text), size)
    num_thought = len("abc</think>")
    assert counts == [min(n, num_thought) for n in [*range(size, len(text), size), len(text)]]
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "abc"
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "def"


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("tokens", "inside", "expected"),
    [
        (["<think>", "\n", "why", "?", "</think>", "\n\n", "Because", ""], False, 5),
        (["so", "", "?", "</thi", "nk>Be", "cause", ""], True, 5),  # a token with the mark's end counts as thought
        (["a", "</think>", "", "", "b"], True, 2),  # tokens without text behind the mark do not
        (["", "a", " long word that is one token", "</think>", "b"], True, 4),
        (["never", " closed", ""], True, 3),
        (["no", " thought"], False, 0),
        (["<thin", " air"], False, 0),
        (["</think>", "answer"], True, 1),
    ],
)
def test_tokens_of_any_length_are_told_apart(tokens: list[str], inside: bool, expected: int, size: int) -> None:
    counts, _ = counted(ChoiceOutput(create("qwen3", reasoning_opens=inside), None), tokens, size)
    assert counts[-1] == expected and counts == sorted(counts)


@pytest.mark.parametrize("size", range(1, 20))
def test_every_message_of_thought_is_counted_in_the_harmony_format(size: int) -> None:
    thought = ["<|channel|>", "analysis", "<|message|>", "hm", " hm", "<|end|>"]
    more = ["<|start|>", "assistant", *thought[:4]]
    answer = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "yes", "<|return|>"]
    counts, events = counted(ChoiceOutput(None, HarmonyParser()), [*thought, *more, *answer], size)
    assert counts[-1] == len(thought) + len(more), "the second is ended by the message behind it"
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "hm hmhm"


def test_a_tool_syntax_without_reasoning_says_nothing_of_it() -> None:
    assert not ChoiceOutput(None, tool_parser("hermes", ())).tells_reasoning
    assert ChoiceOutput(None, HarmonyParser()).tells_reasoning
    assert ChoiceOutput(create("qwen3"), tool_parser("hermes", ())).tells_reasoning

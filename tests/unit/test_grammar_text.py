"""Every kind of grammar lets through what it describes and nothing else; what is malformed is refused by place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.structured import keyword_table
from common.errors import RequestError
from common.grammar_regex import portable_regex
from common.grammar_text import MAX_CHOICES, to_llguidance, tool_triggers
from common.messages import Grammar
from tests.unit.grammar_walk import Setup, make_setup, walk

CITY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(Path(tmp_path_factory.mktemp("tokenizer")))


def _tag(**format_: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format_})


LEGACY = json.dumps({
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
})
EXPRESSION = 'root ::= expr\nexpr ::= term ("+" term)*  # sums\nterm ::= [0-9]+ | "(" expr ")"'
GREETING = 'root ::= ("hi" | "\\"yo\\"") (" " name)? [^a-z\\]\\x21]\nname ::=\n  [A-Z] [a-z]{1,3}\n  | "X" .'

ACCEPTED = [
    ("json_object", "", ['{}', '{"a": [1, {"b": null}]}'], ['[]', '1', '{"a":1}', '{"a": 1']),
    ("json_schema", json.dumps(CITY), ['{"a": 12}'], ['{"a": "x"}', '{ "a": 1}', '{"a": 1}\n']),
    ("regex", r"\d{3}-[a\]/]+", ["123-a/]"], ["12-a", "123-b", "x123-a"]),
    ("regex", "^a|b$", ["a", "b"], ["ab", "ax"]),
    ("regex", "", [""], ["x"]),
    ("regex", "a\nb/c\\/d", ["a\nb/c/d"], ["ab"]),
    ("choice", '["yes", "no", "no \\"way\\"", ""]', ["yes", "no", 'no "way"', ""], ["maybe", "y"]),
    ("ebnf", EXPRESSION, ["1", "12+3", "(1+(2))+34"], ["", "1+", "(1", "a"]),
    ("ebnf", GREETING, ["hi.", '"yo" Abc?', "hi XX?"], ["hi", "hi!", "hi abc.", "yo."]),
    ("ebnf", "start: /[ab]+/ | sub\nsub: \"start\" // start", ["ab", "start"], ["", "c"]),
    ("lark", 'start: "x" /[0-9]/', ["x1"], ["x", "1"]),
    ("structural_tag", LEGACY, ["text", 'a <f=a>{"a": 1}</f> b <f=b>null</f>', "<f", "a<|mark|>b"],
     ["<f=c>", '<f=b>{"a": 1}</f>', '<f=a>{"a": 1}']),
    ("structural_tag", _tag(type="tag", begin="<t>", content={"type": "any_text", "max_length": 3}, end="</t>"),
     ["<t>abc</t>", "<t></t>"], ["<t>abcd</t>", "abc"]),
    ("structural_tag", _tag(type="sequence", elements=[
        {"type": "any_text"}, {"type": "const_string", "value": "</think>"}, {"type": "regex", "pattern": "[0-9]+"},
        {"type": "or", "elements": [
            {"type": "const_string", "value": ""}, {"type": "grammar", "grammar": 'root ::= "!"'},
        ]},
    ]), ["a < b</think>12", "</think>1!"], ["12", "</think>", "</think>1</think>"]),
    ("structural_tag", _tag(type="tags_with_separator", separator=", ", at_least_one=True, tags=[
        {"begin": "[TOOL_CALLS]", "content": {"type": "json_schema", "json_schema": CITY}, "end": ""},
    ]), ['[TOOL_CALLS]{"a": 1}', '[TOOL_CALLS]{"a": 1}, [TOOL_CALLS]{"a": 2}'], ["", '[TOOL_CALLS]{"a": 1}, ']),
    ("structural_tag", _tag(
        type="triggered_tags", triggers=["<|mark|>"], stop_after_first=True, at_least_one=True,
        tags=[{"begin": "<|mark|>x", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ""}],
    ), ["a<|mark|>x1", "a<|im_start|>b<|mark|>x2"], ["", "a", "a<|mark|>y", "<|mark|>x1 more"]),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), ACCEPTED, ids=lambda value: str(value)[:24])
def test_language(setup: Setup, kind: str, text: str, good: list[str], bad: list[str]) -> None:
    for output in good:
        assert setup.matches(kind, text, output), output
    for output in bad:
        assert not setup.matches(kind, text, output), output


REFUSED = [
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", '{"type": NaN}', "not valid JSON"),
    ("json_schema", "[1]", "at #: a schema must be an object"),
    ("json_schema", '{"x-guidance": {"lenient": true}}', "#/x-guidance/lenient"),
    ("choice", "[1]", "list of strings"),
    ("choice", "[]", "not empty"),
    ("choice", '["\\ud800"]', "not valid Unicode"),
    ("choice", json.dumps([str(i) for i in range(MAX_CHOICES + 1)]), "the limit is"),
    ("regex", "a" * 70_000, "the limit is"),
    ("ebnf", 'a ::= "x"', "no rule named 'root'"),
    ("ebnf", "root ::= b", "'b', which is not defined"),
    ("ebnf", 'root ::= "x" )', "line 1, column 14"),
    ("ebnf", 'root ::= (\n"x"', "not closed"),
    ("ebnf", "root ::= [b-a]", "wrong way round"),
    ("ebnf", 'root ::= "\\xZZ"', "hexadecimal"),
    ("ebnf", 'root ::= "a"{3,2}', "in order"),
    ("ebnf", 'root ::= "a"\nroot ::= "b"', "defined twice"),
    ("ebnf", "root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested deeper"),
    ("ebnf", "root ::= 'a'", "not understood"),
    ("structural_tag", "{}", "must be an object"),
    ("structural_tag", _tag(type="made_up"), "unknown type 'made_up'"),
    ("structural_tag", _tag(type="sequence", elements=[{"type": "any_text"}, {"type": "any_text"}]), r"elements\[0\]"),
    ("structural_tag", _tag(type="regex"), r"\$.format.pattern"),
    ("structural_tag", LEGACY.replace('"<f="', '"<g="'), "begins with none of the triggers"),
    ("structural_tag", '{"structures": [5], "triggers": ["<"]}', r"structures\[0\]"),
]


@pytest.mark.parametrize(("kind", "text", "words"), REFUSED, ids=lambda value: str(value)[:24])
def test_malformed_grammars_are_refused_with_their_place(kind: Any, text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        to_llguidance(Grammar(kind=kind, text=text))
    assert caught.value.info.status == 400 and caught.value.info.code


@pytest.mark.parametrize("text", ["start: undefined", 'start: "a', "start: /[/", "start: a\na: a"])
def test_bad_lark_is_refused_when_it_is_compiled(setup: Setup, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        setup.session("lark", text)


def test_lazy_grammar_binds_after_the_trigger(setup: Setup) -> None:
    for trigger, before in (("```json\n", "text `` "), ("<|mark|>", "text <|im_start|> "), ("<tool_call>", "a<tool_")):
        assert setup.matches("json_schema", json.dumps(CITY), before, trigger)
        assert setup.matches("json_schema", json.dumps(CITY), before + trigger + '{"a": 1}', trigger)
        assert not setup.matches("json_schema", json.dumps(CITY), before + trigger + "x", trigger)
    with pytest.raises(RequestError, match="one special token"):
        to_llguidance(Grammar(kind="regex", text="a", lazy_trigger="x<|m|>"), {"<|m|>": 5})


def test_where_tool_calls_begin() -> None:
    assert tool_triggers(Grammar(kind="regex", text="a")) is None
    assert tool_triggers(Grammar(kind="regex", text="a", lazy_trigger="<t>")) == ("<t>",)
    assert tool_triggers(Grammar(kind="structural_tag", text=LEGACY)) == ("<f=",)
    assert tool_triggers(Grammar(kind="structural_tag", text=_tag(type="regex", pattern="a"))) == ()


@pytest.mark.parametrize(
    "pattern", [r"\w\d\s", r"\W\D\S", r"[\w.]{2}", r"[^\w]\S", r"[\W]x", r"[^\W\d]", r"[]a]b", r"[&&~]"]
)
def test_regex_output_matches_under_python_too(setup: Setup, pattern: str) -> None:
    for seed in range(20):
        done = walk(setup, setup.session("regex", pattern), seed)
        assert done.complete and re.fullmatch(pattern, done.text), done.text


def test_portable_regex_leaves_the_rest_alone() -> None:
    assert portable_regex(r"(a|\\d)\.\[x\]{2,}$") == r"(a|\\d)\.\[x\]{2,}$"


def test_white_space_is_bounded_whatever_the_schema_asks(setup: Setup) -> None:
    schema = json.dumps({"type": "array", "maxItems": 0, "x-guidance": {"whitespace_flexible": True}})
    assert setup.matches("json_schema", schema, "[\n ]")
    assert not setup.matches("json_schema", schema, "[" + " " * 17 + "]")


def test_the_documents_table_is_the_code_s() -> None:
    document = Path(__file__).parents[2] / "docs" / "structured_output.md"
    assert keyword_table() in document.read_text(encoding="utf-8")

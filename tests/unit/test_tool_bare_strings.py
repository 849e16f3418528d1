"""Strings that a call syntax writes as bare text (qwen3_coder, glm45): every keyword holds, or is refused."""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.errors import RequestError
from common.schema_formats import FORMAT_REGEX
from common.schema_keywords import FORMATS
from common.schema_text import search_regex, string_terminal
from gateway.tool_parsers.base import collect
from gateway.tool_parsers.grammar import ToolPlan, ToolPlanner
from tests.unit.grammar_cases import CASES
from tests.unit.grammar_walk import ADDED, Setup, make_setup, walk

FAMILIES = ("qwen3_coder", "glm45")
ENDS = {"qwen3_coder": "\n</parameter>", "glm45": "</arg_value>", "pythonic": ""}
STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format", "enum", "const", "anyOf", "allOf", "oneOf", "$ref")
OWN: list[dict[str, Any]] = [
    {"type": "string", "minLength": 30}, {"type": "string", "minLength": 12, "maxLength": 40, "pattern": "[0-9]"},
    {"type": "string", "enum": ["a", "bb", "</parameter>", "</arg_value>"], "minLength": 2},
    {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 12}]},
    {"type": "string", "anyOf": [{"pattern": "^a{3}$"}, {"const": "b"}, {"type": "integer"}]},
    {"type": "string", "oneOf": [{"pattern": "^a+$"}, {"pattern": "^b+$"}]},
    {"type": "string", "format": "date", "pattern": "^2024-02"}, {"type": "string", "pattern": "(^a|b$)"},
    {"type": "string", "pattern": "^<[^>]*>$"}, {"$ref": "#/$defs/code"}, {"type": "string", "format": "unheard-of"},
]
DEFS = {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "^(?=a)"}, "#/properties/s/pattern"),
    ({"type": "string", "pattern": "a(^b|c)d"}, "#/properties/s/pattern"),
    ({"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "#/properties/s"),
    ({"type": "string", "const": "a", "pattern": "b"}, "#/properties/s"),
    ({"type": "string", "const": "</parameter> </arg_value>"}, "#/properties/s"),
    ({"type": "string", "not": {"const": "a"}}, "#/properties/s/not"),
]


@pytest.fixture(scope="module", params=[(), ADDED], ids=["marks as text", "marks as tokens"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(Path(tmp_path_factory.mktemp("tokenizer")), request.param)


def _plan(family: str, parameters: Any, *, strict: bool = True) -> ToolPlan:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return ToolPlanner(family).plan([{"type": "function", "function": function}], "required", False)


def _object(schema: Any, **more: Any) -> dict[str, Any]:
    last = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "object", "properties": {"s": schema, "n": last}, "required": ["s", "n"], "$defs": DEFS, **more}


def _arguments(setup: Setup, plan: ToolPlan, seed: int) -> Any:
    """The arguments of a random call; None when the walk was too long."""
    assert plan.grammar is not None
    session = setup.backend.compile(plan.grammar)
    done = walk(setup, session, seed, limit=400, patience=60, end=ENDS[plan.parser_name])
    if not done.complete:
        return None
    parser = plan.new_parser()
    assert parser is not None
    content, calls = collect([*parser.feed(done.text), *parser.flush()])
    assert not content and [call.name for call in calls] == ["f"], done.text
    return json.loads(calls[0].arguments)


def _string_schemas() -> list[Any]:
    found = [schema for keyword in STRING_KEYWORDS for schema in CASES[keyword] if isinstance(schema, dict)]
    return [schema for schema in found if schema.get("type") == "string"] + OWN


@pytest.mark.parametrize("family", FAMILIES)
def test_every_string_keyword_holds_or_is_refused_by_its_place(setup: Setup, family: str) -> None:
    bound = finished = 0
    for schema in _string_schemas():
        parameters = _object(schema)
        try:
            plan = _plan(family, parameters)
        except RequestError as error:
            assert error.info.status == 400 and "#/properties/s" in error.info.message, error.info.message
            continue
        bound += 1
        for seed in range(3):
            if (arguments := _arguments(setup, plan, seed)) is not None:
                finished += 1
                jsonschema.Draft202012Validator(parameters).validate(arguments)
    assert bound > 60 and finished >= 2.7 * bound


@pytest.mark.parametrize("family", FAMILIES)
def test_own_schemas_are_not_refused(family: str) -> None:
    for schema in OWN:
        _plan(family, _object(schema))


@pytest.mark.parametrize(("schema", "place"), REFUSED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_refusal_names_the_parameter_and_without_strict_any_text_will_do(
    setup: Setup, family: str, schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(f"JSON schema at {place}")) as caught:
        _plan(family, _object(schema))
    assert caught.value.info.param == "tools[0].function.parameters"
    arguments = _arguments(setup, _plan(family, _object(schema), strict=False), 1)
    assert arguments is None or (isinstance(arguments["s"], str) and 0 <= arguments["n"] <= 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_is_too_short_cannot_be_ended(setup: Setup, family: str) -> None:
    plan = _plan(family, _object({"type": "string", "minLength": 5}))
    head, end = {
        "qwen3_coder": ("<tool_call>\n<function=f>\n<parameter=s>\n", "\n</parameter>\n"),
        "glm45": ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>", "</arg_value>\n"),
    }[family]
    assert plan.grammar is not None

    def may_begin(text: str) -> bool:
        session = setup.backend.compile(plan.grammar)  # type: ignore[arg-type]
        try:
            for token in setup.encode(text):
                session.accept_token(token)
        except ValueError:
            return False
        return True

    assert may_begin(head + "12345" + end)
    assert not may_begin(head + "1234" + end)
    assert not may_begin(head + "1" + end.strip() + "2345")


@pytest.mark.parametrize(("family", "name"), [
    ("qwen3_coder", "a>b"), ("glm45", " a"), ("glm45", "a</arg_key>b"), ("pythonic", "two words"), ("pythonic", "1st"),
])  # fmt: skip
def test_a_name_the_syntax_cannot_write_is_refused(family: str, name: str) -> None:
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    with pytest.raises(RequestError, match="cannot be written"):
        _plan(family, parameters, strict=False)
    _plan("hermes", parameters)


@pytest.mark.parametrize("keyword", [
    {"minProperties": 1}, {"dependentRequired": {"s": ["n"]}}, {"patternProperties": {"^x": {"type": "null"}}},
    {"anyOf": [{"required": ["s"]}, {"required": ["n"]}]}, {"required": ["s", "other"]},
])  # fmt: skip
@pytest.mark.parametrize("family", [*FAMILIES, "pythonic"])
def test_keywords_about_the_arguments_as_a_whole_are_refused_where_each_is_written_alone(
    family: str, keyword: dict[str, Any]
) -> None:
    parameters = _object({"type": "string"}, **{"required": ["n"], **keyword})
    (name,) = keyword
    with pytest.raises(RequestError, match=f"#/{name}"):
        _plan(family, parameters)
    assert _plan(family, parameters, strict=False).grammar is not None
    _plan("hermes", parameters)


def test_a_recursive_model_s_parameters_are_found_behind_their_reference(setup: Setup) -> None:
    node = {
        "type": "object", "properties": {"s": {"enum": ["x"]}, "next": {"$ref": "#/$defs/node"}}, "required": ["s"],
        "additionalProperties": False,
    }
    parameters = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    for family in (*FAMILIES, "pythonic"):
        found = [_arguments(setup, _plan(family, parameters), seed) for seed in range(6)]
        assert [one["s"] for one in found if one] and all(one is None or one["s"] == "x" for one in found)
        jsonschema.Draft202012Validator(parameters).validate(found[0])


# --------------------------------------------------------------------------- formats and patterns


def _is_uri(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+", text)) and not set(text) & set('"<>\\^`{|}')


CHECKS: dict[str, Any] = {
    "date": date.fromisoformat, "uuid": uuid.UUID, "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address,
    "time": lambda text: time.fromisoformat(re.sub(r"\.(\d{1,6})\d*", lambda found: f".{found[1]:0<6}", text)),
    "date-time": lambda text: datetime.fromisoformat(re.sub(r"\.\d+", "", text)),
}
EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "24-01-01"]),
    "time": (["23:59:59Z", "00:00:00.5+05:30"], ["24:00:00Z", "12:00:00", "1:00:00Z"]),
    "date-time": (["2024-02-29T01:02:03Z"], ["2024-02-29", "2024-02-30T01:02:03Z"]),
    "duration": (["P3D", "PT1H2M", "P1Y2M3DT4S", "P2W"], ["P", "PT", "P1D2Y", "P1W2D", "3D"]),
    "email": (["a.b+c@example.org"], ["a@", "@b", "a b@c", "a..b@c", "a@-c"]),
    "hostname": (["a", "www.example.org", "a-b.c1"], ["-a", "a-", "a..b", "a_b", ""]),
    "ipv4": (["0.0.0.0", "255.10.99.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1:2", ":::", "1::2::3", "12345::"]),
    "uuid": (["123e4567-E89B-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uri": (["https://a.org/b?c=d#e", "mailto:a@b", "urn:x:y", "http://u:p@h:80/"], ["a", "//a", "http://a b", "1a:b"]),
}


def test_each_enforced_format_has_an_expression_and_examples() -> None:
    assert FORMATS == FORMAT_REGEX.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_let_through_what_they_should(setup: Setup, name: str) -> None:
    good, bad = EXAMPLES[name]
    lark = f"start: ONE\nONE: {string_terminal({'format': name})}\n"
    for text in good:
        assert setup.matches("lark", lark, text), text
    for text in bad:
        assert not setup.matches("lark", lark, text), text
    for seed in range(20):
        done = walk(setup, setup.session("lark", lark), seed)
        if done.complete:
            CHECKS.get(name, str)(done.text)
            assert name != "uri" or _is_uri(done.text)


@pytest.mark.parametrize(("pattern", "good", "bad"), [
    ("b", ["b", "abc", "\nb\n"], ["", "ac"]), ("^a|b$", ["ax", "xb", "a"], ["xa", "bx"]),
    ("(^a|b$)", ["ax", "xb"], ["xa"]), ("^(?:a|b)$", ["a", "b"], ["ab", "xa"]), ("[|^$]", ["|", "x$"], ["a"]),
    ("^\\$\\|$", ["$|"], ["$", "|"]), ("(?i)^ab$", ["aB", "AB"], ["xab"]), ("^[]|]$", ["|", "]"], ["a"]),
    ("", ["", "x"], []), ("^$", [""], ["x"]), ("a|^$", ["", "xa"], ["x"]),
])  # fmt: skip
def test_a_pattern_is_searched_for(setup: Setup, pattern: str, good: list[str], bad: list[str]) -> None:
    lark = f"start: ONE\nONE: {string_terminal({'type': 'string', 'pattern': pattern})}\n"
    for text, expected in [*((text, True) for text in good), *((text, False) for text in bad)]:
        assert bool(re.search(pattern, text)) == expected
        assert setup.matches("lark", lark, text) == expected, text


@pytest.mark.parametrize("pattern", ["a^b", "(a|^b)c", "a$b", "x(^a)", "\\Ba"])
def test_an_anchor_elsewhere_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"at #/here: .*anchor"):
        search_regex(pattern, "#/here")

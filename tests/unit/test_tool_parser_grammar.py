"""What a request's tools and tool_choice allow is what the family's parser reads, with valid arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.errors import RequestError
from gateway.tool_parsers.base import ReasoningDelta, collect
from gateway.tool_parsers.grammar import ToolPlan, ToolPlanner
from gateway.tool_parsers.registry import PARSERS
from gateway.tool_parsers.syntax import SYNTAX
from tests.unit.grammar_walk import ADDED, Setup, Walk, make_setup, walk
from tests.unit.tool_parser_cases import TOOLS, WEATHER

NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}


@pytest.fixture(scope="module", params=[(), ADDED], ids=["marks as text", "marks as tokens"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(Path(tmp_path_factory.mktemp("tokenizer")), request.param)


def _plan(family: str, choice: Any, parallel: bool = True, **more: Any) -> ToolPlan:
    return ToolPlanner(family).plan(TOOLS, choice, parallel, **more)


def _walk(setup: Setup, plan: ToolPlan, seed: int) -> Walk:
    assert plan.grammar is not None
    return walk(setup, setup.backend.compile(plan.grammar), seed, patience=150)


def _calls(plan: ToolPlan, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = plan.new_parser()
    assert parser is not None
    content, calls = collect([*parser.feed(text), *parser.flush()])
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": {"enum": [1]}}, "required": ["a"]}, True),
        ({"type": "object", "properties": {}}, True),
        ({"type": "object"}, False),
        ({"properties": {"a": {"enum": [1]}}, "additionalProperties": {"enum": [2]}}, False),
        ({"properties": {"a": {"enum": [1]}}, "required": ["a", "b"]}, False),
        ({"properties": {"a": {"enum": [1]}}, "minProperties": 2}, False),
    ],
)
def test_arguments_nobody_declared_are_not_made_up(schema: dict[str, Any], closed: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    plan = ToolPlanner("hermes").plan(tools, "required", False)
    assert plan.grammar is not None
    assert ('"additionalProperties": false' in plan.grammar.text) == closed


@pytest.mark.parametrize("family", PARSERS)
def test_required_gives_valid_calls_whatever_the_model_knows(setup: Setup, family: str) -> None:
    plan = _plan(family, "required")
    finished = 0
    for seed in range(8):
        done = _walk(setup, plan, seed)
        if done.complete:
            finished += 1
            content, calls = _calls(plan, done.text)
            assert calls and not content.strip(), done.text
            for name, arguments in calls:
                jsonschema.validate(arguments, SCHEMAS[name])
    assert finished >= 6


@pytest.mark.parametrize("family", PARSERS)
def test_a_named_function_is_called_once(setup: Setup, family: str) -> None:
    plan = _plan(family, NAMED)
    for seed in range(4):
        done = _walk(setup, plan, seed)
        assert done.complete
        _, calls = _calls(plan, done.text)
        assert [name for name, _ in calls] == ["get_weather"]
        jsonschema.validate(calls[0][1], WEATHER)


@pytest.mark.parametrize("family", [name for name in PARSERS if SYNTAX[name].trigger])
def test_auto_is_free_until_a_call_opens_and_then_bound(setup: Setup, family: str) -> None:
    plan = _plan(family, "auto", False)
    assert plan.grammar is not None and plan.grammar.lazy_trigger == SYNTAX[family].trigger
    session = setup.backend.compile(plan.grammar)
    before = "Let me see [1] < 2. " + ("<|channel|>commentary" if family == "gpt-oss" else "")
    ids = setup.encode(before)
    for token in ids:
        session.accept_token(token)
        assert not session.in_tool_call()
    for token in setup.encode(SYNTAX[family].trigger):
        session.accept_token(token)
    assert session.in_tool_call()
    done = walk(setup, session, seed=5)
    content, calls = _calls(plan, before + SYNTAX[family].trigger + done.text)
    assert done.complete and content.startswith("Let me see") and len(calls) == 1
    jsonschema.validate(calls[0][1], SCHEMAS[calls[0][0]])


def test_pythonic_auto_is_not_constrained() -> None:
    plan = _plan("pythonic", "auto")
    assert plan.grammar is None and plan.parser_name == "pythonic"


def test_none_and_no_tools() -> None:
    assert _plan("hermes", "none") == ToolPlan()
    assert ToolPlanner("hermes").plan(None) == ToolPlan()
    assert _plan("hermes", None).parser_name == "hermes"
    assert ToolPlanner("").plan(TOOLS).parser_name == "hermes"
    assert _plan("mistral", "auto").needs_special_tokens and not _plan("hermes", "auto").needs_special_tokens


def test_gpt_oss_tells_reasoning_from_content_without_tools() -> None:
    text = "<|channel|>analysis<|message|>Short.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>"
    planner = ToolPlanner("gpt-oss")
    for plan in (planner.without_tools(), planner.plan(TOOLS, "none")):
        parser = plan.new_parser()
        assert parser is not None and plan.needs_special_tokens and not plan.tools and plan.grammar is None
        events = [*parser.feed(text), *parser.flush()]
        assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "Short."
        assert collect(events) == ("Paris.", [])


def test_without_parallel_calls_one_is_all(setup: Setup) -> None:
    plan = _plan("hermes", "required", False)
    for seed in range(6):
        assert len(_calls(plan, _walk(setup, plan, seed).text)[1]) == 1


def test_reasoning_comes_before_a_required_call(setup: Setup) -> None:
    plan = _plan("hermes", NAMED, reasoning_end="</think>")
    assert plan.grammar is not None
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "A", "days": 1}}\n</tool_call>'
    assert setup.matches("structural_tag", plan.grammar.text, "hm <b></think>\n\n" + call)
    assert not setup.matches("structural_tag", plan.grammar.text, call)


def test_gpt_oss_may_think_before_a_required_call(setup: Setup) -> None:
    plan = _plan("gpt-oss", NAMED)
    assert plan.grammar is not None
    call = ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "A", "days": 1}'
    for before in ("", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"):
        assert setup.matches("structural_tag", plan.grammar.text, before + call)


def test_allowed_tools_narrow_the_choice(setup: Setup) -> None:
    listed = [{"type": "function", "function": {"name": "now"}}]
    plan = _plan("hermes", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}})
    assert [name for name, _ in _calls(plan, _walk(setup, plan, 0).text)[1]][:1] == ["now"]


def _tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def test_a_schema_that_cannot_be_enforced_is_an_error_only_when_strict(setup: Setup) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    plan = ToolPlanner("hermes").plan([_tool(schema)], "required")
    assert plan.grammar is not None
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert setup.matches("structural_tag", plan.grammar.text, call)
    with pytest.raises(RequestError, match="#/properties/a/not") as caught:
        ToolPlanner("hermes").plan([_tool(schema, strict=True)], "auto")
    assert caught.value.info.param == "tools[0].function.parameters"


def test_trying_schemas_is_bounded() -> None:
    properties = {f"k{number}": {"type": "string", "description": "x" * 500} for number in range(100)}
    schemas = [{"type": "object", "properties": properties, "n": number} for number in range(50)]
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n, schema in enumerate(schemas)
    ]
    planner = ToolPlanner("hermes")
    assert planner.plan(tools, "auto").grammar is not None
    assert len(planner.fit.verdicts) <= 1  # the rest is the tokenizer process's to refuse


@pytest.mark.parametrize(("tools", "choice", "param"), [
    ([5], "auto", "tools[0]"),
    ([{"type": "web_search"}], "auto", "tools[0]"),
    ([{"type": "function", "function": {"name": "no spaces"}}], "auto", "tools[0].function.name"),
    ([_tool({"type": "string"})], "auto", "tools[0].function.parameters"),
    ([_tool({}), _tool({})], "auto", "tools"),
    (TOOLS, "sometimes", "tool_choice"),
    (TOOLS, {"type": "function", "function": {"name": "other"}}, "tool_choice"),
    (TOOLS, {"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tool_choice"),
    ([], "required", "tool_choice"),
])
def test_malformed_tools_are_refused(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ToolPlanner("hermes").plan(tools, choice)
    assert caught.value.info.param == param and caught.value.info.status == 400

"""From a chat request's ``tools`` and ``tool_choice`` to a grammar and a parser.

    planner = ToolPlanner(parser_name)                     # once; parser_name from --tool-call-parser,
                                                           # or TokenizerReady.tool_parser when auto
    plan = planner.plan(tools, tool_choice, parallel_tool_calls)
    Generate(grammar=plan.grammar, ...)                    # None: nothing is constrained
    TextParams(skip_special_tokens=... and not plan.needs_special_tokens)
    parser = plan.new_parser()                             # one per choice; None: text is content
    parser.feed(text) / parser.flush()                     # finish_reason tool_calls if parser.num_calls

============ ========================================================= =======================
tool_choice  grammar                                                   parser
============ ========================================================= =======================
none         none                                                      the family's, if it tells
                                                                       reasoning too (gpt-oss)
auto         from the family's opening mark on (``lazy_trigger``)      the family's
required     one call of any function, or several with                 the family's
             ``parallel_tool_calls``
a function   exactly one call of that function                         the family's
============ ========================================================= =======================

A plan's grammar takes the request's one place for a constraint: ``response_format`` beside
required or a named function is a 400 of the gateway's; beside auto, the response format goes first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from common.errors import RequestError
from common.messages import Grammar
from gateway.tool_parsers.base import ToolParser
from gateway.tool_parsers.registry import FALLBACK, create, resolve_name
from gateway.tool_parsers.schema_fit import Format, Function, SchemaFit
from gateway.tool_parsers.syntax import SYNTAX

_CLOSABLE = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema", "examples"}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 256


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools mean for it."""

    grammar: Grammar | None = None
    parser_name: str = ""
    tools: tuple[Format, ...] = ()
    needs_special_tokens: bool = False
    """The text must keep special tokens (skip_special_tokens=False)."""
    used_ids: frozenset[str] = frozenset()
    """Of the calls in the request's messages."""

    def new_parser(self) -> ToolParser | None:
        """A fresh parser for one choice; None when the text is content as it is."""
        if not self.parser_name:
            return None
        parser = create(self.parser_name, self.tools)
        parser.used_ids.update(self.used_ids)
        return parser


class ToolPlanner:
    """Plans requests for one family. Keeps the verdicts on schemas it has tried (bounded)."""

    def __init__(self, parser_name: str = "") -> None:
        self._family = resolve_name(parser_name or FALLBACK)
        self._syntax = SYNTAX[self._family]
        self.fit = SchemaFit()

    def plan(
        self,
        tools: Sequence[Format] | None,
        tool_choice: str | Format | None = None,
        parallel_tool_calls: bool = True,
        *,
        reasoning_end: str = "",
    ) -> ToolPlan:
        """The plan for a request.

        ``reasoning_end``: the mark (``</think>``) that ends the reasoning with which this request's
        output begins; with required and named the calls come after it. Raises RequestError (400, with
        ``param``) for malformed tools and for a choice that names no function.
        """
        self.fit.begin_request()
        functions = [self._function(tool, index) for index, tool in enumerate(tools or ())]
        self._check_names(functions)
        mode, chosen = _choice(tool_choice, [function.name for function in functions])
        if mode == "none":
            return self.without_tools()
        kept = [function for function in functions if function.name in chosen]
        plan_tools = tuple(tool for tool in tools or () if tool["function"]["name"] in chosen)
        several = parallel_tool_calls and mode != "named"
        grammar = self._lazy(kept, several) if mode == "auto" else self._eager(kept, several, reasoning_end)
        return ToolPlan(
            grammar=grammar,
            parser_name=self._family,
            tools=plan_tools,
            needs_special_tokens=create(self._family).needs_special_tokens,
        )

    def without_tools(self) -> ToolPlan:
        """The plan where nothing may be called: the text is content, except in a family whose every answer is written
        in its own message format, which tells reasoning from content."""
        parser = create(self._family)
        if not parser.tells_reasoning:
            return ToolPlan()
        return ToolPlan(parser_name=self._family, needs_special_tokens=parser.needs_special_tokens)

    def _eager(self, functions: list[Function], several: bool, reasoning_end: str) -> Grammar:
        syntax = self._syntax
        opening = "" if syntax.opens_only_after_trigger else syntax.opening
        body = self._calls(functions, several, opening)
        if self._family == "gpt-oss":
            body = _after_analysis(body)
        elif reasoning_end:
            space = {"type": "regex", "pattern": r"\s{0,4}"}
            thought = [{"type": "any_text"}, {"type": "const_string", "value": reasoning_end}]
            body = {"type": "sequence", "elements": [*thought, space, body]}
        return _structural(body)

    def _lazy(self, functions: list[Function], several: bool) -> Grammar | None:
        syntax = self._syntax
        if not syntax.trigger:
            return None
        return _structural(self._calls(functions, several, syntax.opening, syntax.trigger), syntax.trigger)

    def _calls(self, functions: list[Function], several: bool, opening: str, written: str = "") -> Format:
        """``opening call (separator call)* closing`` without ``written``, which it begins with."""
        syntax = self._syntax
        tags = [syntax.call(function, self.fit) for function in functions]
        first = [{**tag, "begin": (opening + tag["begin"])[len(written) :]} for tag in tags]
        elements: list[Format] = [{"type": "or", "elements": first}]
        if several and self._family != "gpt-oss":  # there a call ends the turn
            more = [{**tag, "begin": syntax.separator + tag["begin"]} for tag in tags]
            elements.append({"type": "tags_with_separator", "separator": "", "tags": more})
        if syntax.closing:
            elements.append({"type": "const_string", "value": syntax.closing})
        return {"type": "sequence", "elements": elements}

    def _function(self, tool: Any, index: int) -> Function:
        place = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            _refuse(place, "must be an object with 'type': 'function' and a 'function'")
        if tool.get("type", "function") != "function":
            _refuse(f"{place}.type", f"only 'function' is supported, not {tool['type']!r}")
        function = tool["function"]
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            _refuse(f"{place}.function.name", "must be 1 to 64 letters, digits, '_', '-' or '.'")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            _refuse(f"{place}.function.parameters", "must be a JSON schema of type 'object'")
        parameters = {**parameters, "type": "object"}
        found = Function(name, _closed(parameters))
        self._check_writable(found, place)
        if function.get("strict") is True and (words := self._why_not_strict(parameters, found)):
            _refuse(f"{place}.function.parameters", f"cannot be enforced, as 'strict' asks: {words}")
        return found

    def _check_writable(self, function: Function, place: str) -> None:
        syntax = self._syntax
        if not re.fullmatch(syntax.function_name, function.name):
            _refuse(f"{place}.function.name", f"{function.name!r} cannot be written in {self._family!r} calls")
        for each in function.each_parameter() if syntax.one_by_one else ():
            if not re.fullmatch(syntax.parameter_name, each.name):
                words = f"the name {each.name!r} cannot be written in {self._family!r} calls"
                _refuse(f"{place}.function.parameters", words)

    def _why_not_strict(self, parameters: Format, function: Function) -> str:
        if self._syntax.one_by_one:
            return self.fit.why_not_one_by_one(function, self._syntax.string_end)
        return self.fit.why_not_json(parameters)

    def _check_names(self, functions: list[Function]) -> None:
        if len(functions) > MAX_TOOLS:
            _refuse("tools", f"{len(functions)} tools; the limit is {MAX_TOOLS}")
        names = [function.name for function in functions]
        for name in names:
            if names.count(name) > 1:
                _refuse("tools", f"two functions are called {name!r}")


def _closed(parameters: Format) -> Format:
    """The parameters without others than the declared ones, where the schema leaves that open.

    A function knows what to do with its own parameters alone. Whatever the closed schema allows the open one
    does, so long as nothing else in it speaks of properties.
    """
    properties, required = parameters.get("properties"), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not set(parameters) <= _CLOSABLE:
        return parameters
    if not all(isinstance(name, str) and name in properties for name in required):
        return parameters
    return {**parameters, "additionalProperties": False}


def _choice(tool_choice: str | Format | None, names: list[str]) -> tuple[str, list[str]]:
    """(none, auto, required or named; the functions that may be called)."""
    if tool_choice is None:
        tool_choice = "auto" if names else "none"
    if isinstance(tool_choice, dict):
        if tool_choice.get("type") == "allowed_tools":
            return _allowed(tool_choice, names)
        function = tool_choice.get("function", tool_choice)
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            _refuse("tool_choice", f"names the function {name!r}, which is not among the tools")
        return "named", [name]
    if tool_choice not in ("none", "auto", "required"):
        _refuse("tool_choice", f"must be none, auto, required or a function, not {tool_choice!r}")
    if not names:
        if tool_choice == "required":
            _refuse("tool_choice", "'required' needs tools")
        return "none", []
    return tool_choice, names


def _allowed(tool_choice: Format, names: list[str]) -> tuple[str, list[str]]:
    allowed = tool_choice.get("allowed_tools", tool_choice)
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(listed, list) or not listed or allowed.get("mode", "auto") not in ("auto", "required"):
        _refuse("tool_choice", "allowed_tools needs a mode (auto or required) and a list of tools")
    mode = str(allowed.get("mode", "auto"))
    chosen: list[str] = []
    for tool in listed:
        chosen += _choice(tool, names)[1] if isinstance(tool, dict) else [_refuse("tool_choice", "malformed tools")]
    return mode, chosen


def _structural(form: Format, trigger: str = "") -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    return Grammar(kind="structural_tag", text=text, lazy_trigger=trigger)


def _after_analysis(body: Format) -> Format:
    """gpt-oss: a call, right away or after one message of analysis."""
    thought = [
        {"type": "const_string", "value": "<|channel|>analysis<|message|>"}, {"type": "any_text"},
        {"type": "const_string", "value": "<|end|>"}, {"type": "const_string", "value": "<|start|>assistant"}, body,
    ]
    return {"type": "or", "elements": [body, {"type": "sequence", "elements": thought}]}


def _refuse(param: str, words: str) -> NoReturn:
    raise RequestError(f"{param}: {words}", param=param, code="invalid_tools")

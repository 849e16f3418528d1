"""How each family writes calls, as structural-tag formats (see common/grammar_tags.py).

The same syntax that the family's parser reads: what a grammar made from these allows, the parser
turns into calls whose arguments fit the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.tool_parsers.schema_types import types_of

Format = dict[str, Any]
Arguments = Callable[[Any], Format]
"""From a schema to the format of a value of it (falls back where the schema cannot be enforced)."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the request: its name and its parameters, an object schema."""

    name: str
    parameters: Format


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A family's calls: ``opening call (separator call)* closing``.

    ``call`` gives a tag (begin, content, end) for one function. With tool_choice auto the grammar
    binds from ``trigger`` on, with which ``opening`` and the call's begin must begin; an empty
    trigger means that free text cannot be told from a call's beginning, and auto is not constrained.
    """

    call: Callable[[Function, Arguments], Format]
    trigger: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    opens_only_after_trigger: bool = False
    """``opening`` is written in auto only (Llama's <|python_tag|>)."""


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _optional(form: Format) -> Format:
    return {"type": "or", "elements": [_text(""), form]}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements or [_text("")]}


def _envelope(key: str) -> Callable[[Function, Arguments], Format]:
    def call(function: Function, arguments: Arguments) -> Format:
        begin = f'{{"name": {json.dumps(function.name)}, "{key}": '
        return _tag(begin, arguments(function.parameters), "}")

    return call


def _hermes(function: Function, arguments: Arguments) -> Format:
    inner = _envelope("arguments")(function, arguments)
    return _tag("<tool_call>\n" + inner["begin"], inner["content"], "}\n</tool_call>")


def _mistral_named(function: Function, arguments: Arguments) -> Format:
    return _tag(f"[TOOL_CALLS]{function.name}[ARGS]", arguments(function.parameters), "")


def _deepseek_v3(function: Function, arguments: Arguments) -> Format:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{function.name}\n```json\n"
    return _tag(begin, arguments(function.parameters), "\n```<｜tool▁call▁end｜>")


def _deepseek_v31(function: Function, arguments: Arguments) -> Format:
    begin = f"<｜tool▁call▁begin｜>{function.name}<｜tool▁sep｜>"
    return _tag(begin, arguments(function.parameters), "<｜tool▁call▁end｜>")


def _kimi(function: Function, arguments: Arguments) -> Format:
    index = {"type": "regex", "pattern": "[0-9]{1,2}"}
    content = _sequence([index, _text("<|tool_call_argument_begin|>"), arguments(function.parameters)])
    return _tag(f"<|tool_call_begin|>functions.{function.name}:", content, "<|tool_call_end|>")


def _harmony(function: Function, arguments: Arguments) -> Format:
    # The <|call|> after it is an end-of-sequence token: it may follow, and need not be written.
    begin = f" to=functions.{function.name}"
    header = {"type": "or", "elements": [
        _text("<|channel|>commentary <|constrain|>json<|message|>"),
        _text(" <|constrain|>json<|message|>"), _text("<|channel|>commentary json<|message|>"),
    ]}
    return _tag(begin, _sequence([header, arguments(function.parameters)]), "")


def _parameters(function: Function) -> list[tuple[str, Any, bool]]:
    """(name, schema with the root's definitions, required) in the schema's order."""
    properties = function.parameters.get("properties")
    required = function.parameters.get("required")
    shared = {key: function.parameters[key] for key in ("$defs", "definitions") if key in function.parameters}
    return [
        (name, {**schema, **shared} if isinstance(schema, dict) else schema, name in (required or ()))
        for name, schema in (properties if isinstance(properties, dict) else {}).items()
    ]


def _untyped(schema: Any, arguments: Arguments, begin: str, end: str) -> Format:
    """A value between tags: text as it is where it can only be a string, else JSON."""
    root = schema if isinstance(schema, dict) else {}
    choices = [root["const"]] if "const" in root else root.get("enum")
    if types_of(schema, root) != {"string"}:
        return _tag(begin, arguments(schema), end)
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return _tag(begin, {"type": "or", "elements": [_text(choice) for choice in choices]}, end)
    lengths = (("min_length", root.get("minLength")), ("max_length", root.get("maxLength")))
    return _tag(begin, {"type": "any_text", **{key: size for key, size in lengths if isinstance(size, int)}}, end)


def _qwen3_coder(function: Function, arguments: Arguments) -> Format:
    parts = []
    for name, schema, required in _parameters(function):
        tag = _untyped(schema, arguments, f"<parameter={name}>\n", "\n</parameter>\n")
        parts.append(tag if required else _optional(tag))
    return _tag(f"<tool_call>\n<function={function.name}>\n", _sequence(parts), "</function>\n</tool_call>")


def _glm45(function: Function, arguments: Arguments) -> Format:
    parts = []
    for name, schema, required in _parameters(function):
        tag = _untyped(schema, arguments, f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n")
        parts.append(tag if required else _optional(tag))
    return _tag(f"<tool_call>{function.name}\n", _sequence(parts), "</tool_call>")


def _pythonic(function: Function, arguments: Arguments) -> Format:
    # Required ones first, so that every optional one can bring its own comma.
    parameters = sorted(_parameters(function), key=lambda parameter: not parameter[2])
    pairs = [(_pythonic_pair(name, schema, arguments), required) for name, schema, required in parameters]
    if pairs and not pairs[0][1]:
        forms = [pair for pair, _ in pairs]
        starts = [_sequence([form, *_with_commas(forms[index + 1 :])]) for index, form in enumerate(forms)]
        return _tag(f"{function.name}(", {"type": "or", "elements": [_text(""), *starts]}, ")")
    elements: list[Format] = []
    for index, (pair, required) in enumerate(pairs):
        if required:
            elements += [_text(", "), pair] if index else [pair]
        else:
            elements += _with_commas([pair])
    return _tag(f"{function.name}(", _sequence(elements), ")")


def _with_commas(forms: list[Format]) -> list[Format]:
    return [_optional(_sequence([_text(", "), form])) for form in forms]


def _pythonic_pair(name: str, schema: Any, arguments: Arguments) -> Format:
    if types_of(schema, schema if isinstance(schema, dict) else {}) == {"boolean"}:
        return _sequence([_text(f"{name}="), {"type": "or", "elements": [_text("True"), _text("False")]}])
    return _sequence([_text(f"{name}="), arguments(schema)])


SYNTAX: dict[str, CallSyntax] = {
    "hermes": CallSyntax(_hermes, trigger="<tool_call>", separator="\n"),
    "qwen3_coder": CallSyntax(_qwen3_coder, trigger="<tool_call>", separator="\n"),
    "glm45": CallSyntax(_glm45, trigger="<tool_call>", separator="\n"),
    "llama3": CallSyntax(
        _envelope("parameters"), trigger="<|python_tag|>", opening="<|python_tag|>", separator="; ",
        opens_only_after_trigger=True,
    ),
    "pythonic": CallSyntax(_pythonic, opening="[", separator=", ", closing="]"),
    "mistral": CallSyntax(
        _envelope("arguments"), trigger="[TOOL_CALLS]", opening="[TOOL_CALLS][", separator=", ", closing="]"
    ),
    "mistral_v11": CallSyntax(_mistral_named, trigger="[TOOL_CALLS]"),
    "deepseek_v3": CallSyntax(
        _deepseek_v3, trigger="<｜tool▁calls▁begin｜>", opening="<｜tool▁calls▁begin｜>", separator="\n",
        closing="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallSyntax(
        _deepseek_v31, trigger="<｜tool▁calls▁begin｜>", opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": CallSyntax(
        _kimi, trigger="<|tool_calls_section_begin|>", opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
    ),
    "gpt-oss": CallSyntax(_harmony, trigger=" to=functions."),
}

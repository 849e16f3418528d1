"""How each family writes calls, as structural-tag formats (see common/grammar_tags.py).

The same syntax that the family's parser reads: what a grammar made from these allows, the parser
turns into calls whose arguments fit the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from gateway.tool_parsers.schema_fit import Format, Function, Parameter, SchemaFit
from gateway.tool_parsers.schema_types import is_boolean


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A family's calls: ``opening call (separator call)* closing``.

    ``call`` gives a tag (begin, content, end) for one function. With tool_choice auto the grammar
    binds from ``trigger`` on, with which ``opening`` and the call's begin must begin; an empty
    trigger means that free text cannot be told from a call's beginning, and auto is not constrained.
    """

    call: Callable[[Function, SchemaFit], Format]
    trigger: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    opens_only_after_trigger: bool = False
    """``opening`` is written in auto only (Llama's <|python_tag|>)."""
    one_by_one: bool = False
    """Each argument is written, and bound, by itself: keywords about the object as a whole are not."""
    string_end: str = ""
    """Not empty: strings are bare text that this ends."""
    parameter_name: str = "(?s:.*)"
    function_name: str = ".*"
    """Regular expressions for names that can be written."""


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _optional(form: Format) -> Format:
    return {"type": "or", "elements": [_text(""), form]}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements or [_text("")]}


def _envelope(key: str) -> Callable[[Function, SchemaFit], Format]:
    def call(function: Function, fit: SchemaFit) -> Format:
        begin = f'{{"name": {json.dumps(function.name)}, "{key}": '
        return _tag(begin, fit.json(function.parameters), "}")

    return call


def _hermes(function: Function, fit: SchemaFit) -> Format:
    inner = _envelope("arguments")(function, fit)
    return _tag("<tool_call>\n" + inner["begin"], inner["content"], "}\n</tool_call>")


def _mistral_named(function: Function, fit: SchemaFit) -> Format:
    return _tag(f"[TOOL_CALLS]{function.name}[ARGS]", fit.json(function.parameters), "")


def _deepseek_v3(function: Function, fit: SchemaFit) -> Format:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{function.name}\n```json\n"
    return _tag(begin, fit.json(function.parameters), "\n```<｜tool▁call▁end｜>")


def _deepseek_v31(function: Function, fit: SchemaFit) -> Format:
    begin = f"<｜tool▁call▁begin｜>{function.name}<｜tool▁sep｜>"
    return _tag(begin, fit.json(function.parameters), "<｜tool▁call▁end｜>")


def _kimi(function: Function, fit: SchemaFit) -> Format:
    index = {"type": "regex", "pattern": "[0-9]{1,2}"}
    content = _sequence([index, _text("<|tool_call_argument_begin|>"), fit.json(function.parameters)])
    return _tag(f"<|tool_call_begin|>functions.{function.name}:", content, "<|tool_call_end|>")


def _harmony(function: Function, fit: SchemaFit) -> Format:
    # The <|call|> after it is an end-of-sequence token: it may follow, and need not be written.
    begin = f" to=functions.{function.name}"
    header = {"type": "or", "elements": [
        _text("<|channel|>commentary <|constrain|>json<|message|>"),
        _text(" <|constrain|>json<|message|>"), _text("<|channel|>commentary json<|message|>"),
    ]}
    return _tag(begin, _sequence([header, fit.json(function.parameters)]), "")


def _untyped(parameter: Parameter, fit: SchemaFit, begin: str, end: str, mark: str) -> Format:
    """A value between tags: text as it is where it can only be a string, else JSON. ``mark``: what ends it."""
    content = fit.text(parameter.schema, mark) if parameter.is_string else fit.json(parameter.schema)
    tag = _tag(begin, content, end)
    return tag if parameter.required else _optional(tag)


def _qwen3_coder(function: Function, fit: SchemaFit) -> Format:
    parts = [
        _untyped(each, fit, f"<parameter={each.name}>\n", "\n</parameter>\n", "</parameter>")
        for each in function.each_parameter()
    ]
    return _tag(f"<tool_call>\n<function={function.name}>\n", _sequence(parts), "</function>\n</tool_call>")


def _glm45(function: Function, fit: SchemaFit) -> Format:
    parts = [
        _untyped(each, fit, f"<arg_key>{each.name}</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>")
        for each in function.each_parameter()
    ]
    return _tag(f"<tool_call>{function.name}\n", _sequence(parts), "</tool_call>")


def _pythonic(function: Function, fit: SchemaFit) -> Format:
    # Required ones first, so that every optional one can bring its own comma.
    parameters = sorted(function.each_parameter(), key=lambda parameter: not parameter.required)
    pairs = [(_pythonic_pair(parameter, fit), parameter.required) for parameter in parameters]
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


def _pythonic_pair(parameter: Parameter, fit: SchemaFit) -> Format:
    if is_boolean(parameter.types):
        value: Format = {"type": "or", "elements": [_text("True"), _text("False")]}
    else:
        value = fit.json(parameter.schema)
    return _sequence([_text(f"{parameter.name}="), value])


SYNTAX: dict[str, CallSyntax] = {
    "hermes": CallSyntax(_hermes, trigger="<tool_call>", separator="\n"),
    "qwen3_coder": CallSyntax(
        _qwen3_coder, trigger="<tool_call>", separator="\n", one_by_one=True, string_end="</parameter>",
        parameter_name="[^>]{1,256}",
    ),
    "glm45": CallSyntax(
        _glm45, trigger="<tool_call>", separator="\n", one_by_one=True, string_end="</arg_value>",
        parameter_name=r"(?!\s)(?:(?!</arg_key>)(?s:.)){1,256}(?<!\s)",
    ),
    "llama3": CallSyntax(
        _envelope("parameters"), trigger="<|python_tag|>", opening="<|python_tag|>", separator="; ",
        opens_only_after_trigger=True,
    ),
    "pythonic": CallSyntax(
        _pythonic, opening="[", separator=", ", closing="]", one_by_one=True,
        parameter_name=r"[A-Za-z_][\w.-]{0,255}", function_name=r"[A-Za-z_][\w.-]*",
    ),
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

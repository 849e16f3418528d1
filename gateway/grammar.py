"""The spellings of constrained output, translated to one ``messages.Grammar``.

OpenAI's ``response_format``, SGLang's ``json_schema``/``regex``/``ebnf``, vLLM's ``guided_*`` and
``structured_outputs`` say the same few things. More than one constraint in a request is an error.
Whether a schema or expression is any good is decided by the tokenizer process, which compiles it.
"""

from __future__ import annotations

from typing import Any

import orjson

from common.errors import RequestError
from common.messages import Grammar
from gateway.fields import GenerationFields

MAX_GRAMMAR_BYTES = 256 << 10
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FORMAT_KEYS = {
    "text": {"type"},
    "json_object": {"type", "schema"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers", "format"},
}


def translate(fields: GenerationFields) -> Grammar | None:
    """The constraint a request asks for, or None. Raises RequestError (400) naming the parameter."""
    found: list[tuple[str, Grammar]] = []

    def add(param: str, grammar: Grammar | None) -> None:
        if grammar is not None:
            found.append((param, grammar))

    if fields.response_format is not None:
        add("response_format", _response_format(fields.response_format))
    if fields.structured_outputs is not None:
        add("structured_outputs", _structured_outputs(fields.structured_outputs))
    for param, value in (("json_schema", fields.json_schema), ("guided_json", fields.guided_json)):
        if value is not None:
            add(param, Grammar(kind="json_schema", text=_schema_text(value, param)))
    for param, text in (("regex", fields.regex), ("guided_regex", fields.guided_regex)):
        if text is not None:
            add(param, _text("regex", text, param))
    for param, text in (("ebnf", fields.ebnf), ("guided_grammar", fields.guided_grammar)):
        if text is not None:
            add(param, _text("ebnf", text, param))
    for param, items in (("choice", fields.choice), ("guided_choice", fields.guided_choice)):
        if items is not None:
            add(param, _choice(items, param))
    if fields.structural_tag is not None:
        add("structural_tag", structural_tag(fields.structural_tag, "structural_tag"))
    return one(found)


def one(found: list[tuple[str, Grammar]]) -> Grammar | None:
    """The only constraint of a request; RequestError when there are several or it is too large."""
    if len(found) > 1:
        names = " and ".join(f"'{param}'" for param, _ in found)
        raise RequestError(f"{names} both constrain the output; send one of them", param=found[1][0])
    for param, grammar in found:
        size = len(grammar.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(f"'{param}' has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}", param=param)
        return grammar
    return None


def _response_format(form: dict[str, Any]) -> Grammar | None:
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_FORMAT_KEYS)}, not {kind!r}", param="response_format.type"
        )
    _only(form, _FORMAT_KEYS[kind], "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        if form.get("schema") is not None:
            return Grammar(kind="json_schema", text=_schema_text(form["schema"], "response_format.schema"))
        return Grammar(kind="json_object", text="")
    if kind == "structural_tag":
        return Grammar(kind="structural_tag", text=_dump(form, "response_format"))
    inner = form.get("json_schema")
    if not isinstance(inner, dict):
        raise RequestError("response_format.json_schema must be an object", param="response_format.json_schema")
    _only(inner, {"name", "schema", "strict", "description"}, "response_format.json_schema")
    if inner.get("schema") is None:
        raise RequestError(
            "response_format.json_schema.schema is required", param="response_format.json_schema.schema"
        )
    if not isinstance(inner.get("strict", None), (bool, type(None))):
        raise RequestError("must be true or false", param="response_format.json_schema.strict")
    return Grammar(kind="json_schema", text=_schema_text(inner["schema"], "response_format.json_schema.schema"))


def _structured_outputs(form: dict[str, Any]) -> Grammar | None:
    _only(form, set(_STRUCTURED), "structured_outputs")
    found: list[tuple[str, Grammar]] = []
    for name in _STRUCTURED:
        value, param = form.get(name), f"structured_outputs.{name}"
        if value is None or value is False:
            continue
        if name == "json":
            found.append((param, Grammar(kind="json_schema", text=_schema_text(value, param))))
        elif name == "json_object":
            if value is not True:
                raise RequestError(f"{param} must be true or false", param=param)
            found.append((param, Grammar(kind="json_object", text="")))
        elif name == "choice":
            found.append((param, _choice(value, param)))
        elif name == "regex":
            found.append((param, _text("regex", value, param)))
        elif name == "grammar":
            found.append((param, _text("ebnf", value, param)))
        else:
            found.append((param, structural_tag(value, param)))
    if not found:
        raise RequestError("structured_outputs names no constraint", param="structured_outputs")
    return one(found)


def structural_tag(value: Any, param: str) -> Grammar:
    """A structural tag, as JSON text or as an object."""
    text = value if isinstance(value, str) else _dump(value, param)
    try:
        parsed = orjson.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(f"{param} must be an object", param=param)
    return Grammar(kind="structural_tag", text=text)


def _text(kind: Any, value: Any, param: str) -> Grammar:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} must be a string that is not empty", param=param)
    return Grammar(kind=kind, text=value)


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise RequestError(f"{param} must be a list of strings that are not empty", param=param)
    return Grammar(kind="choice", text=_dump(value, param))


def _schema_text(value: Any, param: str) -> str:
    """A JSON schema given as an object, a boolean, or JSON text of one."""
    if isinstance(value, str):
        try:
            parsed = orjson.loads(value)
        except ValueError as error:
            raise RequestError(f"{param} is not valid JSON: {error}", param=param) from None
        if not isinstance(parsed, (dict, bool)):
            raise RequestError(f"{param} must be a JSON schema (an object)", param=param)
        return value
    if not isinstance(value, (dict, bool)):
        raise RequestError(f"{param} must be a JSON schema (an object)", param=param)
    return _dump(value, param)


def _dump(value: Any, param: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} cannot be written as JSON: {error}", param=param) from None


def _only(form: dict[str, Any], allowed: set[str], param: str) -> None:
    for key in form:
        if key not in allowed:
            raise RequestError(f"unknown parameter: '{param}.{key}'", param=f"{param}.{key}", code="unknown_parameter")

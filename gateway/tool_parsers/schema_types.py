"""Which JSON types a parameter may have, for syntaxes whose values are untyped text."""

from __future__ import annotations

import ast
import json
from collections.abc import Set
from typing import Any

_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 16


def parameter_schemas(function: dict[str, Any] | None) -> dict[str, Any]:
    """Name -> schema of a function's parameters, references at the root resolved."""
    root = (function or {}).get("parameters")
    if not isinstance(root, dict):
        return {}
    properties = resolve(root, root).get("properties")
    return properties if isinstance(properties, dict) else {}


def resolve(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Follow ``#/...`` references; an empty schema where one leads nowhere."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            if part:
                target = target.get(part) if isinstance(target, dict) else None
        schema = target
    return schema if isinstance(schema, dict) else {}


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    """The types a value may have; empty when the schema does not say."""
    schema = resolve(schema, root)
    if depth > _MAX_DEPTH:
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_type_name(value) for value in values}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [types_of(option, root, depth + 1) for option in schema[key]]
            return set().union(*each) if all(each) else set()
    for option in schema.get("allOf", []) if isinstance(schema.get("allOf"), list) else []:
        if found := types_of(option, root, depth + 1):
            return found
    return set()


def is_boolean(types: Set[str]) -> bool:
    """It can only be true or false."""
    return types == {"boolean"}


def _type_name(value: Any) -> str:
    names: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
                              dict: "object"}
    return names.get(type(value), "null")


def value_text(raw: str, types: set[str]) -> str:
    """JSON text of an untyped value: itself where it is JSON of an allowed type, else a string."""
    text = _PYTHON_LITERALS.get(raw.strip(), raw.strip())
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = _python_container(text)
        if value is None:
            return json.dumps(raw, ensure_ascii=False)
        text = json.dumps(value, ensure_ascii=False)
    kind = _type_name(value)
    if not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types:
        return text
    return json.dumps(raw, ensure_ascii=False)


def _python_container(text: str) -> Any:
    """A list or object in Python's spelling (single quotes, True), which models slip into; else None."""
    if text[:1] not in "[{" or len(text) > 1 << 20:
        return None
    return python_value(text)


def python_value(text: str) -> Any:
    """A Python literal as a JSON-able value; None for anything else (and for None)."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

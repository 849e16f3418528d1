"""Which of a function's parameters a call syntax can be bound to, and the formats that bind it.

The verdicts are llguidance's own: a schema is tried, and what fails is bound loosely, or refused where the
function is ``strict``. Bounded in time, as this runs on the gateway's loop.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from common.errors import RequestError
from common.schema_keywords import KEYWORDS
from common.schema_place import place_of_refusal, why_refused
from common.schema_rewrites import pointer
from common.schema_text import string_terminal
from gateway.tool_parsers.schema_types import resolve, types_of

Format = dict[str, Any]

_MAX_TRIED_CHARS = 64 << 10
_MAX_TRY_S = 0.25
"""Of one request's schemas that are new, this much is tried here, on the gateway's loop. The rest counts
as enforceable: the tokenizer process compiles the whole grammar in a thread and refuses it if it is not."""
_CACHE_SIZE = 512


_WITHIN_REACH = frozenset({
    "type", "properties", "required", "$defs", "definitions", "$ref", "additionalProperties", "unevaluatedProperties",
})
"""Keywords of the parameters as a whole that hold where each argument is written by itself (no other ones are)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; ``schema`` has the root's definitions, ``types`` is empty where the schema does not say."""

    name: str
    schema: Any
    required: bool
    types: frozenset[str]

    @property
    def is_string(self) -> bool:
        """It can only be a string."""
        return self.types == {"string"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the request: its name and its parameters, an object schema."""

    name: str
    parameters: Format

    def each_parameter(self) -> list[Parameter]:
        """The parameters in the schema's order."""
        root = self.parameters
        described = resolve(root, root)
        properties, required = described.get("properties"), described.get("required")
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return [
            Parameter(
                name, {**schema, **shared} if isinstance(schema, dict) else schema,
                isinstance(required, list) and name in required, frozenset(types_of(schema, root)),
            )
            for name, schema in (properties if isinstance(properties, dict) else {}).items()
        ]


class SchemaFit:
    """Formats of argument values. Keeps the verdicts on schemas it has tried (bounded)."""

    def __init__(self) -> None:
        self.verdicts: OrderedDict[str, str] = OrderedDict()
        self._chars_left = 0
        self._try_until = 0.0

    def begin_request(self) -> None:
        """Give the next request its time."""
        self._chars_left, self._try_until = _MAX_TRIED_CHARS, time.monotonic() + _MAX_TRY_S

    def json(self, schema: Any) -> Format:
        """A value of the schema as JSON; any object (or value) where it cannot be enforced."""
        if self.why_not_json(schema):
            schema = {"type": "object"} if isinstance(schema, dict) and schema.get("type") == "object" else {}
        return {"type": "json_schema", "json_schema": schema}

    def text(self, schema: Any, end: str) -> Format:
        """A string of the schema as bare text in which ``end`` does not occur; any such text where it cannot be
        enforced."""
        loose = {"type": "string"} if self.why_not_text(schema, end) else schema
        return {"type": "bare_string", "json_schema": loose, "excludes": [end]}

    def why_not_json(self, schema: Any) -> str:
        """Why a schema cannot be enforced; empty: it can."""
        return self._verdict("", schema)

    def why_not_text(self, schema: Any, end: str) -> str:
        """Why the schema's strings cannot be enforced as bare text without ``end``; empty: they can."""
        return self._verdict(end, schema)

    def why_not_one_by_one(self, function: Function, string_end: str) -> str:
        """Why the parameters cannot be enforced where each argument is written by itself; empty: they can."""
        for schema in (function.parameters, resolve(function.parameters, function.parameters)):
            for key in schema:
                known = KEYWORDS.get(key)
                if known and known.status != "annotation" and key not in _WITHIN_REACH:
                    return f"JSON schema at #/{key}: the model's call syntax writes each argument by itself"
        described = resolve(function.parameters, function.parameters)
        properties, required = described.get("properties", {}), described.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return self.why_not_json(function.parameters)
        for name in required:
            if name not in properties:
                return f"JSON schema at #/required: {name!r} is not among the properties"
        for each in function.each_parameter():
            in_text = bool(string_end) and each.is_string
            words = self.why_not_text(each.schema, string_end) if in_text else self.why_not_json(each.schema)
            if words:
                return words.replace("JSON schema at #", f"JSON schema at {pointer('#/properties', each.name)}", 1)
        return ""

    def _verdict(self, end: str, schema: Any) -> str:
        key = end + json.dumps(schema)
        words = self.verdicts.get(key)
        if words is None:
            self._chars_left -= len(key)
            if self._chars_left < 0 or time.monotonic() > self._try_until:
                return ""
            words = _try_text(schema, end) if end else _try_schema(schema)
            self.verdicts[key] = words
            if len(self.verdicts) > _CACHE_SIZE:
                self.verdicts.popitem(last=False)
        return words


def _try_text(schema: Any, end: str) -> str:
    try:
        string_terminal(schema, (end,))
    except RequestError as error:
        return error.info.message
    return ""


def _try_schema(schema: Any) -> str:
    words = why_refused(schema)
    if words and not words.startswith("JSON schema at #"):
        return f"JSON schema at {place_of_refusal(schema)}: {words}"
    return words

"""JSON Schema (2020-12, with draft 4-7 spellings) made ready for llguidance.

llguidance ignores keywords it does not know, so what it cannot enforce must be refused here, by
name and place; what is only an annotation is dropped; and a few keywords are rewritten into ones
it enforces. ``schema_keywords`` has the whole table.
"""

from __future__ import annotations

import json
import re
from urllib.parse import unquote

from common.errors import RequestError
from common.grammar_regex import portable_regex
from common.schema_keywords import KEYWORDS, TYPES
from common.schema_rewrites import REWRITES, Json, Schema, check_names, pointer, refuse

MAX_SCHEMA_BYTES = 512 << 10
MAX_SCHEMA_DEPTH = 64

WHITESPACE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""One way to write each value: nothing to loop in, and every separator can be jumped over."""

_GUIDANCE_TYPES: dict[str, type] = {
    "item_separator": str, "key_separator": str, "whitespace_flexible": bool, "whitespace_pattern": str,
    "coerce_one_of": bool,
}

_PLAIN_REF = re.compile(r"#/(\$defs|definitions)/[^/]+")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
           "maxContains")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def prepare_schema(schema: Json) -> Schema:
    """Check a schema and return the one to compile, with our white space in ``x-guidance``.

    ``schema`` is decoded JSON and is not changed. Raises RequestError (400) that names the place as
    a JSON pointer (``#/properties/a``) for anything malformed, unsupported or too deep.
    """
    guidance = dict(WHITESPACE)
    if isinstance(schema, dict) and "x-guidance" in schema:
        guidance.update(_checked_guidance(schema["x-guidance"]))
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    root = {} if schema is True else schema
    if not isinstance(root, dict):
        refuse("#", f"a schema must be an object, not {json.dumps(root)[:80]}")
    preparer = _Preparer(root)
    prepared = preparer.prepare(root, "#", 0)
    if not isinstance(prepared, dict):
        refuse("#", "the schema allows nothing")
    # Printable characters have one spelling only: else "\u0061" would be an additional property "a".
    # (Where a fixed value needs \u, llguidance would silently leave the character out.)
    if not _has_control_characters(prepared):
        guidance["json_allowed_escapes"] = 'nrbtf\\"'
    preparer.hoist_into(prepared)
    return {"x-guidance": guidance, **prepared}


def load_json(text: str, what: str) -> Json:
    """Decode a client's JSON; RequestError (400) when it is none or too long."""
    if len(text) > MAX_SCHEMA_BYTES:
        words = f"{what} has {len(text)} characters; the limit is {MAX_SCHEMA_BYTES}"
        raise RequestError(words, code="grammar_too_large")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not valid JSON: {error}", code="invalid_grammar") from None


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")



def _checked_guidance(options: Json) -> Schema:
    if not isinstance(options, dict):
        refuse("#/x-guidance", "must be an object")
    for key, value in options.items():
        if key not in _GUIDANCE_TYPES or not isinstance(value, _GUIDANCE_TYPES[key]):
            refuse(f"#/x-guidance/{key}", f"not one of {', '.join(_GUIDANCE_TYPES)} with a value of its type")
    checked: Schema = dict(options)
    if checked.get("whitespace_flexible") and "whitespace_pattern" not in checked:
        # Bounded: a model that loves white space must not be able to loop in it.
        checked["whitespace_pattern"] = r"[\x20\x0A\x0D\x09]{1,16}"
        checked.setdefault("item_separator", ",")
        checked.setdefault("key_separator", ":")
    return checked


def _has_control_characters(value: Json) -> bool:
    if isinstance(value, str):
        return any((char < " " and char not in "\n\r\b\t\f") or char == "\x7f" for char in value)
    if isinstance(value, dict):
        return any(_has_control_characters(key) or _has_control_characters(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_control_characters(item) for item in value)



class _Preparer:
    """One pass over a schema; ``root`` is what references point into."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._hoisted: dict[str, str] = {}
        """Reference -> name under ``$defs``, for those that point anywhere else: the place may be
        under a keyword that is dropped (OpenAPI's ``components``) or rewritten."""

    def prepare(self, schema: Json, path: str, depth: int) -> Json:
        """The schema to compile for ``schema`` at ``path``."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            refuse(path, f"a schema must be an object or a boolean, not {json.dumps(schema)[:80]}")
        if depth > MAX_SCHEMA_DEPTH:
            refuse(path, f"nested deeper than {MAX_SCHEMA_DEPTH}")
        out: Schema = {}
        for key, value in schema.items():
            keyword = KEYWORDS.get(key)
            if keyword is None or keyword.kind == "annotation" or keyword.status == "annotation":
                continue  # unknown keywords are annotations (2020-12 core, 6.5)
            place = pointer(path, key)
            match keyword.kind:
                case "schema" if key == "items" and isinstance(value, list):
                    out[key] = self._list(value, place, depth)
                case "schema":
                    out[key] = self.prepare(value, place, depth + 1)
                case "schemas":
                    out[key] = self._list(value, place, depth)
                case "schema_map":
                    if not isinstance(value, dict):
                        refuse(place, "must be an object of schemas")
                    rename = portable_regex if key == "patternProperties" else str
                    out[key] = {
                        rename(name): self.prepare(item, pointer(place, name), depth + 1)
                        for name, item in value.items()
                    }
                case _:
                    out[key] = value
        self._check_values(out, path)
        for rewrite in REWRITES:
            rewrite(out, path)
        for key in out:
            if KEYWORDS[key].status == "refused":
                note = KEYWORDS[key].note
                refuse(pointer(path, key), f"the keyword {key!r} cannot be enforced" + (f" ({note})" if note else ""))
        return out

    def _list(self, value: Json, place: str, depth: int) -> list[Json]:
        if not isinstance(value, list) or not value:
            refuse(place, "must be a list of schemas that is not empty")
        return [self.prepare(item, pointer(place, index), depth + 1) for index, item in enumerate(value)]

    def _check_values(self, out: Schema, path: str) -> None:
        for key, value in out.items():
            place = pointer(path, key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if key in _COUNTS and not (number and value >= 0 and value == int(value)):
                refuse(place, f"must be an integer of at least 0, not {json.dumps(value)[:80]}")
            if key in _NUMBERS and not number and not (key.startswith("exclusive") and isinstance(value, bool)):
                refuse(place, f"must be a number, not {json.dumps(value)[:80]}")
            if key == "multipleOf" and value <= 0:
                refuse(place, f"must be above 0, not {value}")
            if key in ("pattern", "format") and not isinstance(value, str):
                refuse(place, "must be a string")
            if key == "enum" and (not isinstance(value, list) or not value):
                refuse(place, "must be a list that is not empty")
            if key == "required":
                check_names(value, place)
        if "type" in out:
            names = out["type"] if isinstance(out["type"], list) else [out["type"]]
            for name in names or [None]:
                if not isinstance(name, str) or name not in TYPES:
                    known = ", ".join(sorted(TYPES))
                    refuse(pointer(path, "type"), f"{json.dumps(name)[:80]} is no type; the types are {known}")
        if "$ref" in out:
            out["$ref"] = self._local_ref(out["$ref"], pointer(path, "$ref"))
        if path == "#":
            out.pop("$id", None)
        elif "$id" in out:
            refuse(pointer(path, "$id"), "only the root may have an $id")

    def hoist_into(self, prepared: Schema) -> None:
        """Put what references point at (outside ``$defs``) under ``$defs``."""
        done: set[str] = set()
        while pending := self._hoisted.keys() - done:
            for ref in sorted(pending):
                done.add(ref)
                target = self.prepare(self._target(ref, ref), ref, 0)
                prepared.setdefault("$defs", {})[self._hoisted[ref]] = target

    def _local_ref(self, ref: Json, place: str) -> str:
        """Follow a chain of references; it must stay inside the schema and reach one that says something."""
        first, seen = ref, set()
        while True:
            if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
                refuse(place, f"{json.dumps(ref)[:120]} is not supported; only '#/...' within the schema is")
            if ref in seen:
                refuse(place, f"{ref!r} refers to itself")
            seen.add(ref)
            target = self._target(ref, place)
            if not isinstance(target, dict) or "$ref" not in target:
                break
            ref = target["$ref"]
        if first == "#" or _PLAIN_REF.fullmatch(first):
            return str(first)
        return "#/$defs/" + self._hoisted.setdefault(first, f"ref-{len(self._hoisted)}-hoisted")

    def _target(self, ref: str, place: str) -> Json:
        target: Json = self._root
        for part in unquote(ref[2:]).split("/") if ref != "#" else ():
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and part.isdigit() and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                target = target[part]
            else:
                refuse(place, f"{ref!r} does not exist in the schema")
        return target

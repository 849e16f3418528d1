"""JSON Schema (2020-12, with draft 4-7 spellings) made ready for llguidance.

llguidance ignores keywords it does not know, so what it cannot enforce must be refused here, by
name and place; what is only an annotation is dropped; and a few keywords are rewritten into ones
it enforces. ``schema_keywords`` has the whole table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import unquote

from common.errors import RequestError
from common.grammar_regex import portable_regex
from common.schema_keywords import FORMATS, KEYWORDS, MAX_DEPENDENCIES, TYPES

Json = Any
Schema = dict[str, Any]

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
_EVALUATES_PROPERTIES = frozenset({"anyOf", "allOf", "oneOf", "$ref", "additionalProperties"})
_EVALUATES_ITEMS = frozenset({"anyOf", "allOf", "oneOf", "$ref", "items"})


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
        _refuse("#", f"a schema must be an object, not {json.dumps(root)[:80]}")
    preparer = _Preparer(root)
    prepared = preparer.prepare(root, "#", 0)
    if not isinstance(prepared, dict):
        _refuse("#", "the schema allows nothing")
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


def _refuse(path: str, words: str) -> NoReturn:
    raise RequestError(f"JSON schema at {path}: {words}", code="invalid_schema")


def _checked_guidance(options: Json) -> Schema:
    if not isinstance(options, dict):
        _refuse("#/x-guidance", "must be an object")
    for key, value in options.items():
        if key not in _GUIDANCE_TYPES or not isinstance(value, _GUIDANCE_TYPES[key]):
            _refuse(f"#/x-guidance/{key}", f"not one of {', '.join(_GUIDANCE_TYPES)} with a value of its type")
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


def _pointer(path: str, key: object) -> str:
    return path + "/" + str(key).replace("~", "~0").replace("/", "~1")


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
            _refuse(path, f"a schema must be an object or a boolean, not {json.dumps(schema)[:80]}")
        if depth > MAX_SCHEMA_DEPTH:
            _refuse(path, f"nested deeper than {MAX_SCHEMA_DEPTH}")
        out: Schema = {}
        for key, value in schema.items():
            keyword = KEYWORDS.get(key)
            if keyword is None or keyword.kind == "annotation" or keyword.status == "annotation":
                continue  # unknown keywords are annotations (2020-12 core, 6.5)
            place = _pointer(path, key)
            match keyword.kind:
                case "schema" if key == "items" and isinstance(value, list):
                    out[key] = self._list(value, place, depth)
                case "schema":
                    out[key] = self.prepare(value, place, depth + 1)
                case "schemas":
                    out[key] = self._list(value, place, depth)
                case "schema_map":
                    if not isinstance(value, dict):
                        _refuse(place, "must be an object of schemas")
                    rename = portable_regex if key == "patternProperties" else str
                    out[key] = {
                        rename(name): self.prepare(item, _pointer(place, name), depth + 1)
                        for name, item in value.items()
                    }
                case _:
                    out[key] = value
        self._check_values(out, path)
        for rewrite in _REWRITES:
            rewrite(out, path)
        for key in out:
            if KEYWORDS[key].status == "refused":
                note = KEYWORDS[key].note
                _refuse(_pointer(path, key), f"the keyword {key!r} cannot be enforced" + (f" ({note})" if note else ""))
        return out

    def _list(self, value: Json, place: str, depth: int) -> list[Json]:
        if not isinstance(value, list) or not value:
            _refuse(place, "must be a list of schemas that is not empty")
        return [self.prepare(item, _pointer(place, index), depth + 1) for index, item in enumerate(value)]

    def _check_values(self, out: Schema, path: str) -> None:
        for key, value in out.items():
            place = _pointer(path, key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if key in _COUNTS and not (number and value >= 0 and value == int(value)):
                _refuse(place, f"must be an integer of at least 0, not {json.dumps(value)[:80]}")
            if key in _NUMBERS and not number and not (key.startswith("exclusive") and isinstance(value, bool)):
                _refuse(place, f"must be a number, not {json.dumps(value)[:80]}")
            if key == "multipleOf" and value <= 0:
                _refuse(place, f"must be above 0, not {value}")
            if key in ("pattern", "format") and not isinstance(value, str):
                _refuse(place, "must be a string")
            if key == "enum" and (not isinstance(value, list) or not value):
                _refuse(place, "must be a list that is not empty")
            if key == "required":
                _check_names(value, place)
        if "type" in out:
            names = out["type"] if isinstance(out["type"], list) else [out["type"]]
            for name in names or [None]:
                if not isinstance(name, str) or name not in TYPES:
                    known = ", ".join(sorted(TYPES))
                    _refuse(_pointer(path, "type"), f"{json.dumps(name)[:80]} is no type; the types are {known}")
        if "$ref" in out:
            out["$ref"] = self._local_ref(out["$ref"], _pointer(path, "$ref"))
        if path == "#":
            out.pop("$id", None)
        elif "$id" in out:
            _refuse(_pointer(path, "$id"), "only the root may have an $id")

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
                _refuse(place, f"{json.dumps(ref)[:120]} is not supported; only '#/...' within the schema is")
            if ref in seen:
                _refuse(place, f"{ref!r} refers to itself")
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
                _refuse(place, f"{ref!r} does not exist in the schema")
        return target


def _check_names(value: Json, place: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        _refuse(place, "must be a list of strings")


# --------------------------------------------------------------------------- rewrites, in order


def _rewrite_older_drafts(out: Schema, path: str) -> None:
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in out:
            out["items"] = out.pop("additionalItems")
    out.pop("additionalItems", None)
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(out.get(exclusive), bool) and out.pop(exclusive) and limit in out:
            out[exclusive] = out.pop(limit)
    for name, needs in (out.pop("dependencies", None) or {}).items():
        if not isinstance(needs, list):
            _refuse(_pointer(path, "dependencies"), "schemas as dependencies cannot be enforced")
        out["dependentRequired"] = {**out.get("dependentRequired", {}), name: needs}


def _make_portable(out: Schema, path: str) -> None:
    if "pattern" in out:
        out["pattern"] = portable_regex(out["pattern"])


def _drop_what_says_nothing(out: Schema, path: str) -> None:
    if out.get("not") is False:
        del out["not"]
    if "if" not in out:
        out.pop("then", None)
        out.pop("else", None)
    if "contains" not in out or (out.get("minContains") == 0 and "maxContains" not in out):
        for key in ("contains", "minContains", "maxContains"):
            out.pop(key, None)
    if "format" in out and out["format"] not in FORMATS:
        del out["format"]
    if "uniqueItems" in out:
        if out["uniqueItems"] and out.get("maxItems", 2) > 1:
            words = "the keyword 'uniqueItems' cannot be enforced (only with maxItems of 0 or 1)"
            _refuse(_pointer(path, "uniqueItems"), words)
        del out["uniqueItems"]


def _rewrite_unevaluated(out: Schema, path: str) -> None:
    for key, same_as, evaluates in (
        ("unevaluatedProperties", "additionalProperties", _EVALUATES_PROPERTIES),
        ("unevaluatedItems", "items", _EVALUATES_ITEMS),
    ):
        if key in out:
            value = out.pop(key)
            beside = evaluates & out.keys()
            if same_as in beside or value in (True, {}):
                continue  # nothing is left unevaluated, or all is allowed
            if beside:
                _refuse(_pointer(path, key), f"the keyword {key!r} cannot be enforced beside {sorted(beside)}")
            out[same_as] = value


def _rewrite_property_names(out: Schema, path: str) -> None:
    if "propertyNames" not in out:
        return
    names = out.pop("propertyNames")
    if names in (True, {}, {"type": "string"}):
        return
    others = out.get("additionalProperties", True)
    place = _pointer(path, "propertyNames")
    if others is False and not out.get("properties"):
        return
    simple = isinstance(names, dict) and len(names.keys() - {"type"}) == 1 and "patternProperties" not in out
    if simple and isinstance(names.get("enum"), list):
        known = {name: item for name, item in out.get("properties", {}).items() if name in names["enum"]}
        extra = {name: others for name in names["enum"] if isinstance(name, str) and name not in known}
        out["properties"] = {**known, **extra}
    elif simple and "pattern" in names and not out.get("properties"):
        out["patternProperties"] = {names["pattern"]: others}
    else:
        _refuse(place, "the keyword 'propertyNames' cannot be enforced here (a single 'pattern' or 'enum' can)")
    out["additionalProperties"] = False


def _rewrite_dependent_required(out: Schema, path: str) -> None:
    if "dependentRequired" not in out:
        return
    needs = out.pop("dependentRequired")
    place = _pointer(path, "dependentRequired")
    if not isinstance(needs, dict) or len(needs) > MAX_DEPENDENCIES:
        _refuse(place, f"must be an object of at most {MAX_DEPENDENCIES} lists of names")
    for name, required in needs.items():
        _check_names(required, _pointer(place, name))
        if required:
            # "a needs b" is "no a, or b".
            either = {"anyOf": [{"properties": {name: False}}, {"required": required}]}
            out["allOf"] = [*out.get("allOf", []), either]


def _check_min_properties(out: Schema, path: str) -> None:
    # Additional names may repeat, and a repeated name counts once: so more than one cannot be promised.
    if "minProperties" in out:
        least = int(out["minProperties"])
        if least <= len(set(out.get("required", ()))):
            del out["minProperties"]
        elif least > 1:
            words = f"{least} cannot be enforced: list the names in 'required' instead"
            _refuse(_pointer(path, "minProperties"), words)


_REWRITES: tuple[Callable[[Schema, str], None], ...] = (
    _rewrite_older_drafts, _make_portable, _drop_what_says_nothing, _rewrite_unevaluated, _rewrite_property_names,
    _rewrite_dependent_required, _check_min_properties,
)

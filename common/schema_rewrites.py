"""Keywords that llguidance lacks, written in keywords it enforces; refusals that name their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import RequestError
from common.grammar_regex import portable_regex
from common.schema_keywords import FORMATS, MAX_DEPENDENCIES

Json = Any
Schema = dict[str, Any]

_EVALUATES_PROPERTIES = frozenset({"anyOf", "allOf", "oneOf", "$ref", "additionalProperties"})
_EVALUATES_ITEMS = frozenset({"anyOf", "allOf", "oneOf", "$ref", "items"})


def refuse(path: str, words: str) -> NoReturn:
    """The 400 for what stands at ``path`` (a JSON pointer with ``#``)."""
    raise RequestError(f"JSON schema at {path}: {words}", code="invalid_schema")


def pointer(path: str, key: object) -> str:
    """The JSON pointer of ``key`` below ``path``."""
    return path + "/" + str(key).replace("~", "~0").replace("/", "~1")


def check_names(value: Json, place: str) -> None:
    """Refuse what is no list of strings."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        refuse(place, "must be a list of strings")


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
            refuse(pointer(path, "dependencies"), "schemas as dependencies cannot be enforced")
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
            refuse(pointer(path, "uniqueItems"), words)
        del out["uniqueItems"]


def _rewrite_distinct_values(out: Schema, path: str) -> None:
    options = out.get("oneOf", [])
    values: list[str] = []
    for option in options:
        keys = set(option) if isinstance(option, dict) else set()
        if keys - {"type"} not in ({"const"}, {"enum"}):
            return
        each = [option["const"]] if "const" in option else option["enum"]
        values += [json.dumps(float(value) if _is_number(value) else value, sort_keys=True) for value in each]
    if values and len(set(values)) == len(values):
        # Different values exclude each other, so one of them is any of them.
        out["allOf"] = [*out.get("allOf", []), {"anyOf": out.pop("oneOf")}]


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**53


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
                refuse(pointer(path, key), f"the keyword {key!r} cannot be enforced beside {sorted(beside)}")
            out[same_as] = value


def _rewrite_property_names(out: Schema, path: str) -> None:
    if "propertyNames" not in out:
        return
    names = out.pop("propertyNames")
    if names in (True, {}, {"type": "string"}):
        return
    others = out.get("additionalProperties", True)
    place = pointer(path, "propertyNames")
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
        refuse(place, "the keyword 'propertyNames' cannot be enforced here (a single 'pattern' or 'enum' can)")
    out["additionalProperties"] = False


def _rewrite_dependent_required(out: Schema, path: str) -> None:
    if "dependentRequired" not in out:
        return
    needs = out.pop("dependentRequired")
    place = pointer(path, "dependentRequired")
    if not isinstance(needs, dict) or len(needs) > MAX_DEPENDENCIES:
        refuse(place, f"must be an object of at most {MAX_DEPENDENCIES} lists of names")
    for name, required in needs.items():
        check_names(required, pointer(place, name))
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
            refuse(pointer(path, "minProperties"), words)


REWRITES: tuple[Callable[[Schema, str], None], ...] = (
    _rewrite_older_drafts, _make_portable, _drop_what_says_nothing, _rewrite_unevaluated, _rewrite_distinct_values,
    _rewrite_property_names, _rewrite_dependent_required, _check_min_properties,
)
"""In order; each changes one prepared schema in place, its path for the words of a refusal."""

"""Some hundred schemas over the keywords of JSON Schema, by keyword. Own cases.

A case is only a schema: it must either be refused, or everything its grammar lets through must
validate. Which of the two is expected of a keyword says ``common.schema_keywords.KEYWORDS``.
"""

from __future__ import annotations

from typing import Any

OBJ: dict[str, Any] = {"type": "object", "additionalProperties": False}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DRAFT4 = "http://json-schema.org/draft-04/schema#"
DRAFT7 = "http://json-schema.org/draft-07/schema#"


def _obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {**OBJ, "properties": properties, "required": list(properties) if required is None else required, **more}


def _sized(name: str, kind: str) -> list[Any]:
    sizes = (0, 1, 2, 5, 17)
    items: dict[str, Any] = {"items": SMALL} if kind == "array" else {}
    return [{"type": kind, name: size, **items} for size in sizes]


CASES: dict[str, list[Any]] = {
    "type": [
        *({"type": name} for name in TYPES),
        *({"type": [first, second]} for first in TYPES for second in TYPES if first < second),
        {"type": list(TYPES)}, True, {},
    ],
    "enum": [
        {"enum": [1]}, {"enum": ["a", "b", "ab"]}, {"enum": [None, True, 1, "1", [1], {"a": 1}]}, {"enum": [0.5, -1e3]},
        {"enum": ["ü", "\n", "\"", "\\", "\u2028", "\x01", "/", "</tag>"]}, {"type": "string", "enum": ["a", 1]},
        {"enum": [[], {}, [[]], {"": {}}]}, _obj({"k": {"enum": ["x", "y"]}}), {"enum": [f"v{i}" for i in range(300)]},
    ],
    "const": [
        {"const": None}, {"const": False}, {"const": 0}, {"const": 1.0}, {"const": -1.5e-7}, {"const": "a b"},
        {"const": ""},
        {"const": [1, [2, {"a": None}]]}, {"const": {"b": 1, "a": [True]}}, _obj({"kind": {"const": "x"}}),
        {"const": 10**20}, {"const": "emoji 🙂 and \x7f"},
    ],
    "minLength": [*_sized("minLength", "string"), {"type": "string", "minLength": 3, "maxLength": 3}],
    "maxLength": [*_sized("maxLength", "string"), {"type": "string", "minLength": 2, "maxLength": 40}],
    "pattern": [
        *({"type": "string", "pattern": pattern} for pattern in (
            "^a+$", "a", "^[^a]{2,4}$", "^(foo|bar)-\\d{3}$", "^\\w+@\\w+\\.com$", "^\\s\\S$", "^[\\]\\[/]$", "^.$",
            "x$", "^y",
            "^a|b$", "^(?:ab){2}$", "^\\u00e9+$", "^\"\\\\\"$", "^[\\d.-]+$", "^\\D\\W$", "", "^$",
        )),
        {"type": "string", "pattern": "^a(?=b)"}, {"type": "string", "pattern": "\\bword\\b"},
        {"type": "string", "pattern": "(a)\\1"}, {"type": "string", "pattern": "["},
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    ],
    "format": [
        *({"type": "string", "format": name} for name in (
            "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "idn-email",
            "uri-reference", "iri", "json-pointer", "regex", "binary", "password", "made-up",
        )),
        {"type": "integer", "format": "int32"}, {"type": ["string", "null"], "format": "uuid"},
    ],
    "minimum": [
        *({"type": kind, "minimum": low} for kind in ("integer", "number") for low in (-7, 0, 3, 2.5, 1000)),
        {"minimum": 5}, {"type": "integer", "minimum": 5, "maximum": 5},
    ],
    "maximum": [
        *({"type": kind, "maximum": high} for kind in ("integer", "number") for high in (-7, 0, 3, 2.5, 1000)),
        {"type": "number", "minimum": -0.25, "maximum": 0.25}, {"type": "integer", "minimum": 5, "maximum": 4},
    ],
    "exclusiveMinimum": [
        {"type": "integer", "exclusiveMinimum": 3}, {"type": "number", "exclusiveMinimum": 0},
        {"$schema": DRAFT4, "type": "integer", "minimum": 3, "exclusiveMinimum": True},
        {"$schema": DRAFT4, "type": "integer", "minimum": 3, "exclusiveMinimum": False},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    ],
    "exclusiveMaximum": [
        {"type": "integer", "exclusiveMaximum": 3}, {"type": "number", "exclusiveMaximum": 0},
        {"$schema": DRAFT4, "type": "integer", "maximum": 3, "exclusiveMaximum": True},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
    ],
    "multipleOf": [
        *({"type": "integer", "multipleOf": step} for step in (1, 2, 7, 100)), {"type": "number", "multipleOf": 0.5},
        {"type": "integer", "multipleOf": 3, "minimum": 10, "maximum": 20}, {"type": "integer", "multipleOf": 0},
        {"type": "number", "multipleOf": -1},
    ],
    "items": [
        *({"type": "array", "items": item, "maxItems": 4} for item in (SMALL, WORD, {"type": "boolean"}, True, False)),
        {"items": SMALL}, {"type": "array", "items": {"type": "array", "items": SMALL, "maxItems": 2}, "maxItems": 3},
        {"type": "array", "items": _obj({"a": SMALL}), "minItems": 1, "maxItems": 2},
        {"$schema": DRAFT7, "type": "array", "items": [SMALL, WORD], "additionalItems": False},
        {"$schema": DRAFT7, "type": "array", "items": [SMALL, WORD], "additionalItems": {"type": "null"},
         "maxItems": 4},
    ],
    "prefixItems": [
        {"type": "array", "prefixItems": [SMALL, WORD], "items": False},
        {"type": "array", "prefixItems": [SMALL, WORD], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [SMALL], "items": {"type": "boolean"}, "maxItems": 3},
        {"type": "array", "prefixItems": [{"const": "a"}, {"const": 1}], "minItems": 1, "maxItems": 3},
    ],
    "additionalItems": [
        {"$schema": DRAFT7, "type": "array", "items": SMALL, "additionalItems": False, "maxItems": 3},
        {"$schema": DRAFT7, "type": "array", "items": [SMALL], "additionalItems": WORD, "maxItems": 3},
    ],
    "minItems": [*_sized("minItems", "array"),
     {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "boolean"}}],
    "maxItems": [*_sized("maxItems", "array"), {"type": "array", "minItems": 3, "maxItems": 1}],
    "uniqueItems": [
        {"type": "array", "items": SMALL, "uniqueItems": False, "maxItems": 3}, {"type": "array", "uniqueItems": True},
        {"type": "array", "items": SMALL, "uniqueItems": True, "maxItems": 1},
    ],
    "contains": [
        {"type": "array", "contains": SMALL}, {"type": "array", "contains": SMALL, "minContains": 0, "maxItems": 2},
        {"type": "array", "contains": SMALL, "minContains": 0, "maxContains": 1},
    ],
    "minContains": [{"type": "array", "items": SMALL, "minContains": 2, "maxItems": 3}],
    "maxContains": [{"type": "array", "items": SMALL, "maxContains": 2, "maxItems": 3}],
    "unevaluatedItems": [
        {"type": "array", "prefixItems": [SMALL], "unevaluatedItems": False},
        {"type": "array", "unevaluatedItems": SMALL},
        {"type": "array", "items": SMALL, "unevaluatedItems": False, "maxItems": 2},
        {"type": "array", "anyOf": [{"prefixItems": [SMALL]}], "unevaluatedItems": False},
    ],
    "properties": [
        *(_obj({f"k{i}": SMALL for i in range(count)}) for count in (0, 1, 2, 9)),
        *(_obj({"a": SMALL, "b": WORD, "c": {"type": "boolean"}}, needed) for needed in ([], ["a"], ["b"], ["a", "c"])),
        _obj({"a b": SMALL, "ü\n\"": SMALL, "": SMALL}), _obj({"outer": _obj({"inner": _obj({"leaf": WORD})})}),
        {"properties": {"a": SMALL}, "type": "object"}, _obj({"a": True, "b": {}}),
        _obj({"a": False, "b": SMALL}, ["b"]),
        {"type": "object", "properties": {"control \x01": SMALL}, "required": ["control \x01"]},
    ],
    "required": [
        {"type": "object", "required": ["x"]},
        {"type": "object", "required": ["x", "y"], "additionalProperties": SMALL},
        {**OBJ, "required": ["x"]}, _obj({"a": SMALL}, []), _obj({"a": SMALL}, ["a", "a"]),
        {"type": "object", "properties": {"a": SMALL}, "required": ["b"]},
    ],
    "additionalProperties": [
        *({"type": "object", "additionalProperties": value, "maxProperties": 3} for value in (True, SMALL, WORD)), OBJ,
        {"type": "object", "properties": {"a": SMALL}, "additionalProperties": {"type": "string", "maxLength": 3}},
        {"type": "object", "properties": {"abc": SMALL, "abd": SMALL}, "required": ["abc"],
         "additionalProperties": WORD},
    ],
    "patternProperties": [
        {**OBJ, "patternProperties": {"^[a-c]$": SMALL}}, {**OBJ, "patternProperties": {"^a": SMALL, "^b": WORD}},
        {**OBJ, "patternProperties": {"^a": SMALL, "b$": WORD}}, {"type": "object", "patternProperties": {"^x-": WORD}},
        {**OBJ, "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 5}}},
    ],
    "unevaluatedProperties": [
        {"type": "object", "properties": {"a": SMALL}, "unevaluatedProperties": False},
        {"type": "object", "unevaluatedProperties": SMALL}, {**OBJ, "unevaluatedProperties": False},
        {"type": "object", "anyOf": [{"properties": {"a": SMALL}}], "unevaluatedProperties": False},
    ],
    "propertyNames": [
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,4}$"}, "additionalProperties": SMALL},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": SMALL},
        {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"a": SMALL, "b": WORD}},
        {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 2},
        {"type": "object", "propertyNames": {"minLength": 3}}, {"type": "object", "propertyNames": False},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"b": SMALL}},
    ],
    "minProperties": [
        *({"type": "object", "additionalProperties": SMALL, "minProperties": least} for least in (0, 1, 2, 5)),
        _obj({"a": SMALL, "b": SMALL}, minProperties=2), _obj({"a": SMALL, "b": SMALL}, [], minProperties=1),
    ],
    "maxProperties": [
        *({"type": "object", "additionalProperties": SMALL, "maxProperties": most} for most in (0, 1, 2, 5)),
        _obj({"a": SMALL, "b": SMALL}, [], maxProperties=1),
        _obj({"a": SMALL, "b": SMALL, "c": SMALL}, [], maxProperties=2),
    ],
    "dependentRequired": [
        _obj({"a": SMALL, "b": SMALL}, [], dependentRequired={"a": ["b"]}),
        _obj({"a": SMALL, "b": SMALL, "c": SMALL}, [], dependentRequired={"a": ["b", "c"], "b": ["c"]}),
        _obj({"a": SMALL}, [], dependentRequired={"a": []}), _obj({"a": SMALL}, [], dependentRequired={"a": "b"}),
    ],
    "dependencies": [
        {"$schema": DRAFT7, **_obj({"a": SMALL, "b": SMALL}, [], dependencies={"a": ["b"]})},
        {"$schema": DRAFT7, **_obj({"a": SMALL}, [], dependencies={"a": {"required": ["b"]}})},
    ],
    "dependentSchemas": [_obj({"a": SMALL}, [], dependentSchemas={"a": {"required": ["b"]}})],
    "anyOf": [
        {"anyOf": [SMALL, WORD]}, {"anyOf": [{"type": "null"}, _obj({"a": SMALL})]},
        {"anyOf": [_obj({"a": SMALL}), _obj({"a": WORD, "b": SMALL}), _obj({"c": SMALL})]},
        {"type": "integer", "anyOf": [{"minimum": 90}, {"maximum": -90}]},
        {"anyOf": [{"const": 1}, {"const": 12}, {"const": 123}]},
        _obj({"a": SMALL, "b": SMALL}, [], anyOf=[{"required": ["a"]}, {"required": ["b"]}]), {"anyOf": [False, SMALL]},
        {"anyOf": []},
    ],
    "allOf": [
        {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 6}]}, {"allOf": [WORD, {"minLength": 3}]},
        {"allOf": [{"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
         {"properties": {"b": WORD}, "required": ["b"]}]},
        {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, {"allOf": [{"type": "integer"}, {"type": "string"}]},
        {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}, {"maxLength": 8}]},
        {"allOf": [{"anyOf": [SMALL, WORD]}, {"anyOf": [WORD, {"type": "null"}]}]},
    ],
    "oneOf": [
        {"oneOf": [{"const": 1}, {"const": 1.0}]}, {"oneOf": [{"enum": ["a", "b"]}, {"type": "null", "const": None}]},
        {"oneOf": [SMALL, WORD]}, {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"const": 2}]},
        {"oneOf": [_obj({"kind": {"const": "a"}, "x": SMALL}), _obj({"kind": {"const": "b"}, "y": WORD})]},
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}]},
    ],
    "not": [{"not": {}}, {"not": {"type": "string"}}, {"type": "integer", "not": {"const": 1}},
     {"type": "boolean", "not": False}],
    "if": [{"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 9}, "else": {"maximum": 0}}, {"if": True}],
    "then": [{**SMALL, "then": {"maximum": 1}}],
    "else": [{**SMALL, "else": {"maximum": 1}}],
    "$ref": [
        {"$ref": "#/$defs/w", "$defs": {"w": WORD}},
        {**_obj({"a": {"$ref": "#/$defs/w"}, "b": {"$ref": "#/$defs/w"}}), "$defs": {"w": WORD}},
        {"$ref": "#/$defs/x/properties/y", "$defs": {"x": {"properties": {"y": SMALL}}}}, {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/schema.json"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        _obj({"v": SMALL, "next": {"$ref": "#"}}, ["v"]), {"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": SMALL}},
        {"$ref": "#/components/schemas/p",
         "components": {"schemas": {"p": _obj({"q": {"$ref": "#/components/schemas/q"}}), "q": SMALL}}},
        {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer", "maximum": 9}}}, {"$ref": 5},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    ],
    "$defs": [{**SMALL, "$defs": {"unused": WORD}}, {"type": "null", "$defs": {}}],
    "definitions": [{"$schema": DRAFT7, "$ref": "#/definitions/w", "definitions": {"w": WORD}}],
    "$id": [{**SMALL, "$id": "https://example.com/s"}, _obj({"a": {**SMALL, "$id": "other"}})],
    "$anchor": [{"$ref": "#w", "$defs": {"w": {"$anchor": "w", **WORD}}}],
    "$dynamicRef": [{"$dynamicRef": "#node"}],
    "$dynamicAnchor": [{"$dynamicAnchor": "node", **SMALL}],
    "$recursiveRef": [{"$recursiveRef": "#"}],
    "$recursiveAnchor": [{"$recursiveAnchor": True, **SMALL}],
    **{name: [{**SMALL, name: value}] for name, value in {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$vocabulary": {}, "$comment": "c", "title": "t",
        "description": "d", "default": 1, "examples": [1], "example": 1, "deprecated": True, "readOnly": True,
        "writeOnly": True, "contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": {},
        "discriminator": {"propertyName": "kind"}, "externalDocs": {}, "xml": {}, "x-made-up": {"not": {}},
    }.items()},
    "malformed": [
        {"type": "strin"}, {"type": 5}, {"type": []}, {"minLength": -1}, {"minLength": 1.5}, {"maxItems": "3"},
        {"required": "a"},
        {"required": [1]}, {"properties": []}, {"properties": {"a": 5}}, {"items": 5}, {"anyOf": {}}, {"enum": []},
        {"enum": 1},
        {"pattern": 5}, {"minimum": "1"}, {"$defs": 5}, False, {"additionalProperties": "no"}, {"prefixItems": []},
    ],
}

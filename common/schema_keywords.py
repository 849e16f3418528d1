"""Every keyword of JSON Schema 2020-12 (and the older drafts' spellings) and what becomes of it.

:data:`KEYWORDS` is the whole table: ``grammar_schema`` goes by it, and the table in
docs/structured_output.md is generated from it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MAX_DEPENDENCIES = 8
"""Each entry of dependentRequired doubles what the object's grammar has to keep apart."""

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that are enforced; any other is an annotation, as the specification has it."""

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})

Kind = Literal["schema", "schemas", "schema_map", "value", "annotation"]
Status = Literal["enforced", "partly", "refused", "annotation"]


class Keyword(NamedTuple):
    """One row of the table: the shape of its value and what becomes of it."""

    kind: Kind
    status: Status
    note: str = ""


KEYWORDS: dict[str, Keyword] = {
    "$ref": Keyword("value", "partly", "references within the schema; a remote one is refused"),
    "$defs": Keyword("schema_map", "enforced"),
    "definitions": Keyword("schema_map", "enforced", "older spelling of `$defs`"),
    "$dynamicRef": Keyword("value", "refused"),
    "$recursiveRef": Keyword("value", "refused"),
    "$id": Keyword("value", "partly", "at the root only (dropped); below it, it would change what `$ref` means"),
    "$anchor": Keyword("value", "refused", "use `$defs` and a JSON pointer"),
    "$dynamicAnchor": Keyword("value", "annotation"),
    "$recursiveAnchor": Keyword("value", "annotation"),
    "$schema": Keyword("annotation", "annotation"),
    "$vocabulary": Keyword("annotation", "annotation"),
    "$comment": Keyword("annotation", "annotation"),
    "type": Keyword("value", "enforced", "a name or a list of names"),
    "enum": Keyword("value", "enforced"),
    "const": Keyword("value", "enforced"),
    "anyOf": Keyword("schemas", "enforced"),
    "allOf": Keyword("schemas", "partly", "refused where the intersection cannot be built"),
    "oneOf": Keyword("schemas", "partly", "where the alternatives provably exclude each other, else refused"),
    "not": Keyword("schema", "refused", "`not: false` is accepted"),
    "if": Keyword("schema", "refused"),
    "then": Keyword("schema", "refused", "ignored without `if`, as the specification has it"),
    "else": Keyword("schema", "refused", "ignored without `if`, as the specification has it"),
    "properties": Keyword("schema_map", "enforced", "written in the order of the schema"),
    "required": Keyword("value", "enforced"),
    "additionalProperties": Keyword("schema", "enforced", "after the named ones; a name may be repeated"),
    "patternProperties": Keyword("schema_map", "partly", "where no two patterns match the same name, else refused"),
    "unevaluatedProperties": Keyword(
        "schema", "partly", "as `additionalProperties` where nothing beside it evaluates properties, else refused"
    ),
    "propertyNames": Keyword("schema", "partly", "`pattern` or `enum` in an object without patternProperties"),
    "minProperties": Keyword("value", "partly", "0 and 1, or no more than there are required names; else refused"),
    "maxProperties": Keyword("value", "partly", "where every named property is required, or 0 or 1; else refused"),
    "dependentRequired": Keyword("value", "enforced", f"up to {MAX_DEPENDENCIES} properties"),
    "dependentSchemas": Keyword("schema_map", "refused"),
    "dependencies": Keyword("value", "partly", "lists of names as `dependentRequired`; schemas are refused"),
    "items": Keyword("schema", "enforced", "the older list form too (`prefixItems`)"),
    "prefixItems": Keyword("schemas", "enforced"),
    "additionalItems": Keyword("schema", "enforced", "beside the list form of `items`; else ignored, as specified"),
    "unevaluatedItems": Keyword(
        "schema", "partly", "as `items` where nothing beside it evaluates items, else refused"
    ),
    "contains": Keyword("schema", "refused", "`minContains: 0` without `maxContains` makes it an annotation"),
    "minContains": Keyword("value", "refused", "ignored without `contains`, as specified"),
    "maxContains": Keyword("value", "refused", "ignored without `contains`, as specified"),
    "minItems": Keyword("value", "enforced"),
    "maxItems": Keyword("value", "enforced"),
    "uniqueItems": Keyword("value", "partly", "`false`, or with `maxItems` of 0 or 1; else refused"),
    "minLength": Keyword("value", "enforced"),
    "maxLength": Keyword("value", "enforced"),
    "pattern": Keyword("value", "partly", "look-around, word boundaries and back-references are refused"),
    "format": Keyword("value", "partly", "enforced: " + ", ".join(sorted(FORMATS)) + "; others are annotations"),
    "minimum": Keyword("value", "enforced"),
    "maximum": Keyword("value", "enforced"),
    "exclusiveMinimum": Keyword("value", "enforced", "the boolean form of draft 4 too"),
    "exclusiveMaximum": Keyword("value", "enforced", "the boolean form of draft 4 too"),
    "multipleOf": Keyword("value", "enforced"),
    **{name: Keyword("annotation", "annotation") for name in (
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
        "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml",
    )},
}

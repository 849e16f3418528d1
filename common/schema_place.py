"""Where in a schema lies what llguidance refuses: it says what, seldom where.

The smallest part of the schema that is refused by itself is looked for, from the root down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits

from common.errors import RequestError
from common.grammar_compile import LIMITS, plain_words
from common.grammar_lark import LarkWriter
from common.grammar_schema import load_json
from common.messages import Grammar
from common.schema_keywords import KEYWORDS
from common.schema_rewrites import Json, pointer

SEARCH_LIMIT_S = 1.0
"""The search ends after this; what has been found by then is a place further up."""
_SCHEMA_KEYS = ("json_schema", "schema")


def why_refused(schema: Json) -> str:
    """Why a schema does not compile, with no tokenizer asked; empty: it does."""
    writer = LarkWriter({})
    try:
        text = writer.finish(writer.schema(schema))
    except RequestError as error:
        return error.info.message
    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    failed, words = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    return plain_words(" ".join(words)) if failed else ""


def place_of_refusal(schema: Json) -> str:
    """JSON pointer (``#/...``) of the smallest part of a refused schema that is refused by itself."""
    until = time.monotonic() + SEARCH_LIMIT_S
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema} if isinstance(schema, dict) else {}
    path, current = "#", schema
    seen = {path}
    while True:
        for place, child in _children(current, path, schema):
            if time.monotonic() > until:
                return path
            alone = {**shared, **child} if isinstance(child, dict) else child
            if place not in seen and why_refused(alone):
                path, current = place, child
                seen.add(place)
                break
        else:
            return path


def _children(schema: Json, path: str, root: Json) -> Iterator[tuple[str, Json]]:
    if not isinstance(schema, dict):
        return
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/"):
        target = root
        for part in unquote(ref[2:]).split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            target = target[int(part)] if isinstance(target, list) else target[part]
        yield ref, target
    for key, value in schema.items():
        kind = KEYWORDS[key].kind if key in KEYWORDS else "annotation"
        if key in ("$defs", "definitions"):
            continue  # by reference alone: what nobody refers to is refused by nobody
        if kind == "schema" and isinstance(value, dict):
            yield pointer(path, key), value
        elif kind in ("schemas", "schema") and isinstance(value, list):
            yield from ((pointer(pointer(path, key), index), item) for index, item in enumerate(value))
        elif kind == "schema_map" and isinstance(value, dict):
            yield from ((pointer(pointer(path, key), name), item) for name, item in value.items())


def with_place(grammar: Grammar, words: str) -> str:
    """The words of a refusal, with the place in the schema where they do not name one."""
    if "JSON schema at #" in words or grammar.kind not in ("json_schema", "structural_tag"):
        return words
    try:
        tree = load_json(grammar.text, "grammar")
    except RequestError:
        return words
    for schema in [tree] if grammar.kind == "json_schema" else _schemas_in(tree):
        if why_refused(schema):
            return f"JSON schema at {place_of_refusal(schema)}: {words}"
    return words


def _schemas_in(tree: Json) -> Iterator[Json]:
    """The schemas of a structural tag."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if key in _SCHEMA_KEYS:
            yield value
        else:
            yield from _schemas_in(value)
    for item in tree if isinstance(tree, list) else ():
        yield from _schemas_in(item)

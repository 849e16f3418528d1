"""Random schemas: refused, or everything let through validates; recovery replays to the same masks."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.grammar_walk import Setup, make_setup, walk

_NAMES = st.sampled_from(["a", "b", "long_name", "ü", "x y"])
_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}, True]),
    st.tuples(st.integers(-9, 9), st.integers(0, 9)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    ),
    st.lists(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties) or ["a"]), unique=True, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    schema["additionalProperties"] = draw(st.just(False) | inner)
    if draw(st.booleans()):
        schema["dependentRequired"] = draw(st.dictionaries(_NAMES, st.lists(_NAMES, max_size=2), max_size=2))
    return schema


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _objects(inner),
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        several.map(lambda items: {"type": "array", "prefixItems": items, "items": False}),
        several.map(lambda options: {"anyOf": options}),
        several.map(lambda options: {"oneOf": options}),
        several.map(lambda parts: {"allOf": parts}),
    )


_SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=8)


@cache
def _setup() -> Setup:
    with tempfile.TemporaryDirectory() as folder:
        return make_setup(Path(folder))


@settings(max_examples=120, deadline=None)
@given(_SCHEMAS, st.integers(0, 2**32 - 1))
def test_random_schema_is_refused_or_its_output_validates(schema: Any, seed: int) -> None:
    setup, text = _setup(), json.dumps(schema)
    try:
        session = setup.session("json_schema", text)
    except ValueError:
        return
    done = walk(setup, session, seed, limit=300)
    if done.complete:
        jsonschema.Draft202012Validator(schema).validate(json.loads(done.text))
    replayed = setup.session("json_schema", text)
    for token in done.ids:
        replayed.accept_token(token)
    if done.complete and not replayed.is_complete():
        replayed.accept_token(setup.eos)
    assert replayed.is_complete() == session.is_complete()
    if not session.is_complete():
        assert setup.allowed(replayed) == setup.allowed(session)

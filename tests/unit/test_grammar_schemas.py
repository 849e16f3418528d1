"""Every schema of the table is refused, or a model that knows nothing writes what validates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.messages import Grammar
from common.schema_keywords import KEYWORDS
from common.schema_place import place_of_refusal, why_refused, with_place
from tests.unit.grammar_cases import CASES
from tests.unit.grammar_walk import Setup, make_setup, walk

SEEDS = range(4)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(Path(tmp_path_factory.mktemp("tokenizer")))


def _validate(text: str, schema: Any) -> None:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("keyword", CASES)
def test_output_validates_or_the_schema_is_refused(setup: Setup, keyword: str) -> None:
    finished = accepted = 0
    for schema in CASES[keyword]:
        try:
            setup.session("json_schema", json.dumps(schema))
        except ValueError as error:
            assert str(error)
            continue
        accepted += 1
        for seed in SEEDS:
            done = walk(setup, setup.session("json_schema", json.dumps(schema)), seed)
            if done.complete:
                finished += 1
                _validate(done.text, schema)
    if accepted:
        assert finished >= 0.8 * accepted * len(SEEDS)
    status = KEYWORDS[keyword].status if keyword in KEYWORDS else ""
    if keyword == "malformed":
        assert accepted == 0
    if status == "annotation":
        assert accepted == len(CASES[keyword])
    if status in ("enforced", "partly"):
        assert accepted > 0


def test_every_keyword_has_cases() -> None:
    assert KEYWORDS.keys() <= CASES.keys()
    assert sum(map(len, CASES.values())) >= 300


def test_a_refusal_names_the_place() -> None:
    from common.errors import RequestError
    from common.grammar_schema import prepare_schema

    with pytest.raises(RequestError, match="#/properties/a~1b/items/not"):
        prepare_schema({"properties": {"a/b": {"items": {"not": {"type": "null"}}}}})
    with pytest.raises(RequestError, match="nested deeper"):
        schema: dict[str, Any] = {}
        for _ in range(100):
            schema = {"items": schema}
        prepare_schema(schema)


def test_llguidance_s_refusals_get_their_place() -> None:
    overlap = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    unsatisfiable = {"type": "string", "minLength": 3, "maxLength": 2}
    cases: list[tuple[Any, str]] = [
        ({"properties": {"a": {"items": overlap}}}, "#/properties/a/items"),
        ({"properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {"prefixItems": [True, overlap]}}},
         "#/$defs/x~1y/prefixItems/1"),
        ({"type": "object", "required": ["a"],
          "properties": {"a": {"type": "object", "properties": {"b": unsatisfiable}, "required": ["b"]}}},
         "#/properties/a/properties/b"),
        (overlap, "#"),
    ]  # fmt: skip
    for schema, place in cases:
        assert why_refused(schema) and place_of_refusal(schema) == place


def test_every_refusal_has_a_place(setup: Setup) -> None:
    for schema in (schema for schemas in CASES.values() for schema in schemas):
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))
        try:
            setup.backend.compile(grammar)
        except ValueError as error:
            assert with_place(grammar, str(error)).startswith("JSON schema at #"), (schema, str(error))

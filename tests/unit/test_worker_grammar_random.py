"""Every schema of the table through the worker's steps: random logits at temperature 1, masks ahead, jumps, batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from common.messages import BeginRequest, Grammar, RowFlag, SamplingParams, pack_i32, unpack_i32
from tests.unit.grammar_cases import CASES
from tests.unit.grammar_walk import Setup, make_setup
from tests.unit.worker_fakes import step
from worker_proc.executor import StepExecutor
from worker_proc.runner import PackedBatch
from worker_proc.sampling.cpu import CpuSampler

ROWS = 24
MAX_TOKENS = 320
SEEDS = 2


class RandomRunner:
    """A model that knows nothing: logits from a generator, and the longer an output is, the likelier its end."""

    name, batch_invariant, page_size, dtype = "random", True, 16, "float32"

    def __init__(self, setup: Setup) -> None:
        self.vocab_size = setup.vocab_size
        self._rng = np.random.default_rng(7)
        pieces = [setup.decode([token]) for token in range(setup.vocab_size)]
        self._closing = np.array([piece[:1] in tuple('"}]') for piece in pieces])
        self._closing[setup.eos] = True

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        logits = self._rng.standard_normal((batch.logit_rows.size, self.vocab_size)).astype(np.float32)
        positions = batch.positions[batch.logit_rows]
        logits += np.float32(0.1) * np.maximum(positions - 40, 0)[:, None] * self._closing
        return logits

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        raise AssertionError("nothing is shared here")

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(Path(tmp_path_factory.mktemp("tokenizer")))


def _accepted(setup: Setup) -> list[Any]:
    found = []
    for schema in (schema for schemas in CASES.values() for schema in schemas):
        try:
            setup.session("json_schema", json.dumps(schema))
        except ValueError:
            continue
        found.append(schema)
    return found


def _begin(setup: Setup, slot: int, schema: Any, seed: int) -> BeginRequest:
    pages = -(-(MAX_TOKENS + 1) // 16)
    sampling = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed)
    return BeginRequest(
        slot, f"r{slot}", pack_i32([70]), prompt_len=1, computed_len=0, eos_token_ids=(setup.eos,), sampling=sampling,
        pages=pack_i32(range(slot * pages, (slot + 1) * pages)),
        grammar=Grammar(kind="json_schema", text=json.dumps(schema)),
    )  # fmt: skip


def _outputs(setup: Setup, schemas: list[Any], seed: int) -> list[list[int] | None]:
    """One output for each schema, all in one batch; None where it was cut off."""
    executor = StepExecutor(RandomRunner(setup), CpuSampler(1), setup.backend)  # type: ignore[arg-type]
    outputs: list[list[int]] = [[] for _ in schemas]
    ended = [False] * len(schemas)
    begins = [_begin(setup, slot, schema, seed) for slot, schema in enumerate(schemas)]
    rows = [(slot, 1, []) for slot in range(len(schemas))]
    for number in range(1, 2 * MAX_TOKENS):
        result = executor.execute(step(number, rows, begins=begins))  # type: ignore[arg-type]
        assert not result.failures, [(schemas[rows[each.row][0]], each.message) for each in result.failures]
        ids, at = unpack_i32(result.ids).tolist(), 0
        going = []
        for (slot, _, _), count, flags in zip(rows, unpack_i32(result.num_ids).tolist(), result.flags, strict=True):
            outputs[slot] += ids[at : at + count]
            at += count
            ended[slot] |= bool(flags & RowFlag.GRAMMAR_END) or outputs[slot][-1:] == [setup.eos]
            if not ended[slot] and len(outputs[slot]) < MAX_TOKENS:
                going.append((slot, 0, []))
        rows, begins = going, []
        if not rows:
            break
    executor.close()
    return [output if end else None for output, end in zip(outputs, ended, strict=True)]


def test_a_model_that_knows_nothing_writes_valid_json_for_every_schema(setup: Setup) -> None:
    schemas = _accepted(setup)
    finished = 0
    for seed in range(SEEDS):
        for first in range(0, len(schemas), ROWS):
            some = schemas[first : first + ROWS]
            for schema, output in zip(some, _outputs(setup, some, seed), strict=True):
                if output is not None:
                    finished += 1
                    text = setup.decode([token for token in output if token != setup.eos])
                    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
                    validator(schema).validate(json.loads(text))
    assert len(schemas) > 250 and finished >= 0.9 * SEEDS * len(schemas)

"""Every schema of the table through the worker's steps: random logits at temperature 1, masks ahead, jumps, batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from common.messages import BeginRequest, Grammar, RowFlag, SamplingParams, StepResult, pack_i32, unpack_i32
from tests.unit.ahead_support import ContextRunner, LoopWorker
from tests.unit.grammar_cases import CASES
from tests.unit.grammar_walk import Setup, make_setup
from tests.unit.worker_fakes import PAGE, begin, step
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


AHEAD_TOKENS = 60


class LateRandom(ContextRunner):
    """The same ignorance, a function of the context alone, on a device that is asked later."""

    one_bad_in = 1 << 40

    def __init__(self, setup: Setup) -> None:
        super().__init__(ROWS * AHEAD_TOKENS // PAGE + ROWS)
        self.vocab_size, self._closing = setup.vocab_size, RandomRunner(setup)._closing

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        late = np.maximum(batch.positions[batch.logit_rows] - 8, 0)[:, None] * self._closing
        return super().forward(batch) + np.float32(0.4) * late


def _ids_of_loop(setup: Setup, schemas: list[Any], ahead: bool) -> tuple[list[list[int]], int]:
    """Outputs, and how many rows gave nothing for ids that were forced in the meantime."""
    worker = LoopWorker(ahead, LateRandom(setup), setup.backend)
    each = AHEAD_TOKENS // PAGE + 1
    begins = [
        begin(slot, [70], list(range(slot * each, slot * each + each)), temperature=1.0, seed=3,
              max_tokens=AHEAD_TOKENS, eos_token_ids=(setup.eos,),
              grammar=Grammar(kind="json_schema", text=json.dumps(schema)))
        for slot, schema in enumerate(schemas)
    ]  # fmt: skip
    outputs: list[list[int]] = [[] for _ in schemas]
    sent: dict[int, list[int]] = {}
    going, num_empty = set(range(len(schemas))), 0
    for number in range(1, 6 * AHEAD_TOKENS):
        if not going:
            break
        sent[number] = sorted(going)
        rows: list[tuple[int, int, list[int]]] = [(slot, 0, []) for slot in sent[number]]
        results: list[StepResult] = worker.handle(step(number, rows, begins=begins if number == 1 else []))
        for result in results:
            assert not result.failures
            counts = unpack_i32(result.num_ids).tolist()
            parts = np.split(unpack_i32(result.ids), np.cumsum(counts)[:-1])
            for slot, part, flags in zip(sent[result.step], parts, result.flags, strict=True):
                num_empty += bool(outputs[slot]) and not part.size and not flags & RowFlag.SKIPPED
                outputs[slot] += part.tolist()
                if flags & (RowFlag.GRAMMAR_END | RowFlag.SKIPPED) or len(outputs[slot]) >= AHEAD_TOKENS:
                    going.discard(slot)
    assert not going
    worker.close()
    return outputs, num_empty


def test_steps_launched_ahead_write_the_same_json(setup: Setup) -> None:
    schemas = _accepted(setup)[::5]
    num_empty = 0
    for first in range(0, len(schemas), ROWS):
        some = schemas[first : first + ROWS]
        ahead, empty = _ids_of_loop(setup, some, ahead=True)
        assert ahead == _ids_of_loop(setup, some, ahead=False)[0]
        num_empty += empty
    assert num_empty > len(schemas) // 2, "ids were forced, and often"

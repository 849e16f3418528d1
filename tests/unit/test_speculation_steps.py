"""Steps with drafts: the ids are those without, in fewer steps, whatever was drafted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.config import WorkerConfig
from common.errors import ConfigError, InvariantError
from common.messages import Grammar, RowFlag, StepResult, unpack_f32, unpack_i32
from tests.unit.worker_fakes import PAGE, VOCAB, FakeBackend, FakeRunner, begin, step
from worker_proc.executor import StepExecutor
from worker_proc.loaded import LoadedWorker
from worker_proc.main import make_speculator
from worker_proc.memory import WorkerState
from worker_proc.runner import PackedBatch
from worker_proc.sampling.cpu import CpuSampler
from worker_proc.speculation.speculator import Speculator
from worker_proc.speculation.step_times import NUM_TOKENS, StepTimes

FREE = StepTimes([1.0, 1.0], [1, 64])
"""More tokens cost nothing, so every draft that may be had is."""
CONTEXT = 200


class EchoRunner(FakeRunner):
    """The logits depend on the last two ids in the pages, so that an answer soon repeats itself, but not for ever: each
    fifth position has a mind of its own. A draft that was wrong and is still taken for an id shows."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        super().forward(batch)
        logits = np.zeros((batch.ids.size, VOCAB), np.float32)
        for s, length in enumerate(batch.context_lens.tolist()):
            cells = batch.page_table[s, np.arange(length) // PAGE] * PAGE + np.arange(length) % PAGE
            for row in range(batch.query_start[s], batch.query_start[s + 1]):
                place = int(batch.positions[row])
                before = self.pool[cells[max(0, place - 1) : place + 1]].tolist()
                key = [*before, place] if place % 5 == 0 else before
                logits[row, :8] = np.random.default_rng(key).normal(size=8) * 3
        return logits[batch.logit_rows]


class Cycle(EchoRunner):
    """1, 2, 3, 4, 5, 1, ...: every draft is right."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return np.eye(VOCAB, dtype=np.float32)[batch.ids[batch.logit_rows] % 5 + 1]


def run(speculate: bool, *begins: Any, pages: int = 40, each: int = 0) -> tuple[list[list[int]], list[StepResult]]:
    """Ids and results of requests that begin together, until all have ended. Slot n has pages from n * pages on, all
    at once or ``each`` of them when another is needed."""
    speculator = Speculator(6, CONTEXT, FREE) if speculate else None
    executor = StepExecutor(EchoRunner(400), CpuSampler(1), FakeBackend(), speculator=speculator)
    outputs: list[list[int]] = [[] for _ in begins]
    results: list[StepResult] = []
    rows = [(slot, record.prompt_len, []) for slot, record in enumerate(begins)]
    held = [unpack_i32(record.pages).size for record in begins]
    while rows:
        results.append(executor.execute(step(len(results) + 1, rows, begins=[] if results else list(begins))))
        counts, ids = unpack_i32(results[-1].num_ids).tolist(), unpack_i32(results[-1].ids).tolist()
        following = []
        for (slot, _, _), count in zip(rows, counts, strict=True):
            outputs[slot] += ids[:count]
            del ids[:count]
            known = begins[slot].prompt_len + len(outputs[slot])
            if count and len(outputs[slot]) < (begins[slot].sampling.max_tokens or 0):
                new = [slot * pages + held[slot]] if each and known > held[slot] * PAGE else []
                held[slot] += len(new)
                following.append((slot, 0, new))
        rows = following
    return outputs, results


def request(slot: int, *, pages: int = 40, **kwargs: Any) -> Any:
    return begin(slot, [1 + slot % 3, 2, 3], list(range(slot * 40, slot * 40 + pages)), max_tokens=60, **kwargs)


def num_drafts(results: list[StepResult]) -> int:
    return sum(int(unpack_i32(result.num_drafts).sum()) for result in results)


def num_rows(results: list[StepResult]) -> int:
    return sum(len(result.flags) for result in results)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "seed": 1},
    "end ids": {"eos_token_ids": (3,)},
    "minimum": {"stop_token_ids": (3,), "min_tokens": 20},
    "bias": {"logit_bias": {4: 2.0}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_id_and_save_steps(kind: str) -> None:
    records = [request(slot, **KINDS[kind]) for slot in range(5)]
    plain, slow = run(False, *records)
    drafted, fast = run(True, *records)
    assert drafted == plain
    assert num_drafts(slow) == 0 < num_drafts(fast)
    if kind != "end ids":
        assert num_rows(fast) < num_rows(slow)
    if kind == "greedy":
        assert num_rows(fast) < 0.8 * num_rows(slow)


def test_an_end_among_the_drafts_is_the_end() -> None:
    executor = StepExecutor(Cycle(), CpuSampler(1), speculator=Speculator(6, CONTEXT, FREE))
    record = begin(0, [1, 2, 3, 4, 5, 1], list(range(10)), eos_token_ids=(4,))
    first = executor.execute(step(1, [(0, 6, [])], begins=[record]))
    second = executor.execute(step(2, [(0, 0, [])]))
    assert [unpack_i32(each.ids).tolist() for each in (first, second)] == [[2], [3, 4]]
    assert unpack_i32(second.num_drafts).tolist() == [6]
    assert list(executor.execute(step(3, [(0, 0, [])], ends=[0])).flags) == [RowFlag.SKIPPED]


def test_log_probabilities_come_with_every_id() -> None:
    def reported(speculate: bool) -> tuple[list[float], list[list[int]]]:
        _, results = run(speculate, request(0, logprobs=2))
        values = [value for result in results for value in unpack_f32(result.logprobs).tolist()]
        return values, [unpack_i32(top.ids).tolist() for result in results for top in result.top_logprobs]

    assert reported(True) == reported(False)
    assert len(reported(True)[0]) == 60


@pytest.mark.parametrize("pages", [1, 2])
def test_drafts_stay_within_the_pages(pages: int) -> None:
    """``run`` gives a page when the next id has none, as the scheduler does at the latest."""
    records = [request(slot, pages=pages) for slot in range(3)]
    plain, _ = run(False, *records, each=1)
    drafted, fast = run(True, *records, each=1)
    assert drafted == plain
    assert num_drafts(fast) > 0


def test_a_row_that_is_on_its_way_finds_its_page() -> None:
    """The scheduler sends it before it knows what the one before gave, with a page for one id more than it knows."""
    executor = StepExecutor(Cycle(), CpuSampler(1), speculator=Speculator(3, CONTEXT, FREE))
    pages = 3
    executor.execute(step(1, [(0, 6, [])], begins=[begin(0, [1, 2, 3, 4, 5, 1], list(range(pages)))]))
    before, known, number = 6, 7, 1
    while before + 1 <= pages * PAGE:
        number += 1
        result = executor.execute(step(number, [(0, 0, [])]))
        assert not result.failures
        before, known = known, known + int(unpack_i32(result.num_ids)[0])
    assert known > pages * PAGE, "the last row found its page full"


def test_no_more_ids_come_than_are_allowed() -> None:
    for most in range(1, 12):
        record = begin(0, [1, 2, 1, 2, 1, 2], list(range(30)), max_tokens=most)
        plain, _ = run(False, record)
        drafted, _ = run(True, record)
        assert drafted == plain and len(drafted[0]) == most


def test_positions_end_where_the_models_do() -> None:
    speculator = Speculator(6, 12, FREE)
    runner = EchoRunner()
    executor = StepExecutor(runner, CpuSampler(1), speculator=speculator)
    executor.execute(step(1, [(0, 8, [])], begins=[begin(0, [1, 2] * 4, list(range(30)))]))
    while runner.batches[-1].context_lens[0] < 11:
        executor.execute(step(len(runner.batches) + 1, [(0, 0, [])]))
    assert max(int(batch.positions.max()) for batch in runner.batches) < 12


@pytest.mark.parametrize(
    "kwargs",
    [
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"grammar": Grammar(kind="regex", text="1|2 3|4 1|2 3|4 1|2 3")},
    ],
    ids=["presence", "repetition", "grammar"],
)
def test_rows_that_look_back_have_no_drafts(kwargs: dict[str, Any]) -> None:
    _, results = run(True, request(0, **kwargs))
    assert num_drafts(results) == 0


def test_a_row_that_cannot_be_drawn_fails_as_it_does_alone() -> None:
    class Spoilt(EchoRunner):
        def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
            logits = super().forward(batch)
            logits[batch.positions[batch.logit_rows] == 30] = np.nan
            return logits

    def ids_before_it_fails(speculate: bool) -> list[int]:
        speculator = Speculator(6, CONTEXT, FREE) if speculate else None
        executor = StepExecutor(Spoilt(), CpuSampler(1), speculator=speculator)
        out: list[int] = []
        batch = step(1, [(0, 3, [])], begins=[request(0, pages=20)])
        while True:
            result = executor.execute(batch)
            out += unpack_i32(result.ids).tolist()
            if result.failures:
                assert "not finite" in result.failures[0].message
                return out
            batch = step(batch.step + 1, [(0, 0, [])])

    assert ids_before_it_fails(True) == ids_before_it_fails(False)


def test_drafts_are_told() -> None:
    _, results = run(True, request(0), request(1))
    assert any(result.num_drafts for result in results)
    for result in results:
        if result.num_drafts:
            drafts, ids = unpack_i32(result.num_drafts), unpack_i32(result.num_ids)
            assert drafts.size == ids.size and (ids <= drafts + 1).all()


def test_steps_that_run_ahead_have_none() -> None:
    runner: Any = FakeRunner()
    with pytest.raises(InvariantError):
        StepExecutor(runner, CpuSampler(1), ahead=(runner, runner), speculator=Speculator(4, CONTEXT, FREE))


def loaded(runner: FakeRunner) -> LoadedWorker:
    return LoadedWorker(runner, 64, CONTEXT, "cpu")


@pytest.mark.parametrize("invariant", [True, False])
def test_by_default_there_are_drafts_where_they_cannot_change_an_id(invariant: bool) -> None:
    runner = FakeRunner()
    runner.batch_invariant = invariant
    speculator, seconds = make_speculator(WorkerConfig(), loaded(runner), runner, 1, False, None)
    assert (speculator is not None) == invariant == bool(seconds)
    asked = WorkerConfig(speculative_algorithm="ngram", speculative_num_draft_tokens=3)
    speculator, _ = make_speculator(asked, loaded(runner), runner, 1, False, None)
    assert speculator is not None and speculator.max_drafts == 3
    none = WorkerConfig(speculative_algorithm="none")
    assert make_speculator(none, loaded(runner), runner, 1, False, None)[0] is None


def test_where_steps_run_ahead_drafts_cannot_be_asked_for() -> None:
    runner = FakeRunner()
    assert make_speculator(WorkerConfig(), loaded(runner), runner, 1, True, None)[0] is None
    with pytest.raises(ConfigError, match="--speculative-algorithm ngram"):
        make_speculator(WorkerConfig(speculative_algorithm="ngram"), loaded(runner), runner, 1, True, None)


def test_a_restarted_worker_does_not_measure_again() -> None:
    runner = FakeRunner()
    times = [float(n) for n in NUM_TOKENS]
    state = WorkerState(path="fake", dtype="float32", num_pages=64, page_size=PAGE, step_seconds=times)
    _, seconds = make_speculator(WorkerConfig(), loaded(runner), runner, 1, False, state)
    assert seconds == times and not runner.batches

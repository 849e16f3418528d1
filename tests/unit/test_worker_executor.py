"""The step executor: what rows compute, sample, skip and fail, on a fake runner."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InvariantError
from common.messages import Grammar, RowFlag, StepResult, pack_i32, unpack_f32, unpack_i32
from tests.unit.worker_fakes import PAGE, VOCAB, FakeBackend, FakeRunner, begin, step
from worker_proc.executor import StepExecutor
from worker_proc.sampling.cpu import CpuSampler

SKIPPED, GRAMMAR_END, IN_TOOL_CALL = RowFlag.SKIPPED, RowFlag.GRAMMAR_END, RowFlag.IN_TOOL_CALL


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def executor(runner: FakeRunner) -> StepExecutor:
    return StepExecutor(runner, CpuSampler(1), FakeBackend())


def ids_of(result: StepResult) -> list[list[int]]:
    """New ids per row."""
    ids, out, at = unpack_i32(result.ids).tolist(), [], 0
    for n in unpack_i32(result.num_ids).tolist():
        out.append(ids[at : at + n])
        at += n
    assert at == len(ids)
    return out


def test_prefill_samples_and_decode_continues_without_naming_tokens(executor: StepExecutor) -> None:
    first = executor.execute(
        step(1, [(0, 3, []), (1, 5, [])], begins=[begin(0, [7, 8, 9], [3]), begin(1, [20] * 5, [1, 2])])
    )
    assert ids_of(first) == [[10], [21]]
    assert ids_of(executor.execute(step(2, [(1, 0, []), (0, 0, [])]))) == [[22], [11]]
    # Position 4 of slot 0 needs a second page.
    assert ids_of(executor.execute(step(3, [(0, 0, [9])]))) == [[12]]


def test_chunked_prefill_samples_with_its_last_chunk_only(executor: StepExecutor, runner: FakeRunner) -> None:
    assert ids_of(executor.execute(step(1, [(0, 4, [])], begins=[begin(0, [1, 2, 3, 4, 5, 6, 7], [5, 0])]))) == [[]]
    assert runner.batches[-1].logit_rows.size == 0
    assert ids_of(executor.execute(step(2, [(0, 2, [])]))) == [[]]
    assert ids_of(executor.execute(step(3, [(0, 1, [])]))) == [[8]]


def test_cached_prefix_is_not_computed_again(executor: StepExecutor, runner: FakeRunner) -> None:
    executor.execute(step(1, [(0, 5, [])], begins=[begin(0, [1, 2, 3, 4, 50], [6, 7])]))
    result = executor.execute(step(2, [(1, 2, [])], begins=[begin(1, [1, 2, 3, 4, 60, 61], [6, 8], computed_len=4)]))
    assert ids_of(result) == [[62]]
    assert runner.batches[-1].ids.tolist() == [60, 61]
    assert runner.batches[-1].positions.tolist() == [4, 5]


def test_copies_come_before_begins_and_rows(executor: StepExecutor) -> None:
    executor.execute(step(1, [(0, 6, [])], begins=[begin(0, [1, 2, 3, 4, 5, 6], [1, 2])]))
    shared = begin(1, [1, 2, 3, 4, 5, 30], [1, 9], computed_len=5)
    result = executor.execute(step(2, [(1, 1, []), (0, 0, [])], begins=[shared], copies=pack_i32([2, 9])))
    assert ids_of(result) == [[31], [8]]


def test_stop_ids_and_max_tokens_end_a_request_and_later_rows_are_skipped(
    executor: StepExecutor, runner: FakeRunner
) -> None:
    begins = [
        begin(0, [7], [0, 1], eos_token_ids=(9,)),
        begin(1, [30], [2, 3], max_tokens=2),
        begin(2, [40], [4, 5], stop_token_ids=(41,)),
    ]
    rows = [(0, 0, []), (1, 0, []), (2, 0, [])]
    assert ids_of(executor.execute(step(1, rows, begins=begins))) == [[8], [31], [41]]
    second = executor.execute(step(2, rows))
    assert ids_of(second) == [[9], [32], []]
    assert list(second.flags) == [0, 0, SKIPPED]
    before = len(runner.batches)
    third = executor.execute(step(3, rows, ends=[0, 1, 2]))
    assert list(third.flags) == [SKIPPED] * 3
    assert len(runner.batches) == before, "nothing was run"


def test_min_tokens_bans_end_ids(executor: StepExecutor) -> None:
    first = executor.execute(step(1, [(0, 1, [])], begins=[begin(0, [7], [0], eos_token_ids=(8,), min_tokens=1)]))
    assert ids_of(first) == [[9]]
    assert list(first.flags) == [0]


def test_resumed_request_goes_on_with_the_same_draws(runner: FakeRunner) -> None:
    def run(interrupt: bool) -> list[int]:
        executor = StepExecutor(FakeRunner(), CpuSampler(1))
        params = {"temperature": 3.0, "seed": 11, "repetition_penalty": 1.2, "prompt_len": 2}
        executor.execute(step(1, [(0, 2, [])], begins=[begin(0, [1, 2], [0, 1, 2], **params)]))
        out = ids_of(executor.execute(step(2, [(0, 0, [])])))[0]
        known = executor._slots[0].ids.view().tolist()
        number = 3
        if interrupt:
            again = begin(5, known, [7, 8, 9], **params)
            out += ids_of(executor.execute(step(3, [(5, len(known), [])], begins=[again], ends=[0])))[0]
            number = 4
        for n in range(number, 7):
            out += ids_of(executor.execute(step(n, [(5 if interrupt else 0, 0, [])])))[0]
        return out

    assert run(True) == run(False)


# --------------------------------------------------------------------------- failures


def test_bad_logits_fail_their_row_alone(executor: StepExecutor, runner: FakeRunner) -> None:
    runner.poison = {13}
    result = executor.execute(step(1, [(0, 1, []), (1, 1, [])], begins=[begin(0, [13], [0]), begin(1, [5], [1])]))
    assert ids_of(result) == [[], [6]]
    assert [failure.row for failure in result.failures] == [0]
    assert "not finite" in result.failures[0].message
    assert list(executor.execute(step(2, [(0, 0, []), (1, 0, [])])).flags) == [SKIPPED, 0]


@pytest.mark.parametrize("ids", [[VOCAB], [-1, 3], [5, 2_000_000_000]])
def test_ids_outside_the_vocabulary_never_reach_the_model(
    executor: StepExecutor, runner: FakeRunner, ids: list[int]
) -> None:
    result = executor.execute(step(1, [(0, len(ids), [])], begins=[begin(0, ids, [0])]))
    assert "outside the vocabulary" in result.failures[0].message
    assert not runner.batches


def test_row_beyond_its_pages_fails_alone(executor: StepExecutor) -> None:
    result = executor.execute(
        step(1, [(0, PAGE + 1, []), (1, 1, [])], begins=[begin(0, [1] * (PAGE + 1), [0]), begin(1, [5], [1])])
    )
    assert [failure.row for failure in result.failures] == [0]
    assert ids_of(result) == [[], [6]]


def test_row_of_an_unknown_slot_is_a_broken_invariant(executor: StepExecutor) -> None:
    with pytest.raises(InvariantError, match="slot 3"):
        executor.execute(step(1, [(3, 1, [])]))


def test_reset_forgets_requests(executor: StepExecutor) -> None:
    executor.execute(step(1, [(0, 1, [])], begins=[begin(0, [5], [1])]))
    executor.reset()
    with pytest.raises(InvariantError):
        executor.execute(step(2, [(0, 0, [])]))


# --------------------------------------------------------------------------- grammar


def grammar(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def test_mask_narrows_and_forced_ids_follow_in_the_same_step(executor: StepExecutor) -> None:
    first = executor.execute(
        step(1, [(0, 1, [])], begins=[begin(0, [10], [0, 1], grammar=grammar("40|12 50 51 60|61"))])
    )
    assert ids_of(first) == [[12, 50, 51]], "11 is likeliest but forbidden; 50 51 are forced"
    assert list(first.flags) == [IN_TOOL_CALL]
    second = executor.execute(step(2, [(0, 0, [])]))
    assert ids_of(second) == [[60]] or ids_of(second) == [[61]]
    assert list(second.flags) == [GRAMMAR_END]
    assert list(executor.execute(step(3, [(0, 0, [])])).flags) == [SKIPPED]


def test_forced_ids_stop_at_page_capacity_and_are_computed_together(executor: StepExecutor, runner: FakeRunner) -> None:
    forced = grammar("50 51 52 53 54 55 1|2")
    first = executor.execute(step(1, [(0, 1, [])], begins=[begin(0, [10], [0], grammar=forced)]))
    assert ids_of(first) == [[50, 51, 52]], "one page of 4 holds the prompt and three more"
    second = executor.execute(step(2, [(0, 0, [7])]))
    assert runner.batches[-1].ids.tolist() == [50, 51, 52]
    assert ids_of(second) == [[53, 54, 55]]


def test_forced_ids_stop_at_max_tokens(executor: StepExecutor) -> None:
    forced = grammar("50 51 52 53")
    first = executor.execute(step(1, [(0, 1, [])], begins=[begin(0, [10], [0, 1], grammar=forced, max_tokens=2)]))
    assert ids_of(first) == [[50, 51]]
    assert list(executor.execute(step(2, [(0, 0, [])])).flags) == [SKIPPED]


def test_rows_with_logprobs_are_not_jumped_ahead(executor: StepExecutor) -> None:
    first = executor.execute(
        step(1, [(0, 1, [])], begins=[begin(0, [10], [0, 1], grammar=grammar("50 51"), logprobs=0)])
    )
    assert ids_of(first) == [[50]]
    assert unpack_f32(first.logprobs).size == 1
    assert ids_of(executor.execute(step(2, [(0, 0, [])]))) == [[51]]


def test_grammar_is_rebuilt_from_the_outputs_so_far(executor: StepExecutor) -> None:
    resumed = begin(0, [10, 12, 50], [0, 1], prompt_len=1, grammar=grammar("40|12 50 51|52 60|61"))
    assert ids_of(executor.execute(step(1, [(0, 3, [])], begins=[resumed]))) == [[51]]


@pytest.mark.parametrize(("text", "outputs"), [("broken", []), ("1|2 3", [9])])
def test_grammar_errors_fail_their_row_alone(executor: StepExecutor, text: str, outputs: list[int]) -> None:
    bad = begin(0, [10, *outputs], [0], prompt_len=1, grammar=grammar(text))
    rows = [(0, 1 + len(outputs), []), (1, 1, [])]
    result = executor.execute(step(1, rows, begins=[bad, begin(1, [5], [1])]))
    assert [failure.row for failure in result.failures] == [0]
    assert ids_of(result) == [[], [6]]


def test_grammar_without_a_backend_fails_its_row(runner: FakeRunner) -> None:
    executor = StepExecutor(runner, CpuSampler(1), None)
    result = executor.execute(step(1, [(0, 1, [])], begins=[begin(0, [5], [1], grammar=grammar("1"))]))
    assert "switched off" in result.failures[0].message


# --------------------------------------------------------------------------- log-probabilities


def expected_logprob(distance: int) -> float:
    """FakeRunner's log-probability of the id that follows at ``distance`` (1: likeliest)."""
    logits = np.zeros(VOCAB)
    logits[[1, 2]] = [5.0, 4.0]
    return float(logits[distance] - np.log(np.exp(logits).sum()))


def test_logprobs_columns_hold_only_rows_that_asked(executor: StepExecutor) -> None:
    begins = [begin(0, [5], [0]), begin(1, [6], [1], logprobs=0), begin(2, [7], [2], logprobs=2)]
    result = executor.execute(step(1, [(0, 1, []), (1, 1, []), (2, 1, [])], begins=begins))
    np.testing.assert_allclose(unpack_f32(result.logprobs), [expected_logprob(1)] * 2, atol=1e-5)
    assert [unpack_i32(top.ids).tolist() for top in result.top_logprobs] == [[8, 9]]


def test_prompt_logprobs_cover_every_position_but_the_first_across_chunks(executor: StepExecutor) -> None:
    prompt = [1, 2, 4, 9, 10, 12, 13]
    want = [expected_logprob(d) for d in (1, 2, 3, 1, 2, 1)]
    first = executor.execute(step(1, [(0, 3, [])], begins=[begin(0, prompt, [3, 4], prompt_logprobs=1)]))
    second = executor.execute(step(2, [(0, 3, [])]))
    third = executor.execute(step(3, [(0, 1, [])]))
    parts = [*first.prompt_logprobs, *second.prompt_logprobs, *third.prompt_logprobs]
    assert [(part.row, part.start) for part in parts] == [(0, 1), (0, 4)]
    values = np.concatenate([unpack_f32(part.logprobs) for part in parts])
    np.testing.assert_allclose(values, want, atol=1e-5)
    assert [unpack_i32(top.ids).tolist() for part in parts for top in part.top] == [[i + 1] for i in prompt[:-1]]
    assert ids_of(third) == [[14]]

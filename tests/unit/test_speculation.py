"""What is proposed, how likely it is held to be, and how much of it is worth a step's time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_fakes import PAGE, FakeRunner
from worker_proc.runner import PackedBatch
from worker_proc.speculation import step_times
from worker_proc.speculation.acceptance import PRIOR, Acceptance
from worker_proc.speculation.lookup import MAX_MATCH, MAX_PLACES, PromptLookup
from worker_proc.speculation.speculator import num_worthwhile
from worker_proc.speculation.step_times import NUM_TOKENS, ServedTimes, StepTimes


def looked_up(ids: list[int], count: int) -> tuple[list[int], int]:
    lookup = PromptLookup()
    lookup.extend(ids)
    return proposed(lookup, count)


def proposed(lookup: PromptLookup, count: int) -> tuple[list[int], int]:
    place, match = lookup.longest()
    return (lookup.after(place, count) if match else []), match


@pytest.mark.parametrize(
    ("ids", "count", "wanted"),
    [
        ([], 3, ([], 0)),
        ([1], 3, ([], 0)),
        ([1, 2, 3], 3, ([], 0)),
        ([1, 2, 3, 1], 2, ([2, 3], 1)),
        ([5, 1, 2, 3, 9, 1, 2], 2, ([3, 9], 2)),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, ([3], 3)),  # a longer agreement goes before a later place
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1, ([4], 2)),  # of two alike the later one
        ([1, 2, 1, 2, 1], 5, ([2, 1, 2, 1, 2], 3)),  # a period shorter than what is asked for
        ([4, 4], 3, ([4, 4, 4], 1)),
    ],
)
def test_proposals_are_what_followed_the_longest_agreement(
    ids: list[int], count: int, wanted: tuple[list[int], int]
) -> None:
    assert looked_up(ids, count) == wanted


def agreement(ids: list[int], place: int) -> int:
    """How many ids up to ``place`` are those up to the end."""
    match = 0
    while match <= place and ids[place - match] == ids[len(ids) - 1 - match]:
        match += 1
    return match


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 10))
def test_a_proposal_continues_as_some_earlier_place_did(ids: list[int], count: int) -> None:
    drafts, match = looked_up(ids, count)
    last = len(ids) - 1
    places = [place for place in range(last) if ids[place] == ids[last]]
    if not places:
        assert (drafts, match) == ([], 0)
        return
    pairs = [place for place in places if agreement(ids, place) >= 2][-MAX_PLACES:]
    assert match == min(max([agreement(ids, place) for place in pairs], default=1), MAX_MATCH)
    assert len(drafts) == count
    text = ids + drafts
    assert any(agreement(ids, place) >= match and text[place + 1 : place + 1 + count] == drafts for place in places), (
        "copied from one place, on into itself"
    )


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_ids_may_come_in_any_portions(ids: list[int], cuts: list[int]) -> None:
    lookup = PromptLookup()
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(ids)], strict=True):
        lookup.extend(ids[begin:end])
    assert lookup.ids == ids
    assert proposed(lookup, 4) == looked_up(ids, 4)


def test_each_right_draft_makes_the_next_more_likely_and_all_of_them_less() -> None:
    acceptance = Acceptance(9)
    chances = acceptance.run(2, 9)
    assert len(chances) == 9 and chances[:3] == acceptance.run(2, 3)
    assert chances[0] == PRIOR[1]
    assert chances[1] == pytest.approx(PRIOR[1] * PRIOR[2])
    assert chances[8] == pytest.approx(chances[7] * PRIOR[-1])
    assert chances == sorted(chances, reverse=True)


def test_chances_become_what_is_seen() -> None:
    acceptance = Acceptance(4)
    for turn in range(2000):
        acceptance.learn(3, [1, 2, 3], [1, 2, 9] if turn % 4 else [7])
    first, second, third, fourth = acceptance.chances[2]
    assert first == pytest.approx(0.75, abs=0.05)  # right three times in four
    assert second > 0.95 and third < 0.05
    assert fourth == PRIOR[5]  # nothing was learned of it, nor of other agreements
    assert acceptance.chances[3] == Acceptance(4).chances[3]


def test_old_drafts_are_forgotten() -> None:
    acceptance = Acceptance(1)
    for drawn in (1, 2):
        for _ in range(5000):
            acceptance.learn(5, [1], [drawn])
    assert acceptance.chances[4][0] < 0.01


def test_nothing_drawn_teaches_nothing() -> None:
    acceptance = Acceptance(2)
    acceptance.learn(5, [1, 2], [])
    assert acceptance.chances == Acceptance(2).chances


def test_seconds_lie_on_a_line_between_measurements_and_beyond_them() -> None:
    times = StepTimes([1.0, 3.0, 11.0], [1, 2, 10])
    assert [times.at(n) for n in (1, 2, 6, 10, 12)] == [1.0, 3.0, 7.0, 11.0, 13.0]


def test_a_step_that_was_held_up_counts_as_one_of_more_tokens() -> None:
    times = StepTimes([2.0, 1.0, 4.0], [1, 2, 4])
    assert [times.at(n) for n in (1, 2, 3)] == [1.0, 1.0, 2.5]


class TickingRunner(FakeRunner):
    """A step takes as many seconds as it has tokens."""

    now = 0.0

    def forward(self, batch: PackedBatch) -> np.ndarray:
        self.now += batch.ids.size
        assert batch.logit_rows.size == batch.ids.size
        return super().forward(batch)


def test_measured_are_steps_of_one_sequence_that_fits() -> None:
    runner = TickingRunner(num_pages=6)
    seconds = step_times.measure(runner, 6 * PAGE, 2, clock=lambda: runner.now)
    assert seconds == [n / 2 for n in NUM_TOKENS]  # of two threads; larger ones in proportion
    assert max(batch.ids.size for batch in runner.batches) == 6 * PAGE


def served(seconds: list[float], num_tokens: list[int], beside_s: float = 0.0) -> ServedTimes:
    """Times in service that are those alone, but for ``beside_s``."""
    return ServedTimes(StepTimes(seconds, num_tokens), beside_s, draft_cost=1.0)


def test_of_a_model_whose_steps_are_long_a_few_sizes_are_measured() -> None:
    runner = TickingRunner(num_pages=64 // PAGE)
    seconds = step_times.measure(runner, 64, 1, clock=lambda: runner.now, wall=lambda: runner.now)
    assert seconds == pytest.approx([float(n) for n in NUM_TOKENS])
    assert tuple(batch.ids.size for batch in runner.batches) == step_times.COARSE


@pytest.mark.parametrize(
    ("chances", "seconds", "wanted"),
    [
        ([0.9, 0.1, 0.01], [1.0, 1.0], 3),  # they cost nothing
        ([0.04], [1.0, 1.0], 0),  # but the step a little
        ([1.0, 1.0, 1.0], [1.0, 65.0], 0),  # they cost what an id alone does
        ([0.9, 0.4, 0.2], [1.0, 33.0], 1),  # they cost half of it: only the first yields more than that
        ([], [1.0, 1.0], 0),
    ],
)
def test_drafts_are_worth_it_while_ids_grow_faster_than_the_time(
    chances: list[float], seconds: list[float], wanted: int
) -> None:
    assert num_worthwhile(chances, 1, 1, served(seconds, [1, 65])) == wanted


def test_a_step_that_begins_another_tile_is_worth_it_for_enough_drafts_only() -> None:
    times = served([1.0, 1.0, 1.6, 1.6], [1, 4, 5, 12])  # up to 4 tokens one tile, then two
    assert num_worthwhile([0.5] * 4, 4, 4, times) == 0
    assert num_worthwhile([0.5] * 8, 4, 4, times) == 8  # 4 ids more for 0.6 of the time more


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=2), st.integers(1, 90), st.integers(1, 30))
def test_no_draft_below_the_least_cost_is_worth_it(seconds: list[float], num_tokens: int, num_rows: int) -> None:
    times = ServedTimes(StepTimes([seconds[0], sum(seconds), sum(seconds) * 2], [1, 30, 64]))
    least = times.least_of_draft(num_tokens) * num_rows / times.at(num_rows)
    assert num_worthwhile([least * 0.999] * 80, num_tokens, num_rows, times) == 0


def test_time_that_does_not_depend_on_tokens_makes_drafts_cheaper() -> None:
    assert num_worthwhile([0.7], 1, 1, served([1.0, 65.0], [1, 65])) == 0
    assert num_worthwhile([0.7], 1, 1, served([1.0, 65.0], [1, 65], beside_s=1.0)) == 1


def test_beside_a_prompt_that_fills_the_step_drafts_are_no_longer_free() -> None:
    times = served([1.0, 1.0, 5.0], [1, 16, 64])
    assert num_worthwhile([0.5], 8, 8, times) == 1
    assert num_worthwhile([0.5], 56, 8, times) == 0
    assert num_worthwhile([0.9] * 8, 56, 8, times) == 8


def test_in_service_steps_show_what_they_take_beside_their_tokens() -> None:
    alone = StepTimes([1.0, 1.5, 4.0], [1, 8, 64])
    times = ServedTimes(alone, draft_cost=1.5)
    rng = np.random.default_rng(0)
    for _ in range(500):
        rows, drafts = int(rng.integers(1, 9)), int(rng.choice([0, 4, 16, 30]))
        added = alone.at(rows + drafts) - alone.at(rows)
        times.learn((alone.at(rows) + 0.5 + 1.5 * added) * rng.uniform(0.95, 1.05), rows, drafts)
    assert times.beside_s == pytest.approx(0.5, abs=0.1)


def test_a_step_that_was_held_up_teaches_little() -> None:
    times = served([1.0, 2.0], [1, 64])
    times.learn(1000.0, 1, 8)
    assert times.beside_s < 0.4
    times.learn(0.0, 1, 8)
    assert times.beside_s >= 0

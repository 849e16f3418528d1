"""How large a prefill chunk may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from scheduler_proc.cost import (
    DEFAULT_CHUNK,
    FIRST_CHUNK,
    LAST_PIECE,
    LONGEST_STEP_S,
    MAX_CHUNK,
    MIN_CHUNK,
    TARGET_RATIO,
    Budget,
    StepCost,
    TokenCost,
    choose_chunk,
    smallest_chunk,
)


def budget(configured: int, cost: StepCost, num_decode_rows: int) -> int:
    return choose_chunk(configured, cost, num_decode_rows, 16)[0]


def measured(decode_s: float, per_token_s: float, rows: int) -> StepCost:
    cost = StepCost()
    for _ in range(100):
        cost.observe(decode_s, 0, rows)
        cost.observe(decode_s + 256 * per_token_s, 256, rows)
    return cost


def test_a_configured_size_is_obeyed() -> None:
    assert budget(100, measured(0.01, 0.001, 4), 4) == 100


def test_until_something_was_measured_nobody_is_held_up_by_a_large_chunk() -> None:
    assert budget(0, StepCost(), 0) == DEFAULT_CHUNK
    assert budget(0, StepCost(), 4) == FIRST_CHUNK


def test_while_nobody_decodes_a_step_is_as_long_as_a_newcomer_may_wait() -> None:
    chunk = budget(0, measured(0.01, 0.001, 4), 0)
    assert 0.9 * LONGEST_STEP_S < chunk * 0.001 <= LONGEST_STEP_S
    assert budget(0, measured(0.01, 0.00001, 4), 0) == MAX_CHUNK


def test_a_step_with_a_chunk_takes_at_most_the_target_times_one_without() -> None:
    cost = measured(0.030, 0.0004, 8)
    chunk = budget(0, cost, 8)
    assert chunk % 16 == 0 and chunk > 90
    assert 0.030 + chunk * 0.0004 <= TARGET_RATIO * 0.030 + 1e-9


def test_the_end_of_a_prompt_may_exceed_the_budget_beside_decoding_rows_only() -> None:
    cost = measured(0.030, 0.0004, 8)
    chunk, most = choose_chunk(0, cost, 8, 16)
    assert chunk < most and 0.030 + most * 0.0004 < 4 * 0.030
    assert len(set(choose_chunk(0, cost, 0, 16))) == 1
    assert choose_chunk(100, cost, 8, 16) == (100, 100)


def test_the_end_of_a_prompt_is_not_stretched_beyond_the_smallest_chunk_where_that_is_too_long_already() -> None:
    deep = StepCost({4: 0.028 / (TARGET_RATIO - 1)}, TokenCost(0.0007, 3.5e-7))
    assert choose_chunk(0, deep, 8, 16, start=3000) == (MIN_CHUNK, MIN_CHUNK)
    chunk, most = choose_chunk(0, deep, 8, 16, start=800)
    assert chunk == MIN_CHUNK < most < int(LAST_PIECE * MIN_CHUNK)


def test_a_slow_machine_still_gets_on() -> None:
    assert budget(0, measured(0.001, 0.01, 1), 1) == MIN_CHUNK


def test_more_rows_allow_larger_chunks_once_their_cost_is_known() -> None:
    cost = measured(0.02, 0.0005, 1)
    assert cost.decoding(40) == cost.decoding(1)
    cost.observe(0.08 + 256 * cost.prefill_token.at(0), 256, 40)
    assert abs(cost.decoding(40) - 0.08) < 0.01
    assert budget(0, cost, 40) > budget(0, cost, 1)


def test_a_single_slow_step_changes_little() -> None:
    cost = measured(0.02, 0.0005, 4)
    cost.observe(5.0, 0, 4)
    assert cost.decoding(4) < 0.04
    cost.observe(0.0, 0, 4)
    assert cost.decoding(4) > 0


def test_more_rows_are_never_taken_to_decode_faster_than_fewer_did() -> None:
    cost = measured(0.014, 0.00035, 1)
    cost.observe(0.024, 64, 2)  # the prefill part alone would be 22 ms of these: decoding two rows in 2 ms?
    assert cost.decoding(2) >= cost.decoding(1)
    assert budget(0, cost, 2) >= budget(0, cost, 1)


# --------------------------------------------------------------------------- attention to what is before a token


@dataclass
class Machine:
    """A worker whose steps cost a fixed part, so much for each token, and so much for each position before it."""

    decode_s: float = 0.014
    token_s: float = 0.00014
    position_s: float = 0.7e-7
    noise: float = 0.0
    rows: int = 8
    cost: StepCost = field(default_factory=StepCost)
    random: Random = field(default_factory=lambda: Random(1))
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    """(first position, tokens, times a step without prefill) of each chunk but the ends of prompts."""

    def serve(self, prompts: Sequence[tuple[int, int]]) -> None:
        """Prompts of (cached, uncached) tokens, one after the other beside decoding rows, a few steps between."""
        for start, left in prompts:
            for _ in range(self.random.randint(1, 6)):
                self.cost.observe(self.decode_s * self._slowness(), 0, self.rows)
            while left:
                chunk, most = choose_chunk(0, self.cost, self.rows, 16, start)
                n = left if left <= most else chunk
                seconds = self.decode_s + n * self.token_s + self.position_s * (n * start + n * (n - 1) / 2)
                if n < left:
                    self.steps.append((start, n, seconds / self.decode_s))
                self.cost.observe(seconds * self._slowness(), n, self.rows, start + (n - 1) / 2)
                start, left = start + n, left - n

    def _slowness(self) -> float:
        outlier = 3.0 if self.noise and self.random.random() < 0.01 else 1.0
        return outlier * (1 + abs(self.random.gauss(0, self.noise)))


MIXES = {
    "long and short": [(0, 1000), (0, 60), (0, 200)],
    "very long": [(0, 4000), (0, 300)],
    "cached prefixes of several lengths": [(0, 300), (1024, 300), (3008, 300)],
    "deep ones alone": [(2000, 500)],
}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_keeps_to_the_target_at_every_depth(mix: str, noise: float) -> None:
    machine = Machine(noise=noise)
    machine.serve(MIXES[mix] * 20)
    machine.steps.clear()
    machine.serve(MIXES[mix] * 20)
    ratios = sorted(ratio for _, _, ratio in machine.steps)
    assert ratios[-1] <= TARGET_RATIO * (1.01 + 2 * noise)  # what is learnt is an average
    assert ratios[int(0.99 * len(ratios))] <= TARGET_RATIO * (1.01 + noise)
    assert sum(ratios) / len(ratios) > 0.85 * TARGET_RATIO, "nothing is given away"


@pytest.mark.parametrize("mix", [MIXES["very long"], [(0, 300)], [(0, 500), (2000, 300)]])
def test_deep_prompts_do_not_make_the_chunks_of_shallow_ones_smaller(mix: list[tuple[int, int]]) -> None:
    machine = Machine(noise=0.05)
    machine.serve(mix * 40)
    plain = measured(machine.decode_s, machine.token_s, machine.rows)
    assert budget(0, machine.cost, machine.rows) >= budget(0, plain, machine.rows) - 16


def test_shallow_prompts_teach_next_to_nothing_of_attention() -> None:
    machine = Machine(position_s=0.0, noise=0.1)
    machine.serve([(0, 150)] * 200)
    token = machine.cost.prefill_token
    assert token.at(1000) < 1.2 * token.at(0)


def test_a_slow_step_in_the_deep_changes_little_and_a_slow_start_is_forgotten() -> None:
    machine = Machine()
    machine.serve([(0, 1000)] * 10)
    before = [machine.cost.prefill_token.at(context) for context in (0, 1000, 4000)]
    machine.cost.observe(5.0, 64, machine.rows, 1000.0)
    after = [machine.cost.prefill_token.at(context) for context in (0, 1000, 4000)]
    assert all(old <= new < 1.05 * old for old, new in zip(before, after, strict=True))
    slow_start = Machine(cost=StepCost(prefill_token=TokenCost(100 * machine.token_s)))
    slow_start.serve([(0, 1000)] * 10)
    assert abs(budget(0, slow_start.cost, 8) - budget(0, machine.cost, 8)) <= 16  # a page


@pytest.mark.parametrize("context", [0.0, 100.0, 1000.0, 100_000.0])
def test_both_parts_stay_costs_whatever_is_measured(context: float) -> None:
    token = TokenCost(1e-4, 1e-7)
    random = Random(2)
    for _ in range(2000):
        token.learn(10 ** random.uniform(-9, -3), context if random.random() < 0.9 else 0.0)
        assert token.base_s > 0 and token.per_position_s >= 0


def test_as_many_tokens_fit_as_take_the_time_together() -> None:
    token = TokenCost(1e-4, 1e-7)
    for start in (0, 1000, 5000):
        n = token.fitting(0.1, start)
        took = [m * token.at(start + (m - 1) / 2) for m in (n, n + 2)]
        assert took[0] <= 0.1 < took[1]


def test_each_prompt_has_its_share_of_the_step_by_its_depth() -> None:
    cost = StepCost({4: 0.05}, TokenCost(0.0005, 0.0005 / 1000))
    shallow, deep = (choose_chunk(0, cost, 8, 4, start)[0] for start in (0, 2000))
    assert shallow > 2 * deep
    half = Budget(0, cost, 8, 4)
    assert half.take(2000, deep // 2) == deep // 2
    assert half.take(0, 1000) == pytest.approx(shallow / 2, abs=1)
    assert half.spent and half.take(0, 1000) == 0


def test_a_configured_budget_is_dealt_out_to_the_last_token() -> None:
    for sizes in ([60, 40], [70, 30], [33, 33, 33, 1], [1] * 100):
        budget = Budget(100, StepCost(), 0, 16)
        assert [budget.take(1000 * i, n) for i, n in enumerate(sizes)] == sizes
        assert budget.spent
    budget = Budget(100, StepCost(), 0, 16)
    assert [budget.take(0, 99), budget.take(0, 500), budget.take(0, 500)] == [99, 1, 0]


def test_who_does_not_get_all_leaves_nothing_to_others() -> None:
    cost = StepCost({4: 0.05}, TokenCost(0.0005, 0.0005 / 1000))
    budget = Budget(0, cost, 8, 4)
    budget.take(0, 7)
    assert 0 < budget.take(3000, 1000) < 1000
    assert budget.spent


# --------------------------------------------------------------------------- tiles of the worker


@pytest.mark.parametrize("tile", [6, 12, 16])
def test_a_step_fills_tiles_and_takes_no_longer_than_it_may(tile: int) -> None:
    for rows in range(40):
        for start in (0, 700):
            cost = StepCost(dict.fromkeys(range(8), 0.03), TokenCost(0.0004, 1e-7))
            plain, most_plain = choose_chunk(0, cost, rows, 1, start)
            chunk, most = choose_chunk(0, cost, rows, 16, start, tile)
            assert (rows + chunk) % tile == 0
            assert plain - tile < chunk <= plain
            assert chunk <= most <= most_plain


@pytest.mark.parametrize("tile", [6, 12, 16])
def test_the_smallest_chunk_fills_the_nearest_tile(tile: int) -> None:
    slow = measured(0.001, 0.01, 1)
    for rows in range(1, 40):
        chunk, most = choose_chunk(0, slow, rows, 16, tile_tokens=tile)
        assert (rows + chunk) % tile == 0 and abs(chunk - MIN_CHUNK) <= tile / 2
        assert chunk == most == smallest_chunk(rows, tile)


def test_of_the_smallest_chunks_something_is_learnt() -> None:
    chunk = smallest_chunk(5, 12)
    assert chunk == 31 < MIN_CHUNK
    cost = StepCost({3: 0.001}, TokenCost(0.01))
    for _ in range(100):
        cost.observe(0.001 + chunk * 0.00001, chunk, 5, tile_tokens=12)
    assert choose_chunk(0, cost, 5, 16, tile_tokens=12)[0] > MIN_CHUNK


def test_tiles_larger_than_the_smallest_chunk_leave_half_of_it() -> None:
    for tile in (48, 64, 512, 1 << 20):
        for rows in range(100):
            for cost in (StepCost(), measured(0.001, 0.01, 1)):
                assert choose_chunk(0, cost, rows, 16, tile_tokens=tile)[0] >= MIN_CHUNK // 2


@pytest.mark.parametrize("tile", [6, 12, 16])
def test_prompts_that_share_a_step_fill_its_tiles(tile: int) -> None:
    random = Random(3)
    cost = StepCost(dict.fromkeys(range(8), 0.05), TokenCost(0.0005, 0.0005 / 1000))
    for _ in range(500):
        rows = random.randrange(20)
        budget, most = Budget(0, cost, rows, 16, tile), choose_chunk(0, cost, rows, 1)[1]
        taken = 0
        while not budget.spent:
            left = random.randrange(1, 60)
            n = budget.take(random.choice([0, 500, 2000]), left)
            taken += n
            if n < left:  # full, or so little of its share is left that no tile is
                assert (rows + taken) % tile == 0 or n < tile / 2
        assert taken <= most + tile / 2


def test_a_share_is_rounded_to_the_nearest_tile_of_the_step() -> None:
    cost = StepCost({2: 0.05}, TokenCost((TARGET_RATIO - 1) * 0.05 / 57.5))
    budget = Budget(0, cost, 3, 16, 12)
    assert [budget.take(0, 50), budget.take(0, 100), budget.take(0, 100)] == [50, 7, 0]
    budget = Budget(0, cost, 3, 16, 12, left=30 / 57)  # 3 and 30: 36 is nearer than 24
    assert budget.take(0, 100) == 33
    budget = Budget(0, cost, 3, 16, 12, left=2 / 57, taken=45)
    assert budget.take(0, 100) == 2, "not nothing, though no tile is full"

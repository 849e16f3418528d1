"""How large a prefill chunk may be."""

from __future__ import annotations

from scheduler_proc.cost import (
    DEFAULT_CHUNK,
    FIRST_CHUNK,
    LONGEST_STEP_S,
    MAX_CHUNK,
    MIN_CHUNK,
    TARGET_RATIO,
    StepCost,
    choose_chunk,
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
    assert chunk % 16 == 0 and chunk > 100
    assert 0.030 + chunk * 0.0004 <= TARGET_RATIO * 0.030 + 1e-9


def test_the_end_of_a_prompt_may_exceed_the_budget_beside_decoding_rows_only() -> None:
    cost = measured(0.030, 0.0004, 8)
    chunk, most = choose_chunk(0, cost, 8, 16)
    assert chunk < most and 0.030 + most * 0.0004 < 4 * 0.030
    assert len(set(choose_chunk(0, cost, 0, 16))) == 1
    assert choose_chunk(100, cost, 8, 16) == (100, 100)


def test_a_slow_machine_still_gets_on() -> None:
    assert budget(0, measured(0.001, 0.01, 1), 1) == MIN_CHUNK


def test_more_rows_allow_larger_chunks_once_their_cost_is_known() -> None:
    cost = measured(0.02, 0.0005, 1)
    assert cost.decoding(40) == cost.decoding(1)
    cost.observe(0.08 + 256 * cost.per_prefill_token_s, 256, 40)
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

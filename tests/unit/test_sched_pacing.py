"""The second batch in flight is sent late enough for newcomers, early enough for the worker."""

from __future__ import annotations

from array import array
from collections import deque

import pytest

from common.messages import StepResult
from scheduler_proc.cost import StepCost, TokenCost
from scheduler_proc.pacing import FIRST_LEAD_S, LATE_S, MAX_LEAD_S, MIN_LEAD_S, QUIET_S, SURE_SHARE, Pacing, expected_s
from scheduler_proc.state import InFlight
from tests.unit.sched_support import Rig, request

DECODE_S, PER_TOKEN_S = 0.020, 0.0002


def cost() -> StepCost:
    return StepCost({1: DECODE_S}, TokenCost(PER_TOKEN_S))


def flight(*chunks: int) -> InFlight:
    rows = len(chunks)
    num_decode, num_prefill = chunks.count(0), sum(chunks)
    return InFlight(1, array("i", range(rows)), array("i", chunks), b"\1" * rows, num_decode, num_prefill, ())


def test_a_step_is_expected_to_take_what_its_rows_and_the_sure_share_of_its_chunk_take() -> None:
    assert expected_s(flight(0), cost()) == pytest.approx(DECODE_S)
    assert expected_s(flight(0, 100), cost()) == pytest.approx(DECODE_S + SURE_SHARE * 100 * PER_TOKEN_S)
    assert expected_s(flight(100), cost()) == pytest.approx(SURE_SHARE * 100 * PER_TOKEN_S)


def test_a_deep_chunk_is_expected_to_take_longer_than_a_shallow_one() -> None:
    attention = StepCost({1: DECODE_S}, TokenCost(PER_TOKEN_S, PER_TOKEN_S / 1000))
    deep = flight(0, 100)._replace(prefill_context=100 * 1000)
    assert expected_s(deep, attention) == pytest.approx(DECODE_S + SURE_SHARE * 100 * 2 * PER_TOKEN_S)
    assert expected_s(flight(0, 100), attention) == expected_s(flight(0, 100), cost())


def test_nothing_is_foretold_of_steps_never_measured() -> None:
    assert expected_s(flight(0), StepCost()) == 0
    assert expected_s(flight(0, 100), StepCost({1: DECODE_S})) == 0
    assert Pacing().send_at(deque([flight(0)]), StepCost()) == float("-inf")


def test_the_second_batch_is_due_shortly_before_the_first_one_ends() -> None:
    pacing = Pacing(arrived=9.9)
    pacing.sent(1, 1, now=10.0)
    assert pacing.send_at(deque([flight(0)]), cost()) == pytest.approx(10.0 + DECODE_S - FIRST_LEAD_S)
    assert pacing.send_at(deque(), cost()) == float("-inf")


def test_it_begins_when_the_one_before_it_returns() -> None:
    pacing = Pacing(arrived=9.9)
    pacing.sent(1, 1, now=10.0)
    pacing.holding = True
    pacing.sent(2, 2, now=10.017)
    assert pacing.began == 10.0
    pacing.returned(StepResult(epoch=1, step=1), now=10.021)
    assert pacing.send_at(deque([flight(0)]), cost()) == pytest.approx(10.021 + DECODE_S - FIRST_LEAD_S)


def test_when_nobody_has_come_for_a_while_nothing_is_held() -> None:
    pacing = Pacing(arrived=10.0)
    for began, held_back in ((10.0 + QUIET_S / 2, True), (10.0 + 2 * QUIET_S, False)):
        pacing.sent(1, 1, now=began)
        assert (pacing.send_at(deque([flight(0)]), cost()) > began) == held_back


def held(pacing: Pacing, step: int, idle_s: float) -> float:
    pacing.holding = True
    pacing.sent(step, 2, now=0.0)
    pacing.returned(StepResult(epoch=1, step=step, idle_s=idle_s), now=0.0)
    return pacing.lead_s


def test_a_worker_that_waited_raises_the_lead_and_one_that_did_not_lowers_it() -> None:
    pacing = Pacing()
    raised = held(pacing, 1, idle_s=2 * LATE_S)
    assert raised > FIRST_LEAD_S
    assert held(pacing, 2, idle_s=LATE_S / 2) < raised
    for step in range(3, 1000):
        held(pacing, step, idle_s=0.0)
    assert pacing.lead_s == MIN_LEAD_S
    for step in range(1000, 1100):
        held(pacing, step, idle_s=1.0)
    assert pacing.lead_s == MAX_LEAD_S


def test_a_lead_longer_than_the_steps_shrinks_until_batches_are_held_again() -> None:
    pacing = Pacing(lead_s=MAX_LEAD_S, began=10.0, arrived=9.9)
    steps = 0
    while pacing.send_at(deque([flight(0)]), cost()) <= 10.0:
        steps += 1
        assert steps < 100
        pacing.sent(steps, 2, now=10.0)
    assert MIN_LEAD_S < pacing.lead_s < DECODE_S
    quiet = Pacing(lead_s=MAX_LEAD_S, began=10.0, arrived=10.0 - 2 * QUIET_S)
    quiet.sent(1, 2, now=10.0)
    assert quiet.lead_s == MAX_LEAD_S


def test_idling_before_a_batch_that_was_not_held_teaches_nothing() -> None:
    pacing = Pacing()
    pacing.sent(1, 1, now=0.0)
    pacing.returned(StepResult(epoch=1, step=1, idle_s=1.0), now=0.0)
    assert pacing.lead_s == FIRST_LEAD_S


def test_who_arrives_while_a_batch_runs_is_in_the_next_one() -> None:
    rig = Rig()
    rig.scheduler.state.cost = cost()
    rig.step(request("a", list(range(1, 40))))
    assert rig.out.wake_at == pytest.approx(rig.now + SURE_SHARE * 39 * PER_TOKEN_S - FIRST_LEAD_S)
    assert rig.step(request("b", list(range(101, 140))), seconds=0.001) == []
    [second] = rig.step(seconds=rig.out.wake_at - rig.now)
    assert [begin.rid for begin in second.begins] == ["b"]
    assert rig.out.wake_at > rig.now, "two batches are in flight"

"""A scheduler restored from bytes goes on as if nothing had been."""

from __future__ import annotations

import msgspec
import pytest

from scheduler_proc.cost import StepCost, TokenCost
from scheduler_proc.scheduler import Scheduler
from tests.unit.sched_support import Rig, expected, request

P6 = [7, 8, 9, 10, 11, 12]


def test_a_restored_scheduler_serves_everybody_to_the_end() -> None:
    rig = Rig(pages=20, chunked_prefill_size=8, schedule_conservativeness=0.01)
    rig.step(
        request("a", P6, 30),
        request("b", P6[::-1], 30, logprobs=1),
        request("c", list(range(30, 60)), 5, prompt_logprobs=0),
        request("d", P6, 10, forced=4, priority=2, deadline=rig.now + 1e6),
    )
    for _ in range(7):
        rig.turn()
    for _ in range(5):
        rig.scheduler = Scheduler.restore(rig.config, 0, rig.scheduler.snapshot())
        for _ in range(3):
            rig.turn()
    rig.finish()
    assert rig.ids("a") == expected(P6, 30) and rig.ids("b") == expected(P6[::-1], 30)
    assert rig.ids("c") == expected(list(range(30, 60)), 5) and rig.ids("d") == expected(P6, 10)
    assert len(rig.reader.streams["c"].prompt_logprobs) == 29


def test_a_restored_scheduler_decides_the_same() -> None:
    rig = Rig(pages=16)
    rig.step(*(request(f"r{i}", [*P6, i], 20) for i in range(5)))
    for _ in range(4):
        rig.turn()
    twin = Scheduler.restore(rig.config, 0, rig.scheduler.snapshot())
    for _ in range(60):
        rig.work()
        messages = list(rig.inbox)
        rig.step()
        assert twin.step(messages, rig.now) == rig.out
    assert twin.snapshot() == rig.scheduler.snapshot()


def test_the_tiles_of_the_worker_are_in_the_snapshot() -> None:
    rig = Rig(tile_tokens=12)
    assert Scheduler.restore(rig.config, 0, rig.scheduler.snapshot()).state.need_pool().tile_tokens == 12


def test_what_is_in_flight_and_what_steps_cost_are_in_the_snapshot() -> None:
    rig = Rig(chunked_prefill_size=8)
    rig.scheduler.state.cost = StepCost({1: 0.01}, TokenCost(0.0002, 1e-7))
    rig.step(request("a", P6))
    rig.turn(request("b", list(range(30, 60))))
    rig.turn()
    state, twin = rig.scheduler.state, Scheduler.restore(rig.config, 0, rig.scheduler.snapshot()).state
    assert twin.cost == state.cost
    assert any(flight.prefill_context for flight in state.need_pool().in_flight)
    assert twin.need_pool().in_flight == state.need_pool().in_flight


def test_other_bytes_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        Scheduler.restore(Rig().config, 0, msgspec.msgpack.encode({"epoch": "x"}))

"""When pages run out: who gives way, what is kept, who can never go on."""

from __future__ import annotations

from scheduler_proc.admission import FLOOR_FRACTION, INITIAL_RATIO, RISE, Admission
from scheduler_proc.preempt import victims
from scheduler_proc.request import Status
from tests.unit.sched_support import Rig, expected, request

BOLD = 0.01
"""Admits without regard to growth, so that preemption is needed."""


def preempted(rig: Rig) -> list[str]:
    return [rid for rid, req in rig.scheduler.state.reqs.items() if req.num_preemptions]


def test_the_request_with_fewest_output_tokens_gives_way_and_loses_nothing() -> None:
    rig = Rig(pages=14, schedule_conservativeness=BOLD)
    rig.step(request("old", [1] * 9, max_tokens=30))
    for _ in range(4):
        rig.turn()
    rig.step(request("new", [2] * 9, max_tokens=30))
    seen: list[str] = []
    for _ in range(120):
        rig.turn()
        seen = preempted(rig) or seen
    assert seen == ["new"]
    assert rig.ids("old") == expected([1] * 9, 30) and rig.ids("new") == expected([2] * 9, 30)
    assert rig.scheduler.state.metrics.num_preemptions_total >= 1


def test_what_is_cached_goes_before_anyone_who_runs() -> None:
    rig = Rig(pages=14, schedule_conservativeness=BOLD)
    rig.step(request("done", [3] * 20, max_tokens=1))
    rig.finish()
    rig.step(request("a", [1] * 9, max_tokens=30))
    rig.finish()
    assert rig.scheduler.state.metrics.num_preemptions_total == 0
    assert rig.ids("a") == expected([1] * 9, 30)


def test_a_resumed_request_finds_its_pages_in_the_tree() -> None:
    rig = Rig(pages=16, schedule_policy="priority", priority_preemption_threshold=1, max_running_requests=1)
    rig.step(request("low", [1] * 9, max_tokens=20))
    for _ in range(6):
        rig.turn()
    rig.step(request("high", [2] * 5, max_tokens=2, priority=9))
    begins = {}
    for _ in range(60):
        for batch in rig.turn():
            begins |= {begin.rid: begin for begin in batch.begins}
    assert begins["low"].computed_len >= 12, "prompt and outputs were kept"
    assert rig.ids("low") == expected([1] * 9, 20) and rig.ids("high") == expected([2] * 5, 2)


def test_order_priority_then_fewest_tokens_then_latest_and_tool_calls_last() -> None:
    rig = Rig()
    rig.step(
        request("keep", [1] * 5, max_tokens=40, priority=3),
        request("tool", [2] * 5, max_tokens=40),
        request("first", [3] * 5, max_tokens=40),
    )
    for _ in range(3):
        rig.turn()
    rig.step(request("second", [4] * 5, max_tokens=40), request("third", [5] * 5, max_tokens=40))
    rig.turn()
    rig.turn()
    rig.scheduler.state.reqs["tool"].in_tool_call = True
    order = [req.rid for req in victims(rig.scheduler.state.need_pool())]
    assert order == ["third", "second", "first", "keep", "tool"]


def test_a_request_that_alone_outgrows_the_pool_ends_with_length_and_says_why() -> None:
    rig = Rig(pages=6)
    rig.step(request("a", [1] * 9, max_tokens=60))
    rig.finish()
    finish = rig.reader.streams["a"].finish
    assert finish is not None and finish.reason == "length"
    assert "24 tokens" in finish.message and "--max-total-tokens" in finish.message
    ids = rig.ids("a")
    assert len(ids) == 24 - 9 + 1, "every page was used, and the last token needs none"
    assert ids == expected([1] * 9, 60)[: len(ids)]


def test_a_preempted_requests_token_in_flight_is_kept() -> None:
    rig = Rig(schedule_policy="priority", priority_preemption_threshold=1, max_running_requests=1)
    rig.step(request("low", [1] * 5, max_tokens=20))
    rig.turn()
    rig.turn(request("high", [2] * 5, max_tokens=3, priority=9))
    rig.turn()
    low = rig.scheduler.state.reqs["low"]
    assert low.status is Status.LEAVING
    rig.finish()
    assert rig.ids("low") == expected([1] * 5, 20)


def test_below_the_threshold_nobody_is_preempted_for_priority() -> None:
    rig = Rig(schedule_policy="priority", priority_preemption_threshold=10, max_running_requests=1)
    rig.step(request("low", [1] * 5, max_tokens=20))
    rig.turn()
    rig.step(request("high", [2] * 5, priority=10))
    rig.finish()
    assert rig.scheduler.state.metrics.num_preemptions_total == 0


def test_admission_leaves_room_for_growth() -> None:
    careful = Rig(pages=20, schedule_conservativeness=2.0)
    careful.step(request("a", [1] * 9, max_tokens=60), request("b", [2] * 9, max_tokens=60))
    assert careful.scheduler.state.need_pool().table.num_taken == 1
    bold = Rig(pages=20, schedule_conservativeness=BOLD)
    bold.step(request("a", [1] * 9, max_tokens=60), request("b", [2] * 9, max_tokens=60))
    assert bold.scheduler.state.need_pool().table.num_taken == 2


def test_the_reserved_fraction_decays_rises_on_preemption_and_resets_when_idle() -> None:
    rig = Rig()
    rig.step(request("a", [1] * 9, max_tokens=60))
    admission = Admission(1.0)
    assert admission.ratio == INITIAL_RATIO
    for _ in range(1000):
        admission.went_well()
    assert abs(admission.ratio - INITIAL_RATIO * FLOOR_FRACTION) < 1e-9
    admission.preempted(rig.scheduler.state.need_pool())
    assert admission.ratio >= INITIAL_RATIO * FLOOR_FRACTION + RISE
    admission.idle()
    assert admission.ratio == INITIAL_RATIO


def test_pressure_from_many_ends_well() -> None:
    rig = Rig(pages=24, schedule_conservativeness=BOLD)
    rig.step(*(request(f"r{i}", [i + 1] * (5 + i), max_tokens=25) for i in range(8)))
    rig.finish(2000)
    for i in range(8):
        assert rig.ids(f"r{i}") == expected([i + 1] * (5 + i), 25)
    assert rig.free + rig.cached == 24

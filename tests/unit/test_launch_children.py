"""Restart limits and the judgement on hung processes, with a clock of the test's own."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any, cast

import msgspec

from common.config import ServerConfig
from common.flags import build
from common.messages import Heartbeat
from launcher.children import LATE_S, Child, RestartHistory, Spec, explain_exit, fleet_of
from launcher.health import SILENCE_S, CpuState, read_cpu_state, why_hung


class _Process:
    pid = 77


def beat(progress: int, busy_since: float = 0.0, *, generation: int = 0, pid: int = 77) -> Heartbeat:
    return Heartbeat(
        role="worker", index=0, generation=generation, pid=pid, ready=True, progress=progress, busy_since=busy_since
    )


def child_at(now: float) -> Child:
    child = Child(Spec("worker", 0), max_restarts=3)
    child.generation = 0
    child.process = cast("subprocess.Popen[bytes]", _Process())
    child.started_at = child.last_beat = child.progress_at = now
    return child


def judge(child: Child, now: float, state: str = "S", cpu_s: float = 0.0, **more: Any) -> str:
    return why_hung(child, now, lambda _: CpuState(state, cpu_s), start_timeout_s=600, hang_timeout_s=120, **more)


def test_first_restart_is_at_once_then_backs_off_then_gives_up() -> None:
    history = RestartHistory(limit=4)
    assert [history.died(float(t), was_ready=True) for t in range(5)] == [0.0, 0.25, 0.5, 1.0, None]


def test_deaths_older_than_the_window_do_not_count() -> None:
    history = RestartHistory(limit=1)
    assert [history.died(t, was_ready=True) for t in (0.0, 61.0, 122.0)] == [0.0, 0.0, 0.0]


def test_slow_starts_that_always_fail_reach_the_limit_too() -> None:
    history = RestartHistory(limit=2)
    assert [history.died(t, was_ready=False) for t in (0.0, 100.0, 200.0)] == [0.0, 0.25, None]


def test_a_forgiven_death_does_not_count() -> None:
    history = RestartHistory(limit=1)
    assert history.died(0.0, was_ready=True) == 0.0
    history.forgive()
    assert history.died(1.0, was_ready=True) == 0.0


def test_limit_zero_allows_no_restart() -> None:
    assert RestartHistory(limit=0).died(0.0, was_ready=True) is None


def test_fleet_has_a_worker_per_rank_and_the_asked_gateways() -> None:
    config = build({"tp_size": 2, "gateways": 2, "tokenizers": 1})
    names = ["worker-0", "worker-1", "scheduler-0", "tokenizer-0", "detokenizer-0", "gateway-0", "gateway-1"]
    assert [spec.name for spec in fleet_of(config)] == names
    assert len(fleet_of(ServerConfig())) == 5


def test_exit_codes_are_named() -> None:
    assert (explain_exit(3), explain_exit(-9)) == ("exit code 3", "killed by SIGKILL")


def test_heartbeats_of_another_generation_or_pid_are_ignored() -> None:
    child = child_at(0.0)
    child.on_beat(beat(5, generation=1), 1.0)
    child.on_beat(beat(5, pid=78), 1.0)
    assert (child.progress, child.ready, child.last_beat) == (-1, False, 0.0)
    child.on_beat(beat(5), 1.0)
    assert (child.progress, child.ready, child.last_beat) == (5, True, 1.0)


def test_a_process_may_take_its_time_to_start_but_not_for_ever() -> None:
    child = child_at(0.0)
    assert judge(child, 599.0) == ""
    assert "not ready 601 s" in judge(child, 601.0)


def test_a_process_that_loads_may_be_silent_but_not_stopped() -> None:
    child = child_at(0.0)
    child.on_beat(msgspec.structs.replace(beat(1), ready=False), 1.0)
    for state, cpu_s in (("R", 400.0), ("D", 1.0), ("S", 1.0)):
        assert judge(child, 500.0, state, cpu_s=cpu_s) == ""
    assert "stopped and silent for 122.0 s" in judge(child, 123.0, "T", cpu_s=1.0)


def test_a_scheduler_whose_worker_is_away_is_not_a_late_start() -> None:
    child = child_at(0.0)
    child.on_beat(beat(5), 1.0)
    child.on_beat(msgspec.structs.replace(beat(6), ready=False), 3600.0)
    assert judge(child, 3601.0) == ""
    assert "no CPU used" in judge(child, 3600.0 + SILENCE_S + 1)


def test_a_silent_process_that_computes_is_not_hung_until_the_full_time() -> None:
    child = child_at(0.0)
    child.on_beat(beat(5, busy_since=1.0), 0.0)
    assert judge(child, 100.0, "R", cpu_s=10.0) == ""
    assert judge(child, 100.0, "S", cpu_s=60.0) == ""
    assert "no heartbeat for 121.0 s" in judge(child, 121.0, "R", cpu_s=131.0)


def test_silent_and_idle_or_stopped_is_hung_soon() -> None:
    child = child_at(0.0)
    child.on_beat(beat(5), 0.0)
    late = SILENCE_S + 1
    assert judge(child, SILENCE_S - 1, "T", cpu_s=10.0) == ""
    assert "no CPU used" in judge(child, late, "S", cpu_s=10.0)
    assert "stopped" in judge(child, late, "T", cpu_s=10.0)
    assert judge(child, late, "t", cpu_s=10.0) == "", "a debugger holds it"


def test_who_is_not_late_is_not_looked_at() -> None:
    child = child_at(0.0)
    looks: list[int] = []

    def look(pid: int) -> CpuState:
        looks.append(pid)
        return CpuState("S", 0.0)

    limits: dict[str, Any] = {"start_timeout_s": 600, "hang_timeout_s": 120}
    assert why_hung(child, 100.0, look, **limits) == "", "it loads"
    child.on_beat(beat(5, busy_since=1.0), 100.0)
    assert why_hung(child, 100.0 + LATE_S, look, **limits) == ""
    assert looks == []
    assert why_hung(child, 100.0 + LATE_S + 0.1, look, **limits) == ""
    assert looks == [77]


def test_the_cpu_that_counts_is_what_is_used_after_the_first_look() -> None:
    child = child_at(0.0)
    child.on_beat(beat(5), 0.0)
    assert judge(child, LATE_S + 0.1, "R", cpu_s=5.0) == ""
    assert judge(child, SILENCE_S + 1, "S", cpu_s=6.0) == ""
    assert "no CPU used" in judge(child, SILENCE_S + 1, "S", cpu_s=5.01)
    child.on_beat(beat(6), 20.0)
    assert judge(child, 20.0 + LATE_S + 0.1, "S", cpu_s=7.0) == "", "a heartbeat ends the doubt"
    assert "no CPU used" in judge(child, 20.0 + SILENCE_S + 1, "S", cpu_s=7.0)


def test_busy_without_progress_is_hung_and_idle_without_progress_is_not() -> None:
    child = child_at(0.0)
    for now in range(0, 122):
        child.on_beat(beat(5, busy_since=1.0), float(now))
    assert "busy without progress for 121.0 s" in judge(child, 121.0)
    assert judge(child, 121.0, others_ready=False) == "", "it waits for a process that is away"
    child.on_beat(beat(5), 122.0)
    assert judge(child, 122.0) == ""


def test_a_long_prefill_makes_progress_step_by_step() -> None:
    child = child_at(0.0)
    for now in range(0, 1000, 50):
        child.on_beat(beat(now, busy_since=1.0), float(now))
        assert judge(child, float(now)) == ""


def test_time_in_which_the_supervisor_slept_is_not_held_against_anyone() -> None:
    child = child_at(0.0)
    child.on_beat(beat(5, busy_since=1.0), 0.0)
    child.excuse(1000.0)
    assert judge(child, 1001.0) == ""


def test_a_process_whose_first_thread_waits_for_one_that_wants_a_core_does_not_idle() -> None:
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    try:
        # /proc answers for a thread's number too, as if that thread were the first of its process.
        while Path(f"/proc/{waiting.native_id}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            pass
        state = read_cpu_state(waiting.native_id or 0)
    finally:
        over.set()
        waiting.join()
    assert state.state == "R"
    child = child_at(100.0)
    child.on_beat(beat(1), 100.0)
    assert judge(child, 100.0 + SILENCE_S + 1, state.state) == ""
    assert "no CPU used" in judge(child, 100.0 + SILENCE_S + 1, "S")

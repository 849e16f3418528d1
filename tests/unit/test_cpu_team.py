"""How the threads of a step meet: what other processors keep in order, and who leaves a core."""

from __future__ import annotations

import os
import platform
import threading
import time
from types import SimpleNamespace

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
import pytest
from numba import njit, types

from worker_proc.kernels.cpu import scalar, team
from worker_proc.kernels.cpu.kernels import jit
from worker_proc.kernels.cpu.scalar import atomic_add, atomic_load, atomic_store, current_core
from worker_proc.kernels.cpu.vector_ir import I64


@pytest.mark.parametrize("cpu", ["generic", "neoverse-n1", "neoverse-v2"])
def test_on_arm_no_word_is_read_before_an_addition_to_another_is_seen(cpu: str) -> None:
    """The last arrival at the barrier then looks for sleepers. ``ldapr`` could read too early, ``ldar`` cannot."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(I64, [I64] * 2), "arrive")
    builder = ir.IRBuilder(function.append_basic_block())
    context = SimpleNamespace(get_dummy_value=lambda: None)
    _, add = atomic_add._defn(None, types.int64, types.int64)
    _, load = atomic_load._defn(None, types.int64)
    add(context, builder, None, [function.args[0], ir.Constant(I64, 1)])
    builder.ret(load(context, builder, None, [function.args[1]]))
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu=cpu, opt=3)
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert "\tldar\t" in text and "ldapr" not in text


@njit
def step_aside_with(sync: int, phase: int, others_core: int, others_phases: int) -> tuple[int, int]:
    """``step_aside`` as thread 0 of 2; the caller's core before and after. ``others_core`` -1: the caller's own."""
    core = current_core()
    its = sync + team.COUNTERS + 2 * 2 * team.LINE + team.PLACE
    atomic_store(its + team.CORE, core if others_core < 0 else others_core)
    atomic_store(its + team.ENDED, others_phases)
    team.step_aside(sync, phase, 0, 2)
    return core, current_core()


class Waiting:
    """A thread that waits for another at the end of phase ``phase``."""

    def __init__(self) -> None:
        self._words = np.zeros(team.sync_bytes(2) // 8, np.int64)

    def step_aside(self, phase: int, others_core: int = -1, others_phases: int = 0) -> tuple[int, int]:
        return step_aside_with(self._words.ctypes.data, phase, others_core, others_phases)  # type: ignore[no-any-return]

    @property
    def moved_in(self) -> int:
        """The phase of its last move; 0 for none."""
        return int(self._words[(team.COUNTERS + 2 * 2 * team.LINE + team.MOVED) // 8])


def test_who_waits_leaves_the_core_that_the_other_needs_and_may_come_back() -> None:
    cores, waiting = os.sched_getaffinity(0), Waiting()
    steps = [waiting.step_aside(phase) for phase in (100, 200, 300)]  # Linux may bring it back in between
    assert waiting.moved_in == 300
    assert len(cores) == 1 or any(before != after for before, after in steps)
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize(
    ("others_core", "others_phases"), [(1023, 0), (-1, 101)], ids=["on another core", "at the barrier too"]
)
def test_who_shares_no_core_with_a_thread_at_work_stays(others_core: int, others_phases: int) -> None:
    waiting = Waiting()
    waiting.step_aside(100, others_core, others_phases)
    assert waiting.moved_in == 0


def test_a_thread_moves_once_in_a_while() -> None:
    waiting = Waiting()
    for phase in (100, 101, 100 + team.MOVE_EVERY - 1):
        waiting.step_aside(phase)
    assert waiting.moved_in == 100
    waiting.step_aside(100 + team.MOVE_EVERY)
    assert waiting.moved_in == 100 + team.MOVE_EVERY


def test_a_thread_with_one_core_stays_there() -> None:
    cores, waiting = os.sched_getaffinity(0), Waiting()
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert waiting.step_aside(100) == (min(cores), min(cores))
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, cores)


def test_a_thread_steps_aside_before_it_sleeps_at_the_barrier() -> None:
    machine = platform.machine()
    kernels = SimpleNamespace(jit=jit, pause=scalar.make_pause(machine), futex=scalar.make_futex(machine))
    end_phase, _, _ = team.make_waiting(kernels)  # type: ignore[arg-type]

    @njit(nogil=True)
    def arrive(sync: int, tid: int) -> None:
        atomic_store(sync + team.COUNTERS + 4 * team.LINE + team.PLACE + team.CORE, current_core())
        end_phase(sync, 100, 2, tid)

    waiting = Waiting()
    words = waiting._words
    words[team.ARRIVALS // 8] = 200  # of two threads in a hundred phases; and nobody spins
    thread = threading.Thread(target=arrive, args=(words.ctypes.data, 0))
    thread.start()
    deadline = time.monotonic() + 10
    while waiting.moved_in != 100 and time.monotonic() < deadline:
        time.sleep(0.001)
    moved_in = waiting.moved_in
    arrive(words.ctypes.data, 1)
    thread.join(10)
    assert moved_in == 100 and not thread.is_alive()

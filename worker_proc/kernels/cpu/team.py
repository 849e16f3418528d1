"""How the threads of a step meet: claims, the barrier, sleeping.

One compiled function runs on every thread, without Python's lock and without OpenMP: pools that
spin after each operation would take the cores away from the step and from the other processes.

Shared words, one cache line (64 bytes) each, from ``sync``:
    0 step number    1 threads asleep until the next step
    2 arrivals at the barrier, ever growing    3 threads asleep at the barrier
    4 stop           5 nanoseconds before a waiting thread sleeps
    6..  two sets of claim counters, one word per thread
    then a place for each thread: a line with its core, the phases that it ended and the phase of its last move, and
    room for two affinity masks

Waiting spins for some tens of microseconds, which covers the usual gap between phases and between
decode steps, then sleeps on a futex: a core lost to another process does not make the rest of the
team burn theirs, and an idle engine uses no CPU. Before it sleeps at the barrier, a thread leaves the core
that it shares with one it waits for (``step_aside``).

A phase's work is cut into items. Each thread takes items from its own contiguous share in order
(good for prefetching), then helps the others. Counters alternate between two sets: while a phase
uses one, each thread clears its own counter of the other, which nobody touches before the next
barrier.
"""

from __future__ import annotations

from typing import Any

from worker_proc.kernels.cpu.kernels import KernelSet, jit
from worker_proc.kernels.cpu.scalar import (
    CLOCK_MONOTONIC,
    atomic_add,
    atomic_load,
    atomic_store,
    clock_ns,
    current_core,
    get_affinity,
    set_affinity,
)

LINE = 64
STEP, STEP_SLEEPERS, ARRIVALS, SLEEPERS, STOP, SPIN, COUNTERS = (i * LINE for i in range(7))
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
EVERYONE = 1 << 20
DEFAULT_SPIN_NS = 50_000
PAUSES = 16
"""Between two looks at the clock. A pause takes 140 cycles on one kind of core and 60 on another."""
MASK_BYTES = 128
"""Room for 1,024 cores; on more nobody moves."""
PLACE = LINE + 2 * MASK_BYTES
CORE, ENDED, MOVED = 0, 8, 16
MOVE_EVERY = 16
"""Phases between two moves of a thread: where the other cores have work of their own, Linux brings it back."""


def sync_bytes(num_threads: int) -> int:
    """Size of the shared words."""
    return COUNTERS + num_threads * (2 * LINE + PLACE)


@jit
def next_item(counters: int, tid: int, nt: int, num_items: int, victim: int) -> Any:
    """(item, victim): the next item of the share ``victim`` places after ours, or -1 when all are taken."""
    while victim < nt:
        owner = (tid + victim) % nt
        first = owner * num_items // nt
        size = (owner + 1) * num_items // nt - first
        counter = counters + owner * LINE
        if atomic_load(counter) < size:
            taken = atomic_add(counter, 1)
            if taken < size:
                return first + taken, victim
        victim += 1
    return -1, victim


@jit
def _place(sync: int, tid: int, nt: int) -> int:
    return sync + COUNTERS + 2 * nt * LINE + tid * PLACE


@jit
def step_aside(sync: int, phase: int, tid: int, nt: int) -> None:
    """Leave this core to a thread that was on it when it began the phase and has not ended it.

    Where cores are few and busy, Linux wakes a thread on the core it slept on, also if that of the other one is idle.
    Two that got onto one core, because a third process had woken on the other, then take turns there for milliseconds,
    at every phase, beside an idle core. Who waits has nothing to lose by going.
    """
    place, core, shared = _place(sync, tid, nt), current_core(), False
    for other in range(nt):
        its = _place(sync, other, nt)
        if other != tid and atomic_load(its + ENDED) <= phase and atomic_load(its + CORE) == core:
            shared = True
    mask, rest = place + LINE, place + LINE + MASK_BYTES
    if not shared or phase - atomic_load(place + MOVED) < MOVE_EVERY or get_affinity(MASK_BYTES, mask) != 0:
        return
    atomic_store(place + MOVED, phase)
    left = 0
    for word in range(MASK_BYTES // 8):
        bits = atomic_load(mask + 8 * word)
        if core >> 6 == word:
            bits &= ~(1 << (core & 63))
        atomic_store(rest + 8 * word, bits)
        left |= bits
    if left != 0:
        set_affinity(MASK_BYTES, rest)
        set_affinity(MASK_BYTES, mask)
        atomic_store(place + CORE, current_core())


@jit
def begin_phase(sync: int, phase: int, tid: int, nt: int) -> Any:
    """Address of this phase's counters; clears ours of the next phase."""
    sets = sync + COUNTERS
    atomic_store(sets + ((phase + 1) & 1) * nt * LINE + tid * LINE, 0)
    atomic_store(_place(sync, tid, nt) + CORE, current_core())
    return sets + (phase & 1) * nt * LINE


def make_waiting(kernels: KernelSet) -> tuple[Any, Any, Any]:
    """(end_phase, wait_step, start_step), compiled for this machine's pause and futex."""
    pause, futex = kernels.pause, kernels.futex

    @kernels.jit
    def spin_until(word: int, target: int, spin_ns: int) -> bool:
        """Whether the word is at least ``target`` within ``spin_ns``."""
        start = clock_ns(CLOCK_MONOTONIC)
        while True:
            for _ in range(PAUSES):
                if atomic_load(word) >= target:
                    return True
                pause()
            if clock_ns(CLOCK_MONOTONIC) - start >= spin_ns:
                return False

    @kernels.jit
    def sleep_until(word: int, sleepers: int, target: int) -> None:
        """Return once the word is at least ``target``."""
        atomic_add(sleepers, 1)
        while True:
            seen = atomic_load(word)
            if seen >= target:
                break
            # The kernel compares again, so an arrival in between is not missed.
            futex(word, FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF)
        atomic_add(sleepers, -1)

    @kernels.jit
    def end_phase(sync: int, phase: int, nt: int, tid: int) -> Any:
        """Barrier; the next phase's number."""
        if nt == 1:
            return phase + 1
        atomic_store(_place(sync, tid, nt) + ENDED, phase + 1)
        target = (phase + 1) * nt
        if atomic_add(sync + ARRIVALS, 1) + 1 == target:
            if atomic_load(sync + SLEEPERS) > 0:
                futex(sync + ARRIVALS, FUTEX_WAKE_PRIVATE, EVERYONE)
        else:
            if not spin_until(sync + ARRIVALS, target, atomic_load(sync + SPIN)):
                step_aside(sync, phase, tid, nt)
                sleep_until(sync + ARRIVALS, sync + SLEEPERS, target)
        return phase + 1

    @kernels.jit
    def wait_step(sync: int, step: int) -> Any:
        """Sleep until step number ``step`` begins; false when the team is to end."""
        if not spin_until(sync + STEP, step, atomic_load(sync + SPIN)):
            sleep_until(sync + STEP, sync + STEP_SLEEPERS, step)
        return atomic_load(sync + STOP) == 0

    @kernels.jit
    def start_step(sync: int) -> None:
        """Begin the next step: what the caller wrote before is visible to all threads."""
        atomic_add(sync + STEP, 1)
        if atomic_load(sync + STEP_SLEEPERS) > 0:
            futex(sync + STEP, FUTEX_WAKE_PRIVATE, EVERYONE)

    return end_phase, wait_step, start_step

"""How the threads of a step meet: claims, the barrier, sleeping.

One compiled function runs on every thread, without Python's lock and without OpenMP: pools that
spin after each operation would take the cores away from the step and from the other processes.

Shared words, one cache line (64 bytes) each, from ``sync``:
    0 step number    1 threads asleep until the next step
    2 arrivals at the barrier, ever growing    3 threads asleep at the barrier
    4 stop           5 pauses before a waiting thread sleeps
    6..  two sets of claim counters, one word per thread

Waiting spins for some tens of microseconds, which covers the usual gap between phases and between
decode steps, then sleeps on a futex: a core lost to another process does not make the rest of the
team burn theirs, and an idle engine uses no CPU.

A phase's work is cut into items. Each thread takes items from its own contiguous share in order
(good for prefetching), then helps the others. Counters alternate between two sets: while a phase
uses one, each thread clears its own counter of the other, which nobody touches before the next
barrier.
"""

from __future__ import annotations

from typing import Any

from worker_proc.kernels.cpu.kernels import KernelSet, jit
from worker_proc.kernels.cpu.scalar import atomic_add, atomic_load, atomic_store

LINE = 64
STEP, STEP_SLEEPERS, ARRIVALS, SLEEPERS, STOP, SPIN, COUNTERS = (i * LINE for i in range(7))
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
EVERYONE = 1 << 20
DEFAULT_SPIN = 1000
"""Pauses; about 50 microseconds where a pause takes 140 cycles."""


def sync_bytes(num_threads: int) -> int:
    """Size of the shared words."""
    return COUNTERS + 2 * num_threads * LINE


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
def begin_phase(sync: int, phase: int, tid: int, nt: int) -> Any:
    """Address of this phase's counters; clears ours of the next phase."""
    sets = sync + COUNTERS
    atomic_store(sets + ((phase + 1) & 1) * nt * LINE + tid * LINE, 0)
    return sets + (phase & 1) * nt * LINE


def make_waiting(kernels: KernelSet) -> tuple[Any, Any, Any]:
    """(end_phase, wait_step, start_step), compiled for this machine's pause and futex."""
    pause, futex = kernels.pause, kernels.futex

    @kernels.jit
    def wait_beyond(word: int, sleepers: int, target: int, spin: int) -> None:
        """Return once the word is at least ``target``."""
        for _ in range(spin):
            if atomic_load(word) >= target:
                return
            pause()
        atomic_add(sleepers, 1)
        while True:
            seen = atomic_load(word)
            if seen >= target:
                break
            # The kernel compares again, so an arrival in between is not missed.
            futex(word, FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF)
        atomic_add(sleepers, -1)

    @kernels.jit
    def end_phase(sync: int, phase: int, nt: int) -> Any:
        """Barrier; the next phase's number."""
        if nt == 1:
            return phase + 1
        target = (phase + 1) * nt
        if atomic_add(sync + ARRIVALS, 1) + 1 == target:
            if atomic_load(sync + SLEEPERS) > 0:
                futex(sync + ARRIVALS, FUTEX_WAKE_PRIVATE, EVERYONE)
        else:
            wait_beyond(sync + ARRIVALS, sync + SLEEPERS, target, atomic_load(sync + SPIN))
        return phase + 1

    @kernels.jit
    def wait_step(sync: int, step: int) -> Any:
        """Sleep until step number ``step`` begins; false when the team is to end."""
        wait_beyond(sync + STEP, sync + STEP_SLEEPERS, step, atomic_load(sync + SPIN))
        return atomic_load(sync + STOP) == 0

    @kernels.jit
    def start_step(sync: int) -> None:
        """Begin the next step: what the caller wrote before is visible to all threads."""
        atomic_add(sync + STEP, 1)
        if atomic_load(sync + STEP_SLEEPERS) > 0:
            futex(sync + STEP, FUTEX_WAKE_PRIVATE, EVERYONE)

    return end_phase, wait_step, start_step

"""How the processes share a machine that has no core to spare beside the worker's."""

from __future__ import annotations

import contextlib
import os

SPARE_CORE_FROM = 8
"""With so many cores the worker leaves one to the other processes. With fewer it would cost the step more than they
need."""


def give_way(num_cores: int) -> None:
    """This process, and threads it starts from now on, do not interrupt who is running: they wait for a core, or for
    the end of its time slice, some milliseconds at most. For every role but the worker, before it starts threads.

    Where the worker has a thread on every core, one that is interrupted for a moment is waited for by all others at
    the end of the phase. Linux's batch class does not interrupt when it wakes. Nothing needs an answer sooner: the
    next batch lies at the worker before the last one ends. Does nothing where a core is spare.
    """
    if num_cores < SPARE_CORE_FROM and hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox that forbids it costs a few per cent, no more
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)

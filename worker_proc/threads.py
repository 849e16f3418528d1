"""Thread settings of the worker, made before torch and Numba are imported because both read them once."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path


def num_threads(requested: int, tp_size: int = 1) -> int:
    """Threads of this worker: as asked, or the cores this process may use, shared with the other ranks."""
    if requested > 0:
        return requested
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(cores, _cgroup_cores() or cores) // tp_size)


def _cgroup_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Whole cores of a container's CPU quota (cgroup v2), 0 for no quota: more threads would only be throttled."""
    try:
        quota, period = path.read_text().split()
        return 0 if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 0


def set_thread_environment(environ: MutableMapping[str, str], threads: int) -> None:
    """Set what OpenMP and Numba read at import; what the user has set stays.

    * ``OMP_NUM_THREADS``, ``NUMBA_NUM_THREADS``: as many as asked; both would take every core of the host.
    * ``GOMP_SPINCOUNT``: torch and Numba each have an OpenMP pool, whose idle threads spin. Spinning
      saves a wake-up between two operations of one forward pass (waiting passively was twice as slow),
      but goes on for milliseconds after the pass and takes the cores from sampling and from the other
      processes. 20,000 turns are some tens of microseconds: longer than the gaps within a pass.
    * ``KMP_BLOCKTIME``: the same for builds of torch with Intel's or LLVM's runtime, in milliseconds.
    """
    for name, value in (
        ("OMP_NUM_THREADS", str(threads)),
        ("NUMBA_NUM_THREADS", str(threads)),
        ("GOMP_SPINCOUNT", "20000"),
        ("KMP_BLOCKTIME", "1"),
    ):
        environ.setdefault(name, value)

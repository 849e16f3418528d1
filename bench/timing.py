"""Seconds: of work spread over threads, and of this process's own CPU time."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable


def on_threads(num_threads: int, work: Callable[[int], object]) -> float:
    """Seconds on the clock until ``work(tid)`` has returned on each of that many threads."""
    threads = [threading.Thread(target=work, args=(tid,)) for tid in range(num_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def own_cpu_s() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

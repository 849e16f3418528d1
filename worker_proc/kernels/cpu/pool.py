"""The memory of the KV pool, made real a little ahead of use.

The pool is as large as it may become, and a part of it costs memory from the moment it is first written. The system
then clears 2 MiB, and below a hypervisor the host has to find them first: 4 ms each on a machine of ours. Inside a
step such a fault stops a thread for which all others wait. So one thread writes to each huge page before the scheduler
hands it out (page ids are given from 0 upwards, the freed ones first), always ``AHEAD_BYTES`` beyond the highest in
use. It runs where nobody else wants a core; whoever is faster than it pays for himself, as without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from typing import Any

import numpy as np
from numba import njit, types

from worker_proc.kernels.cpu import compile_cache, scalar
from worker_proc.kernels.cpu.packing import HUGE_PAGE, huge_buffer
from worker_proc.kernels.cpu.scalar import atomic_load, atomic_store, write_back
from worker_proc.kernels.cpu.team import FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE

AHEAD_BYTES = 2 << 30
WAKE_BYTES = 32 << 20
"""The thread is woken when the highest page in use has moved by so much."""
GOAL, DONE, STOP = 0, 8, 16
"""Words: bytes of the pool to be real, bytes that are, and whether to end."""


def _make_fill() -> Any:
    futex = scalar.make_futex(platform.machine())

    def fill(pool: int, words: int) -> None:
        """Write to one word of each huge page up to the goal, sleep until it moves. ``pool``, ``words``: addresses."""
        done = 0
        while atomic_load(words + STOP) == 0:
            goal = atomic_load(words + GOAL)
            if done >= goal:
                futex(words + GOAL, FUTEX_WAIT_PRIVATE, goal & 0xFFFFFFFF)
                continue
            write_back(pool + done)
            done += HUGE_PAGE
            atomic_store(words + DONE, done)

    return njit(nogil=True)(fill)


class KvPool:
    """``num_pages`` zeroed pages of ``page_bytes`` (over all layers). Raises MemoryError with the arithmetic."""

    def __init__(self, num_pages: int, page_bytes: int, ahead_bytes: int = AHEAD_BYTES) -> None:
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self._ahead = ahead_bytes
        self._bytes = huge_buffer(num_pages * page_bytes, f"the KV pool ({num_pages} pages x {page_bytes} bytes)")
        self.address = int(self._bytes.ctypes.data)
        self._words = np.zeros(3, np.int64)
        self._thread: threading.Thread | None = None
        if self._bytes.size > WAKE_BYTES:
            self._thread = threading.Thread(target=self._fill, name="quintet-kv-pool", daemon=True)
            self._thread.start()
        self.reach(-1)

    @property
    def pages(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [num_pages, page_bytes]."""
        return self._bytes.reshape(self.num_pages, self.page_bytes)

    @property
    def real_bytes(self) -> int:
        """Bytes from the beginning on that were made real ahead of use."""
        return min(int(self._words[DONE // 8]), self._bytes.size)

    def reach(self, page: int) -> None:
        """Page ids up to this one are in use, or about to be."""
        used = (page + 1) * self.page_bytes // WAKE_BYTES * WAKE_BYTES
        goal = min(used + self._ahead, self._bytes.size)
        if goal > self._words[GOAL // 8]:
            self._words[GOAL // 8] = goal
            self._wake()

    def close(self) -> None:
        """End the thread, before the memory goes. Idempotent."""
        if self._thread is not None:
            self._words[STOP // 8] = 1
            self._words[GOAL // 8] -= 1  # not the goal that it sleeps for: the kernel compares; and nothing more to do
            self._wake()
            self._thread.join()
            self._thread = None

    def _wake(self) -> None:
        at = ctypes.c_void_p(int(self._words.ctypes.data) + GOAL)
        call = ctypes.CDLL(None).syscall
        call(ctypes.c_long(scalar.futex_number(platform.machine())), at, FUTEX_WAKE_PRIVATE, 1, None, None, 0)

    def _fill(self) -> None:
        fill = _make_fill()
        compile_cache.attach(fill, "fill_pool", "any")
        fill.compile((types.int64, types.int64))
        if hasattr(os, "SCHED_IDLE"):
            with contextlib.suppress(OSError):  # a sandbox that forbids it
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        fill(self.address, int(self._words.ctypes.data))

"""The Python side of the team: threads that live inside the compiled function."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from worker_proc.kernels.cpu import team


class ThreadTeam:
    """``num_threads - 1`` daemon threads and the caller run each step together.

    The threads stay in compiled code without the interpreter's lock, asleep on a futex between
    steps. They must be stopped (:meth:`close`) before the arrays they read are freed.
    """

    def __init__(self, team_main: Any, num_threads: int, models: Any, layers: Any, steps: Any, owns: Any) -> None:
        self._main = team_main
        self.num_threads = num_threads
        self._shared = (models, layers, steps, owns)
        words = np.zeros(team.sync_bytes(num_threads) // 8 + 8, np.int64)
        skip = -words.ctypes.data % team.LINE // 8
        self._words = words[skip:]
        self._words[team.SPIN // 8] = team.DEFAULT_SPIN_NS
        self._sync = int(self._words.ctypes.data)
        self._phase = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._stay, args=(tid,), name=f"quintet-cpu-{tid}", daemon=True)
            for tid in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _stay(self, tid: int) -> None:
        self._main(tid, self.num_threads, self._sync, 0, *self._shared, True)

    def run(self) -> None:
        """Run one step with what the records say now."""
        if self._closed:
            raise RuntimeError("the thread team is closed; build a new runner")
        self._phase = self._main(0, self.num_threads, self._sync, self._phase, *self._shared, False)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._words[team.STOP // 8] = 1
        self._main(-1, self.num_threads, self._sync, self._phase, *self._shared, False)
        for thread in self._threads:
            thread.join()

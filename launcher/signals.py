"""Sleep until a signal comes. The death of a child is one too: SIGCHLD."""

from __future__ import annotations

import os
import select
import signal


class Signals:
    """Ends a sleep, also one that is only about to begin, for every signal that has a handler. One per process.

    Made and used in the main thread, as Python's handlers are.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        # A handler that runs in the sleeper's own thread may have run just before it sleeps; a byte in a pipe stays.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGCHLD, lambda *_: None)  # for a signal without a handler no byte comes

    def wait(self, timeout_s: float) -> bool:
        """Sleep; True if a signal came, since the last call at the earliest."""
        if not self._poll.poll(1000 * timeout_s):
            return False
        try:
            os.read(self._read, 65536)
        except BlockingIOError:
            pass
        return True

    def close(self) -> None:
        """Let signals be as they were."""
        signal.signal(signal.SIGCHLD, self._before)
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)

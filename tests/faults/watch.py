"""Memory, files and threads of every process, over the time of the soak; and how they are judged.

A process is judged by its resident memory in the soak's quiet part, in which nobody is killed: the first
``WARM_UP`` of that part is left out (caches fill, arenas settle), and of the rest the median of the last third may
be above the median of the first third by ``SLACK_MIB`` or ``SLACK_SHARE`` of it, whichever is more. A leak of one KiB
a request is beyond that in less than half an hour at ten requests a second. The first ``YOUNG_S`` of a process's life
say nothing: it still imports and builds what its first requests need. So a soak of seconds judges few or none.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field

import psutil

from tests.integration.server import Server

WARM_UP = 0.25
YOUNG_S = 30.0
SLACK_MIB = 8.0
SLACK_SHARE = 0.04
MIN_SAMPLES = 9


@dataclass
class Track:
    """One generation of a process."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)

    def growth_mib(self, since: float) -> tuple[float, float] | None:
        """(median of the first third, growth) after the warm-up; None with too few samples to say."""
        end = self.times[-1]
        start = max(since, self.times[0] + YOUNG_S)
        start += WARM_UP * (end - start)
        values = [rss for at, rss in zip(self.times, self.rss_mib, strict=True) if at >= start]
        third = len(values) // 3
        if len(values) < MIN_SAMPLES:
            return None
        first = statistics.median(values[:third])
        return first, statistics.median(values[-third:]) - first


class Watch:
    """Samples in a thread from ``start`` to ``stop``."""

    def __init__(self, server: Server, every_s: float) -> None:
        self._server = server
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.tracks: dict[int, Track] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, with a last sample."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            last = self._stop.wait(self._every_s)
            for name, pid in [*self._server.pids().items(), ("launch", self._server.process.pid)]:
                try:
                    rss = psutil.Process(pid).memory_info().rss / 2**20
                except psutil.Error:
                    continue
                track = self.tracks.setdefault(pid, Track(name, pid))
                track.times.append(time.monotonic())
                track.rss_mib.append(rss)
            if last:
                return

    def judge(self, since: float) -> tuple[list[str], list[str]]:
        """(a line per process that lives, the lines of those that grow)."""
        alive = {**self._server.pids(), "launch": self._server.process.pid}
        lines, growing = [], []
        for name, pid in sorted(alive.items()):
            found = self.tracks[pid].growth_mib(since) if pid in self.tracks else None
            if found is None:
                continue
            first, growth = found
            lines.append(f"{name}: {first:.1f} MiB, {growth:+.2f} MiB")
            if growth > max(SLACK_MIB, SLACK_SHARE * first):
                growing.append(lines[-1])
        return lines, growing


def open_files(server: Server) -> dict[str, tuple[int, int]]:
    """Name -> (open files and sockets, threads)."""
    found = {}
    for name, pid in [*server.pids().items(), ("launch", server.process.pid)]:
        process = psutil.Process(pid)
        found[name] = (process.num_fds(), process.num_threads())
    return found

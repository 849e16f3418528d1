"""start_profile / stop_profile: a trace of torch's profiler, to be opened in Perfetto or chrome://tracing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


class Profiler:
    """At most one profile at a time."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._directory = Path()

    def start(self, directory: str) -> str:
        """Begin recording; the trace will be written into ``directory``. ``ValueError`` if one is running."""
        from torch import profiler

        if self._profile is not None:
            raise ValueError(f"a profile into {self._directory} is already running; stop_profile ends it")
        if not directory:
            raise ValueError("start_profile needs a directory to write the trace into")
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        activities = [profiler.ProfilerActivity.CPU]
        if profiler.ProfilerActivity.CUDA in profiler.supported_activities():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profile = profiler.profile(activities=activities)
        self._profile.start()
        return f"profiling into {self._directory}"

    def stop(self) -> str:
        """End recording, write ``worker-<pid>-<time>.json`` and name it. ``ValueError`` if none is running."""
        if self._profile is None:
            raise ValueError("no profile is running; start_profile begins one")
        profile, self._profile = self._profile, None
        profile.stop()
        path = self._directory / f"worker-{os.getpid()}-{int(time.time())}.json"
        profile.export_chrome_trace(str(path))
        return str(path)

    def abandon(self) -> None:
        """End a running profile without writing it (the process ends)."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

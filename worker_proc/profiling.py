"""start_profile / stop_profile: a trace of torch's profiler, to be opened in Perfetto or chrome://tracing."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from common.errors import RequestError

STEP_NAME = "quintet step "
"""A trace has one annotation of this name and the step's number for each step; ``bench/gpu_gaps.py`` reads them."""


class Profiler:
    """At most one profile at a time."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._directory = Path()

    def start(self, directory: str) -> str:
        """Begin recording; the trace will be written into ``directory``, which is made if it is missing.

        Raises:
            RequestError: 409 when a profile is running, 400 when the directory cannot be used.
        """
        from torch import profiler

        if self._profile is not None:
            words = f"a profile into {self._directory} is already running; stop_profile ends it"
            raise RequestError(words, status=409, code="profile_running")
        if not directory:
            raise RequestError("start_profile needs a directory to write the trace into", param="output_dir")
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            writable = os.access(directory, os.W_OK | os.X_OK)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise RequestError(f"{directory!r} cannot be used for the trace: {error}", param="output_dir") from None
        if not writable:
            raise RequestError(f"{directory!r} cannot be used for the trace: no right to write", param="output_dir")
        self._directory = Path(directory)
        activities = [profiler.ProfilerActivity.CPU]
        if profiler.ProfilerActivity.CUDA in profiler.supported_activities():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profile = profiler.profile(activities=activities)
        self._profile.start()
        return f"profiling into {self._directory}"

    def step(self, number: int) -> AbstractContextManager[Any]:
        """Around a step: marks it in the trace, if one is recorded."""
        if self._profile is None:
            return nullcontext()
        from torch.profiler import record_function

        marked: AbstractContextManager[Any] = record_function(f"{STEP_NAME}{number}")
        return marked

    def stop(self) -> str:
        """End recording, write ``worker-<pid>-<time>.json`` and name it. ``RequestError`` 409 if none is running."""
        if self._profile is None:
            raise RequestError("no profile is running; start_profile begins one", status=409, code="no_profile")
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

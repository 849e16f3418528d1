"""One child process: how it is started, what its heartbeats said, how often it has died."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ServerConfig
from common.messages import Heartbeat
from common.process import HEARTBEAT_S, PARENT_PID_VARIABLE

PACKAGES = {
    "worker": "worker_proc",
    "scheduler": "scheduler_proc",
    "tokenizer": "tokenizer_proc",
    "detokenizer": "detokenizer_proc",
    "gateway": "gateway",
}
"""Role -> package, in the order of starting."""
LATE_S = 2 * HEARTBEAT_S
"""Silent for longer than this, a process is looked at."""
STOP_ORDER = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
RESTART_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 8.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Spec:
    """Which process: role and index."""

    role: str
    index: int

    @property
    def name(self) -> str:
        """``worker-0``"""
        return f"{self.role}-{self.index}"


Command = Callable[[Spec, int], list[str]]
"""The argument list that starts a generation of a process."""


def fleet_of(config: ServerConfig) -> list[Spec]:
    """Every process of the configuration, in the order of starting."""
    num = {"worker": config.worker.tp_size, "tokenizer": config.http.tokenizers, "gateway": config.http.gateways}
    return [Spec(role, index) for role in PACKAGES for index in range(num.get(role, 1))]


def package_command(run_dir: Path) -> Command:
    """The real thing: ``python -m <package> --run-dir DIR --index I --generation G``.

    ``-P`` keeps the folder the user happens to be in off the children's import path.
    """

    def command(spec: Spec, generation: int) -> list[str]:
        arguments = ["--run-dir", str(run_dir), "--index", str(spec.index), "--generation", str(generation)]
        return [sys.executable, "-P", "-m", PACKAGES[spec.role], *arguments]

    return command


def child_environment(root: Path) -> dict[str, str]:
    """What children inherit: all but systemd's sockets, plus our code's folder and the parent's pid."""
    env = {key: value for key, value in os.environ.items() if key not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH", "")]))
    env[PARENT_PID_VARIABLE] = str(os.getpid())
    return env


class RestartHistory:
    """When a process died, and so how long to wait before the next start, or that it is enough.

    Counts deaths within ``RESTART_WINDOW_S`` and, whatever time they take, starts in a row that
    never became ready: a model that takes minutes to load must not be tried for ever.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deaths: list[float] = []
        self._failed_starts = 0

    @property
    def num_recent(self) -> int:
        """Deaths that count against the limit."""
        return max(len(self._deaths), self._failed_starts)

    def died(self, now: float, *, was_ready: bool) -> float | None:
        """Note a death; seconds to wait before the next start, or None when the limit is passed."""
        self._deaths = [at for at in self._deaths if now - at < RESTART_WINDOW_S] + [now]
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        if self.num_recent > self._limit:
            return None
        return 0.0 if self.num_recent == 1 else min(FIRST_BACKOFF_S * 2 ** (self.num_recent - 2), MAX_BACKOFF_S)

    def forgive(self) -> None:
        """Take the last death back: a request caused it, and that request has been dealt with."""
        if self._deaths:
            self._deaths.pop()


class Child:
    """A process of the fleet through all its generations. Owned by the supervisor's one thread."""

    def __init__(self, spec: Spec, max_restarts: int) -> None:
        self.spec = spec
        self.name = spec.name
        self.generation = -1
        self.history = RestartHistory(max_restarts)
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at: float | None = 0.0
        """When to start the next generation; None while one runs or none is wanted."""
        self.kill_at: float | None = None
        """After the stack dump of a hung process was asked for: when to kill it."""
        self._num_bad_before = 0
        self._num_bad = 0
        self._forget()

    def _forget(self) -> None:
        self.started_at = 0.0
        self.ready = False
        self.has_served = False
        """Was ready before: it may wait for another process now, but it does not load any more."""
        self.last_beat = 0.0
        self.progress = -1
        self.progress_at = 0.0
        """When ``progress`` last grew or the process last was idle."""
        self.busy = False
        self.detail = ""
        self.info: dict[str, Any] = {}
        self.doubted = False
        """It was looked at since its last heartbeat."""
        self.cpu_when_doubted = 0.0
        """CPU time used until the first such look, seconds."""
        self.felled = False
        """Killed because another rank of the same worker died."""

    @property
    def running(self) -> bool:
        """A process exists (perhaps already dead, not yet collected)."""
        return self.process is not None

    @property
    def pid(self) -> int:
        """Process id; 0 while none runs."""
        return self.process.pid if self.process is not None else 0

    @property
    def num_bad_frames(self) -> int:
        """What its inboxes refused, in all its generations."""
        return self._num_bad_before + self._num_bad

    def start(self, command: Command, env: dict[str, str], now: float) -> None:
        """Start the next generation in a session of its own. Raises OSError if it cannot be executed."""
        self.generation += 1
        self._num_bad_before, self._num_bad = self.num_bad_frames, 0
        self._forget()
        self.start_at, self.kill_at = None, None
        self.started_at = self.last_beat = self.progress_at = now
        libc = ctypes.CDLL(None)

        def before_exec() -> None:
            # In the child between fork and exec: from its first instruction on it dies with us.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        self.process = subprocess.Popen(
            command(self.spec, self.generation),
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=before_exec if sys.platform == "linux" else None,
        )

    def on_beat(self, beat: Heartbeat, now: float) -> None:
        """Note a heartbeat of this generation; others are ignored."""
        if beat.generation != self.generation or beat.pid != self.pid:
            return
        self.last_beat = now
        self.doubted = False
        self.busy = beat.busy_since > 0
        if beat.progress != self.progress or not self.busy:
            self.progress, self.progress_at = beat.progress, now
        self.ready = beat.ready
        self.has_served = self.has_served or beat.ready
        self._num_bad = beat.num_bad_frames
        self.detail = beat.detail
        if beat.info:
            self.info = beat.info

    def is_late(self, now: float) -> bool:
        """A heartbeat should have been here."""
        return now - self.last_beat > LATE_S

    def doubt(self, cpu_s: float) -> None:
        """It was looked at, and had used ``cpu_s`` seconds of CPU time."""
        if not self.doubted:
            self.doubted, self.cpu_when_doubted = True, cpu_s

    def excuse(self, seconds: float) -> None:
        """The supervisor itself slept this long: nothing it did not hear in that time counts."""
        self.last_beat += seconds
        self.progress_at += seconds
        self.started_at += seconds

    def collect(self) -> int | None:
        """The exit code (negative: signal) if the process has ended, once; its group is killed with it."""
        if self.process is None:
            return None
        code = self.process.poll()
        if code is None:
            return None
        self.kill_group()
        self.process = None
        self.ready = False
        return code

    def send_signal(self, number: int) -> None:
        """Signal the process alone, if it runs."""
        if self.process is not None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL the process and everything it started."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass


def explain_exit(code: int) -> str:
    """``killed by SIGKILL`` or ``exit code 3``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"

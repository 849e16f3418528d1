"""A server as a real process, as a user would start it: launch.py on a free port, watched by a test."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TITLE = re.compile(r"^quintet (\w+-\d+)\s*$")


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0, what: str = "condition") -> None:
    """Wait until ``condition()`` holds; fail the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)


class Server:
    """A running launch.py. Its run directory is in a folder of its own, so leftovers are seen."""

    def __init__(self, args: list[str], *, script: Path | None = None, env: dict[str, str] | None = None) -> None:
        """Start it; ``wait_ready`` waits. Port 0 (a free one) unless ``args`` name one."""
        self.folder = Path(tempfile.mkdtemp(prefix="qt-", dir="/tmp"))
        self._log_path = self.folder / "log"
        port = [] if "--port" in args else ["--port", "0"]
        environ = {**os.environ, "TMPDIR": str(self.folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environ.setdefault("OMP_NUM_THREADS", "1")
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script or ROOT / "launch.py"), *port, *args],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**environ, **(env or {})},
            )  # fmt: skip
        self.url = ""
        self._seen: set[tuple[int, float]] = set()

    # ------------------------------------------------------------------ what it says

    @property
    def log(self) -> str:
        """Everything printed and logged so far, by all of its processes."""
        return self._log_path.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return self.log.strip().splitlines()[-1]

    def wait_ready(self, timeout_s: float = 90.0) -> Server:
        """Wait for the ready line; sets ``url``. Fails with the log when the server ends first."""
        deadline = time.monotonic() + timeout_s
        while True:
            if found := re.search(r"^Ready on (http://\S+) after", self.log, re.MULTILINE):
                self.url = found.group(1)
                self.pids()
                return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not become ready (exit {self.process.poll()}):\n{self.log}")
            time.sleep(0.05)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def pages(self) -> int:
        """Pages of the KV pool, from the scheduler's log line."""
        found = re.search(r"worker ready: (\d+) pages", self.log)
        assert found is not None, self.log
        return int(found.group(1))

    # ------------------------------------------------------------------ its processes

    def pids(self) -> dict[str, int]:
        """Name (``worker-0``) -> pid of the processes that have taken their title."""
        found: dict[str, int] = {}
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return found
        for child in children:
            try:
                self._seen.add((child.pid, child.create_time()))
                title = " ".join(child.cmdline()).strip()
            except psutil.Error:
                continue
            if match := TITLE.match(title):
                found[match.group(1)] = child.pid
        return found

    def run_dir(self) -> Path:
        """The run directory; fails when there is not exactly one."""
        (found,) = self.folder.glob("quintet-*")
        return found

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Signal a process of the fleet by name; its pid."""
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def wait_replaced(self, name: str, old_pid: int, timeout_s: float = 60.0) -> None:
        """Wait until another process has taken the name."""
        eventually(lambda: self.pids().get(name, old_pid) != old_pid, timeout_s, f"a new {name}")

    def leftovers(self) -> list[str]:
        """Processes once seen that still run, and run directories that are still there."""
        alive = []
        for pid, created in self._seen:
            try:
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"process {pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return alive + [str(path) for path in self.folder.glob("quintet-*")]

    # ------------------------------------------------------------------ its end

    def send(self, number: int) -> None:
        """Signal launch.py itself."""
        self.pids()
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for launch.py to end; its exit code."""
        return self.process.wait(timeout_s)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Signal launch.py and wait for its end; its exit code."""
        self.send(number)
        return self.wait(timeout_s)

    def close(self) -> None:
        """End it whatever state it is in, and remove its folder."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        eventually(lambda: not self.leftovers(), 10, "everything of the server gone")
        shutil.rmtree(self.folder, ignore_errors=True)

"""A gateway as on another host: ``python -m gateway --engine ...`` over 127.0.0.1, watched by a test."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from common.errors import ConfigError
from launcher.ports import claim_port
from tests.integration.server import ROOT, eventually


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on.

    From below those that the kernel gives to whoever asks for any port (32768 on): the engine leaves them free for
    a moment when it is started again.
    """
    for _ in range(50):
        first = random.SystemRandom().randrange(20000, 32768 - count)
        try:
            for port in range(first, first + count):
                claim_port("127.0.0.1", port)
        except ConfigError:
            continue
        return first
    raise AssertionError("no free ports")


class RemoteGateway:
    """The process and its log. ``url`` is where it serves."""

    def __init__(self, engine: str, keys: Path, log: Path, *args: str) -> None:
        port = claim_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "gateway", "--engine", engine, "--curve-keys", str(keys), "--port", str(port)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *args], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=out,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return httpx.get(self.url + "/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> RemoteGateway:
        eventually(self.is_healthy, 40, "the gateway has joined")
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(20)

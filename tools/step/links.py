"""The worker that single-step mode drives: a fake one in this process, or the real process."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from common import config as config_file
from common.channels import Channels
from common.config import ServerConfig
from common.errors import ConfigError
from common.messages import ForwardBatch, Reset, ToScheduler, ToWorker
from launcher.children import Spec, child_environment, package_command
from launcher.run_dir import RunDir
from tools.simulate.worker import FakeWorker, WorkerShape

ROOT = Path(__file__).resolve().parents[2]
_SAMPLE_S = 0.02


class Link(Protocol):
    """What the engine needs of a worker."""

    name: str

    def send(self, order: ToWorker) -> None:
        """Give the worker an order."""
        ...

    def receive(self, wait_s: float) -> list[ToScheduler]:
        """What it answered; waits up to ``wait_s`` for the first answer."""
        ...

    def kill(self) -> None:
        """Let it die as with ``kill -9``, and start it again."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class FakeLink:
    """The simulator's worker. Its answers are there at once."""

    name = "fake worker"

    def __init__(self, shape: WorkerShape, output_len_of: Callable[[str], int]) -> None:
        self._shape, self._output_len_of = shape, output_len_of
        self._worker = FakeWorker(shape, output_len_of)
        self._generation = 0
        self._answers: deque[ToScheduler] = deque([self._worker.ready(0)])

    def send(self, order: ToWorker) -> None:
        """Execute it."""
        if isinstance(order, Reset):
            self._answers.append(self._worker.ready(order.epoch, self._generation))
        elif isinstance(order, ForwardBatch) and order.epoch == self._worker.epoch:
            result, load = self._worker.execute(order)
            cost_s = 0.005 + 60e-6 * load.prefill_tokens + 200e-6 * load.decode_rows
            self._answers.append(msgspec.structs.replace(result, forward_s=cost_s))

    def receive(self, wait_s: float) -> list[ToScheduler]:
        """The oldest answer."""
        return [self._answers.popleft()] if self._answers else []

    def kill(self) -> None:
        """A new worker that knows nothing; answers not yet read are lost."""
        self._generation += 1
        self._worker = FakeWorker(self._shape, self._output_len_of)
        self._answers = deque([self._worker.ready(0, self._generation)])

    def close(self) -> None:
        """Nothing to end."""


class ProcessLink:
    """The real worker process on its own channels, in a run directory of its own."""

    def __init__(self, config: ServerConfig, log: Path) -> None:
        self.name = f"worker process, {Path(config.model_dir).name}"
        self._config = config
        self._log = log
        self._run_dir = RunDir()
        path = self._run_dir.path / "config.json"
        path.touch(mode=0o600)
        path.write_bytes(config_file.save(config))
        self._channels = Channels(self._run_dir.path)
        self._inbox = self._channels.receiver("scheduler-work")
        self._sender = self._channels.sender("worker-0")
        self._generation = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = package_command(self._run_dir.path)(Spec("worker", 0), self._generation)
        with self._log.open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=child_environment(ROOT), cwd=ROOT)

    def send(self, order: ToWorker) -> None:
        """Through the channel; it is never full with so few steps in flight."""
        if not self._sender.send(order):
            raise ConfigError(f"the worker takes nothing any more; see {self._log}")

    def receive(self, wait_s: float) -> list[ToScheduler]:
        """What arrived. Raises ConfigError when the process ended by itself."""
        until = time.monotonic() + wait_s
        while True:
            answers: list[Any] = self._inbox.receive()
            if answers or time.monotonic() >= until:
                return answers
            if self._process.poll() is not None:
                raise ConfigError(f"the worker ended with code {self._process.returncode}; see {self._log}")
            self._inbox.wait(_SAMPLE_S)

    def kill(self) -> None:
        """``kill -9`` and a new generation."""
        self._process.kill()
        self._process.wait()
        self._generation += 1
        self._process = self._start()

    def close(self) -> None:
        """End the process and remove its run directory."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channels.close()
        self._run_dir.close()


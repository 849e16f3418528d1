"""Start and stop the servers the benchmarks compare: ours and its peers.

Each server is a process group of its own on a free loopback port; it is ended by signal to that
group, and its CPU time is read from the whole process tree (psutil).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ServerSpec:
    """How to start a server. ``{port}`` in the command is replaced by a free port."""

    name: str
    command: list[str]
    model: str
    """The name requests use for the model."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Running:
    """A server that answers on ``url``."""

    spec: ServerSpec
    url: str
    process: subprocess.Popen[bytes]
    ready_s: float

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds used so far, by process title (or name), over the whole tree."""
        out: dict[str, float] = {}
        for process in _tree(self.process.pid):
            try:
                times = process.cpu_times()
                title = " ".join(" ".join(process.cmdline()).split()) or process.name()
            except psutil.Error:
                continue
            key = title if title.startswith("quintet ") else process.name()
            out[key] = out.get(key, 0.0) + times.user + times.system
        return out


def quintet(*flags: str, model: str = "", name: str = "quintet") -> ServerSpec:
    """This checkout's server."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(root / "launch.py"), "--port", "{port}", "--served-model-name", "default"]
    if model:
        command += ["--model", model]
    return ServerSpec(name, [*command, *flags], "default")


def vllm_cpu(executable: str, model_dir: str, dtype: str = "bfloat16", flags: Sequence[str] = ()) -> ServerSpec:
    """vLLM for CPU serving a safetensors folder."""
    command = [executable, "serve", model_dir, "--dtype", dtype, "--max-model-len", "4096", "--port", "{port}"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    return ServerSpec("vllm-cpu", [*command, *flags, "--served-model-name", "default"], "default", env)


def llama_cpp(executable: str, gguf: str, flags: Sequence[str] = ()) -> ServerSpec:
    """llama.cpp's server with a unified KV cache."""
    command = [executable, "-m", gguf, "-t", "2", "-np", "32", "-c", "65536", "-kvu", "--port", "{port}"]
    return ServerSpec("llama.cpp", [*command, "--host", "127.0.0.1", *flags], "default")


@contextmanager
def serve(spec: ServerSpec, timeout_s: float = 300.0, log_path: str = os.devnull) -> Iterator[Running]:
    """Start a server, wait until ``/health`` answers 200, and end its process group afterwards.

    Raises TimeoutError when it is not ready in time, RuntimeError when it ends before.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # so that the server ends with a benchmark that is told to
    port = free_port()
    command = [part.replace("{port}", str(port)) for part in spec.command]
    start = time.monotonic()
    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **spec.env}, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_healthy(url, process, spec.name, start + timeout_s)
        yield Running(spec, url, process, time.monotonic() - start)
    finally:
        stop(process)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def stop(process: subprocess.Popen[bytes], grace_s: float = 30.0) -> None:
    """SIGTERM to the group's leader, SIGKILL to the whole group when it does not end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_healthy(url: str, process: subprocess.Popen[bytes], name: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with exit code {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url + "/health", timeout=2) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{name} was not ready in time")


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []

"""Processes of ours as children of a benchmark: start them one by one, wait for a gateway, read CPU time, end them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from bench.servers import free_port
from common import config as config_file
from common.config import HttpConfig, RuntimeConfig, ServerConfig

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60.0


def start(module: str, *arguments: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """``python -m module arguments``, with our packages on its import path."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, env=env, stdout=stdout)


def start_gateway(run_dir: Path, index: int = 0, num_gateways: int = 1) -> tuple[subprocess.Popen[bytes], int]:
    """A gateway on a port of its own, and the port. Writes ``run_dir/config.json``, which it reads as it starts."""
    port = free_port()
    http = HttpConfig(port=port, gateways=num_gateways)
    config = ServerConfig(http=http, runtime=RuntimeConfig(log_level="warning"))
    (run_dir / "config.json").write_bytes(config_file.save(config))
    return start("gateway", "--run-dir", str(run_dir), "--index", str(index)), port


async def get(port: int, path: str) -> bytes:
    """The whole answer to a GET, its headers included."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def wait_ready(port: int) -> None:
    """Wait until ``/health`` says ok. Raises RuntimeError after ``START_TIMEOUT_S``."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if b" 200 " in (await get(port, "/health")).split(b"\r\n", 1)[0]:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway on port {port} did not become ready within {START_TIMEOUT_S:g} s")


def cpu_s(*processes: subprocess.Popen[bytes]) -> float:
    """User and system time of the processes so far, all together."""
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))


def stop(*processes: subprocess.Popen[bytes]) -> None:
    """SIGTERM to one after the other, and wait for its end."""
    for process in processes:
        process.terminate()
        process.wait(10)

"""The gateway as a process: a busy port, several on one port, SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from bench.fake_engine import FakeEngine
from common import config as config_file
from common.config import HttpConfig, ModelConfig, ServerConfig
from common.process import EXIT_CONFIG, EXIT_OK
from tests.unit.gateway_live import CHAT, eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="qt-gw-") as folder:
        yield Path(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(run_dir: Path, stack: ExitStack, config: ServerConfig, index: int = 0) -> subprocess.Popen[str]:
    (run_dir / "config.json").write_bytes(config_file.save(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--run-dir", str(run_dir), "--index", str(index)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def test_busy_port_fails_at_once_and_names_it(run_dir: Path) -> None:
    with socket.socket() as taken, ExitStack() as stack:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(run_dir, stack, ServerConfig(http=HttpConfig(port=port)))
        _, words = process.communicate(timeout=30)
    assert process.returncode == EXIT_CONFIG
    assert f"127.0.0.1:{port}" in words and "in use" in words
    assert "Traceback" not in words


def test_unknown_tool_parser_ends_the_start(run_dir: Path) -> None:
    with ExitStack() as stack:
        config = ServerConfig(model=ModelConfig(tool_call_parser="nope"), http=HttpConfig(port=free_port()))
        process = start(run_dir, stack, config)
        _, words = process.communicate(timeout=30)
    assert process.returncode == EXIT_CONFIG
    assert "nope" in words


def test_two_gateways_serve_one_port_and_sigterm_ends_each_with_0(run_dir: Path) -> None:
    port = free_port()
    config = ServerConfig(http=HttpConfig(port=port, gateways=2))
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        engine = stack.enter_context(FakeEngine(run_dir))
        processes = [start(run_dir, stack, config, index) for index in range(2)]
        eventually(lambda: len({lease.gateway for lease in engine.leases}) == 2, "both gateways lease", 30)
        seen: set[str] = set()

        def both() -> bool:
            response = httpx.post(f"{url}/v1/chat/completions", json={"messages": CHAT}, trust_env=False)
            if response.status_code == 200:
                seen.add(engine.generates[-1].gateway)
            return seen == {"gateway-0", "gateway-1"}

        eventually(both, "the kernel spreads connections over both", 30)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            _, words = process.communicate(timeout=20)
            assert process.returncode == EXIT_OK, words
        assert {lease.gateway for lease in engine.leases if lease.closing} == {"gateway-0", "gateway-1"}

"""Fixtures for tests with real processes: ``tiny_folder`` (a model) and ``server`` (starts launch.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.server import Server
from tests.integration.tiny_folder import make_tiny_folder

CPU_ARGS = ["--dtype", "float32", "--max-total-tokens", "8192", "--device", "cpu", "--cpu-threads", "1"]
"""What keeps a test server small, and its arithmetic the same everywhere."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random Llama, made once per run."""
    return make_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(tiny_folder: Path) -> Iterator[Callable[..., Server]]:
    """``server(*args, model=..., env=..., wait=True)`` starts launch.py on a free port; all end with the test."""
    started: list[Server] = []

    def start(
        *args: str, model: Path | str | None = None, env: dict[str, str] | None = None, wait: bool = True
    ) -> Server:
        where = [] if model == "" else ["--model", str(model or tiny_folder)]
        new = Server([*where, *CPU_ARGS, *args], env=env)
        started.append(new)
        return new.wait_ready() if wait else new

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def shared_server(tiny_folder: Path) -> Iterator[Server]:
    """One plain server for every test of a module that does no harm to it."""
    one = Server(["--model", str(tiny_folder), *CPU_ARGS])
    try:
        yield one.wait_ready()
    finally:
        one.close()


@pytest.fixture(scope="session")
def session_server(tiny_folder: Path) -> Iterator[Server]:
    """One server for all the modules that leave no trace in it."""
    one = Server(["--model", str(tiny_folder), "--served-model-name", "tiny", *CPU_ARGS])
    try:
        yield one.wait_ready()
    finally:
        one.close()

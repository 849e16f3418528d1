"""Servers for the cells, and the table of what was measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import table
from tests.faults.faults import START_S
from tests.faults.folder import make_long_folder
from tests.faults.scene import SERVER_ARGS, undisturbed
from tests.faults.streams import Reply
from tests.integration.server import Server

WHOLE = os.environ.get("QUINTET_FAULTS") == "all"
"""``make faults``: the whole matrix and the long soak, and the table is written."""


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, made once per run."""
    return make_long_folder(tmp_path_factory.mktemp("models") / "tiny")


class Fleet:
    """The servers of the cells, by key: one is used at a time, and one more may be starting meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str, Server] = {}

    def get(self, key: str, then: str = "") -> Server:
        """The server of that key, ready; those of other keys end. ``then``: the key that will be asked for next,
        whose server begins to start."""
        for old in [name for name in self._servers if name not in (key, then)]:
            self._servers.pop(old).close()
        for name in filter(None, (key, then)):
            if name not in self._servers:
                self._servers[name] = Server(["--model", str(self._folder), *SERVER_ARGS])
        server = self._servers[key]
        return server if server.url else server.wait_ready(START_S)

    def close(self) -> None:
        """End all."""
        for server in self._servers.values():
            server.close()


@pytest.fixture(scope="session")
def fleet(long_folder: Path) -> Iterator[Fleet]:
    """The servers of this run."""
    servers = Fleet(long_folder)
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def expected() -> dict[str, Reply]:
    """Phase -> the undisturbed reply; filled by the first cell's server, the same for all of them."""
    return {}


@pytest.fixture(scope="session")
def reference(expected: dict[str, Reply]) -> Callable[[Server], dict[str, Reply]]:
    """``reference(server)``: the undisturbed replies."""

    def get(server: Server) -> dict[str, Reply]:
        if not expected:
            expected.update(undisturbed(server))
        return expected

    return get


@pytest.fixture(scope="session")
def measured() -> Iterator[dict[tuple[str, str], table.Row]]:
    """(role, fault) -> what was measured; printed at the end, and written into the docs where the matrix was whole."""
    found: dict[tuple[str, str], table.Row] = {}
    yield found
    table.report(found, write=WHOLE)

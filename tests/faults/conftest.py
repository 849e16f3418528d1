"""Servers for the cells, and the table of what was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import table
from tests.faults.scene import SERVER_ARGS, undisturbed
from tests.faults.streams import Reply
from tests.integration.server import Server
from tests.integration.tiny_folder import make_tiny_folder

WHOLE = os.environ.get("QUINTET_FAULTS") == "all"
"""``make faults``: the whole matrix and the long soak, and the table is written."""
CONTEXT_LEN = 32768


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random Llama with a context in which a prompt takes a while. Its weights do not depend on positions."""
    folder = make_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_LEN}))
    return folder


@pytest.fixture(scope="session")
def fleet(long_folder: Path) -> Iterator[Callable[[str], Server]]:
    """``fleet(key)``: the server of that key, started when it is first asked for; the one before ends."""
    running: dict[str, Server] = {}

    def get(key: str) -> Server:
        if key not in running:
            for old in list(running):
                running.pop(old).close()
            running[key] = Server(["--model", str(long_folder), *SERVER_ARGS]).wait_ready()
        return running[key]

    yield get
    for server in running.values():
        server.close()


@pytest.fixture(scope="session")
def expected() -> dict[str, Reply]:
    """Phase -> the undisturbed reply; filled by the first cell's server, the same for all of them."""
    return {}


@pytest.fixture(scope="session")
def reference(fleet: Callable[[str], Server], expected: dict[str, Reply]) -> Callable[[Server], dict[str, Reply]]:
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

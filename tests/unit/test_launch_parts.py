"""Run directory, port, start-up screen and systemd socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest

from common.config import ServerConfig
from common.errors import ConfigError
from common.flags import build
from common.notify import Notifier
from launcher import screen
from launcher.ports import claim_port, url_host
from launcher.run_dir import RunDir, sweep


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


def test_run_dir_is_private_and_removed(short: Path) -> None:
    run_dir = RunDir(short)
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.close()
    assert list(short.iterdir()) == []


def test_a_dead_servers_folder_is_swept_and_a_live_ones_is_not(short: Path) -> None:
    dead = short / "quintet-dead"
    dead.mkdir()
    (dead / "supervisor.pid").write_text("1")
    being_made = short / "quintet-new"
    being_made.mkdir()
    (short / "quintet-notes.txt").write_text("a user's")
    alive = RunDir(short)
    assert sorted(path.name for path in short.iterdir()) == sorted(
        [alive.path.name, "quintet-new", "quintet-notes.txt"]
    )
    assert sweep(short) == []
    alive.close()


def test_a_path_too_long_for_sockets_is_refused(short: Path) -> None:
    deep = short / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        RunDir(deep)
    assert list(deep.iterdir()) == []


def test_port_zero_gives_a_free_port_and_a_taken_one_is_refused() -> None:
    port = claim_port("127.0.0.1", 0)
    assert port > 0 and claim_port("127.0.0.1", port) == port
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"):
            claim_port("127.0.0.1", port)


def test_a_listener_that_shares_its_port_still_refuses_a_second_server() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ConfigError, match="in use"):
            claim_port("127.0.0.1", sock.getsockname()[1])


def test_addresses_as_a_local_client_writes_them() -> None:
    assert [url_host(h) for h in ("0.0.0.0", "::", "::1", "10.0.0.1")] == ["127.0.0.1", "[::1]", "[::1]", "10.0.0.1"]


def served(folder: Path, **values: object) -> ServerConfig:
    config = build({"served_model_name": ["it's"], "port": 8000, **values})
    return msgspec.structs.replace(config, model_dir=str(folder))


def test_curl_line_fits_the_model(tmp_path: Path) -> None:
    line = screen.curl_line(served(tmp_path))
    assert "http://127.0.0.1:8000/v1/completions" in line and "'\\''" in line and "Authorization" not in line
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert "/v1/chat/completions" in screen.curl_line(served(tmp_path))
    with_key = screen.curl_line(served(tmp_path, api_key=["secret"]))
    assert "Bearer YOUR_KEY" in with_key and "secret" not in with_key


def test_notifier_is_silent_without_systemd_and_survives_a_lost_socket(tmp_path: Path) -> None:
    Notifier({}).ready("x")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).stopping("x")


def test_the_ranks_of_a_worker_keep_one_generation(short: Path) -> None:
    """They find each other by it: one that was still waiting to start when another died keeps up."""
    from launcher.children import fleet_of
    from launcher.supervisor import Supervisor

    config = build({"tp_size": 3})
    supervisor = Supervisor(config, short, fleet_of(config), lambda spec, generation: [], short, 0.0)
    ranks = [child for child in supervisor._children if child.spec.role == "worker"]
    for child, generation in zip(ranks, (2, 1, 1), strict=True):
        child.generation = generation
    supervisor._on_death(ranks[0], 1, False, 0.0)
    assert [child.generation for child in ranks] == [2, 2, 2]
    assert all(child.generation < 2 for child in supervisor._children if child not in ranks)
    supervisor._channels.close()

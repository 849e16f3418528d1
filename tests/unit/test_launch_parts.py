"""Run directory, port, start-up screen and systemd socket."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import cast

import msgspec
import pytest

from common.config import ServerConfig
from common.errors import ConfigError
from common.flags import build
from common.notify import Notifier
from launcher import screen
from launcher.children import fleet_of
from launcher.ports import claim_port, url_host
from launcher.run_dir import RunDir, sweep
from launcher.signals import Signals
from launcher.supervisor import CALM_TURN_S, Supervisor


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


def test_a_watchdog_says_how_often_it_must_be_pinged() -> None:
    assert Notifier({"WATCHDOG_USEC": "400000"}).ping_every_s == 0.1, "twice in the interval at which it sends"
    assert Notifier({}).ping_every_s == float("inf")


class _Sleeps:
    """Stands for signals: notes how long it was to sleep."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.asked.append(timeout_s)
        return False


def supervisor_of(config: ServerConfig, folder: Path, signals: _Sleeps | None = None) -> Supervisor:
    fleet = fleet_of(config)
    return Supervisor(config, folder, fleet, lambda *_: [], folder, 0.0, cast("Signals", signals or _Sleeps()))


def test_it_sleeps_until_a_signal_only_while_all_serve(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.supervisor.TURN_S", 0.0)
    sleeps = _Sleeps()
    supervisor = supervisor_of(ServerConfig(), short, sleeps)
    now = time.monotonic()
    for child in supervisor._children:
        child.ready, child.last_beat = True, now

    def asked() -> list[float]:
        sleeps.asked.clear()
        supervisor._wake()
        return sleeps.asked

    assert asked() == [CALM_TURN_S]
    child = supervisor._children[2]
    for name, value in (("ready", False), ("kill_at", now), ("last_beat", now - 5.0)):
        before = getattr(child, name)
        setattr(child, name, value)
        assert asked() == [], name
        setattr(child, name, before)
    assert asked() == [CALM_TURN_S]
    supervisor._draining = True
    assert asked() == []
    supervisor._channels.close()


def test_a_childs_death_ends_a_sleep() -> None:
    signals = Signals()
    try:
        child = subprocess.Popen(["true"])
        assert signals.wait(30.0)
        assert child.wait() == 0
    finally:
        signals.close()


def test_a_signal_that_came_before_the_sleep_ends_it_once() -> None:
    signals = Signals()
    came: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: came.append(number))
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert came == [signal.SIGUSR2]
        assert signals.wait(30.0)
        assert not signals.wait(0.0)
    finally:
        signal.signal(signal.SIGUSR2, before)
        signals.close()
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


def test_the_ranks_of_a_worker_keep_one_generation(short: Path) -> None:
    """They find each other by it: one that was still waiting to start when another died keeps up."""
    supervisor = supervisor_of(build({"tp_size": 3}), short)
    ranks = [child for child in supervisor._children if child.spec.role == "worker"]
    for child, generation in zip(ranks, (2, 1, 1), strict=True):
        child.generation = generation
    supervisor._on_death(ranks[0], 1, False, 0.0)
    assert [child.generation for child in ranks] == [2, 2, 2]
    assert all(child.generation < 2 for child in supervisor._children if child not in ranks)
    supervisor._channels.close()

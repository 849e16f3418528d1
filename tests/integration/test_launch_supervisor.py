"""The supervisor with processes that do nothing: starting, watching, replacing, ending."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.server import Server, eventually

pytestmark = pytest.mark.integration
FAKES = Path(__file__).parent / "fakes" / "launch_fakes.py"
ROLES = {"worker-0", "scheduler-0", "tokenizer-0", "detokenizer-0", "gateway-0"}
Start = Callable[..., Server]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Start]:
    """Start a fleet of fakes with a mode per process and generation."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    started: list[Server] = []

    def start(*args: str, env: dict[str, str] | None = None, **modes: list[str]) -> Server:
        by_name = {f"{role}-0": values for role, values in modes.items()}
        environ = {"FAKE_MODES": json.dumps(by_name), **(env or {})}
        new = Server(["--model", str(tmp_path), "--load-format", "dummy", *args], script=FAKES, env=environ)
        started.append(new)
        return new

    yield start
    for one in started:
        one.close()


def fleets_sent(server: Server) -> list[dict[str, object]]:
    path = server.run_dir() / "fleet.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_and_leaves_nothing(fleet: Start, number: int) -> None:
    server = fleet().wait_ready()
    assert set(server.pids()) == ROLES
    assert server.run_dir().stat().st_mode & 0o777 == 0o700
    assert (server.run_dir() / "config.json").stat().st_mode & 0o777 == 0o600
    assert server.stop(number) == 0
    assert server.leftovers() == []


def test_kill_of_the_supervisor_takes_the_children_and_the_folder_with_it(fleet: Start) -> None:
    server = fleet().wait_ready()
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    eventually(lambda: not server.leftovers(), 10, "nothing left")


def test_a_killed_child_is_replaced_and_the_scheduler_told(fleet: Start) -> None:
    server = fleet().wait_ready()
    server.wait_replaced("tokenizer-0", server.kill("tokenizer-0"))
    eventually(lambda: fleets_sent(server)[-1]["generations"]["tokenizer-0"] == 1, what="the new generation told")
    server.wait_replaced("scheduler-0", server.kill("scheduler-0"))
    expected = {"worker-0": 0, "scheduler-0": 1, "tokenizer-0": 1, "detokenizer-0": 0, "gateway-0": 0}
    eventually(lambda: fleets_sent(server)[-1]["generations"] == expected, what="the new scheduler told")
    assert server.stop() == 0


def test_the_ranks_of_a_worker_are_replaced_together(fleet: Start) -> None:
    server = fleet("--tp-size", "2", "--max-restarts", "1").wait_ready()
    other = server.pids()["worker-0"]
    server.wait_replaced("worker-1", server.kill("worker-1"))
    server.wait_replaced("worker-0", other)
    eventually(lambda: fleets_sent(server)[-1]["generations"]["worker-0"] == 1, what="both told")
    assert fleets_sent(server)[-1]["generations"]["worker-1"] == 1
    assert server.log.count("worker-1 started") == 2, "one death, one restart: felling the other fells nobody else"


def test_a_child_that_always_ends_stops_the_server_with_the_reason_last(fleet: Start) -> None:
    server = fleet("--max-restarts", "2", worker=["exit:3"])
    assert server.wait() == 1
    assert "worker-0 ended 3 times" in server.last_line and "exit code 3" in server.last_line
    assert server.leftovers() == []


def test_a_wrong_configuration_is_not_tried_again(fleet: Start) -> None:
    server = fleet(scheduler=["config"])
    assert server.wait() == 2
    assert "scheduler-0: the model has 7 heads and that cannot be" in server.last_line
    assert server.log.count("scheduler-0 started") == 1
    assert server.leftovers() == []


def test_a_process_that_is_never_ready_ends_the_start(fleet: Start) -> None:
    server = fleet("--start-timeout-s", "2", detokenizer=["never_ready"])
    assert server.wait() == 1
    assert "detokenizer-0: not ready" in server.last_line and "--start-timeout-s" in server.last_line


def test_a_stopped_process_is_killed_and_replaced(fleet: Start) -> None:
    server = fleet("--hang-timeout-s", "2").wait_ready()
    server.wait_replaced("detokenizer-0", server.kill("detokenizer-0", signal.SIGSTOP))
    assert "detokenizer-0 is hung: stopped and silent" in server.log


def test_busy_without_progress_is_hung_and_its_stacks_are_shown(fleet: Start) -> None:
    server = fleet("--hang-timeout-s", "1.5", worker=["stuck", "ok"]).wait_ready()
    eventually(lambda: "worker-0 is hung: busy without progress" in server.log, what="the hang seen")
    eventually(lambda: "generation 1" in server.log, what="the replacement")
    assert "role.py" in server.log and "most recent call first" in server.log


def test_json_logs_are_an_object_a_line(fleet: Start) -> None:
    server = fleet("--log-format", "json", scheduler=["config"])
    assert server.wait() == 2
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert {line["process"] for line in lines} == {"launch", "scheduler-0"}
    assert lines[-1]["level"] == "error" and "7 heads" in lines[-1]["message"]
    assert set(lines[-1]) == {"time", "level", "process", "logger", "message"}


def test_the_drain_waits_for_gateways_and_has_an_end(fleet: Start) -> None:
    server = fleet(gateway=["drain:1"]).wait_ready()
    assert server.stop() == 0
    assert "the drain time is over" not in server.log
    server = fleet("--drain-seconds", "0.3", gateway=["drain:3"]).wait_ready()
    assert server.stop() == 0
    assert "the drain time is over" in server.log


def test_the_scheduler_is_told_of_the_drain(fleet: Start) -> None:
    server = fleet(gateway=["drain:3"]).wait_ready()
    server.send(signal.SIGTERM)
    eventually(lambda: any(fleet["draining"] for fleet in fleets_sent(server)), what="draining told")
    assert server.wait() == 0


def test_who_ignores_sigterm_is_killed(fleet: Start) -> None:
    server = fleet(worker=["ignore_term"]).wait_ready()
    assert server.stop() == 0
    assert "worker-0 did not end" in server.log
    assert server.leftovers() == []


def test_systemd_is_told_of_ready_watchdog_and_stopping(fleet: Start) -> None:
    with tempfile.TemporaryDirectory(prefix="qt-", dir="/tmp") as folder:
        path = f"{folder}/notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(path)
            sock.settimeout(30)
            server = fleet(env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"}).wait_ready()
            received = ""
            while "READY=1" not in received or not received.endswith("WATCHDOG=1"):
                received += sock.recv(4096).decode()
            assert server.stop() == 0
            sock.setblocking(False)
            try:
                while True:
                    received += sock.recv(4096).decode()
            except BlockingIOError:
                pass
    assert "READY=1\nSTATUS=serving" in received and "STOPPING=1" in received


def test_a_busy_port_is_refused_at_once(fleet: Start) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        server = fleet("--port", str(sock.getsockname()[1]))
        assert server.wait() == 2
    assert f"is in use by process {os.getpid()}" in server.last_line
    assert "started" not in server.log and server.leftovers() == []


@pytest.mark.parametrize("args", [["--no-such-flag"], ["--dtype", "int3"], ["--model", "/no/such/folder"]])
def test_wrong_flags_end_with_code_2(fleet: Start, args: list[str]) -> None:
    server = fleet(*args)
    assert server.wait() == 2
    assert args[-1] in server.log


def test_a_config_file_sets_what_flags_do_not(fleet: Start, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("tokenizers: 2\ndrain-seconds: 1\nlog_level: warning\n")
    server = fleet("--config", str(file), "--log-level", "info").wait_ready()
    assert set(server.pids()) == ROLES | {"tokenizer-1"}
    config = json.loads((server.run_dir() / "config.json").read_text())
    assert config["runtime"]["drain_seconds"] == 1.0 and config["runtime"]["log_level"] == "info"

"""What is done to a process, and what must be true of the server afterwards."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import threading
import time
from typing import Any

import psutil

from tests.faults.streams import connect, server_info
from tests.integration.server import Server, eventually

START_S = 300.0
"""Like the next: more than it takes even on a machine that has much else to do."""
BACK_S = 240.0
IDLE_S = 60.0
NUM_PRESSED = 8
_WORDS = "Grüße aus Köln. "
PACKAGES = {
    "gateway": "gateway",
    "tokenizer": "tokenizer_proc",
    "scheduler": "scheduler_proc",
    "worker": "worker_proc",
    "detokenizer": "detokenizer_proc",
}


class Fault:
    """``strike`` does it; ``recover`` waits until the server is whole again, or fails."""

    def __init__(self, server: Server, role: str) -> None:
        self.server = server
        self.role = role
        self.name = f"{role}-0"
        self.pid = 0
        self.note = ""
        """For the table."""

    def strike(self) -> None:
        """Do it. Returns at once."""
        raise NotImplementedError

    def recover(self) -> None:
        """Another process has taken the place, and nothing of what the dead one held is left."""
        self.server.wait_replaced(self.name, self.pid, BACK_S)
        check_whole(self.server)


class Kill(Fault):
    """kill -9."""

    def strike(self) -> None:
        self.pid = self.server.kill(self.name, signal.SIGKILL)


class Stop(Fault):
    """SIGSTOP: it lives, and does nothing. The supervisor has to find out."""

    def strike(self) -> None:
        self.pid = self.server.kill(self.name, signal.SIGSTOP)

    def recover(self) -> None:
        super().recover()
        assert f"{self.name} is hung" in self.server.log


class NoMemory(Fault):
    """Neither address space nor data may grow: the next allocation that needs a page of the kernel's fails.

    A process that lives on what it has is not harmed, so requests follow that make every process allocate. One that
    gets through all of it gets its limit back.
    """

    def strike(self) -> None:
        self.pid = self.server.pids()[self.name]
        self._limit(1)
        self._pressing = [threading.Thread(target=self._press, args=(n,), daemon=True) for n in range(NUM_PRESSED)]
        for thread in self._pressing:
            thread.start()

    def _limit(self, soft: int) -> None:
        # The second for what the first does not count: heaps of threads, whose addresses are taken in advance.
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            resource.prlimit(self.pid, kind, (soft, resource.RLIM_INFINITY))

    def _press(self, number: int) -> None:
        """How these requests end is not looked at."""
        body = (
            {"prompt": "x" * (15 << 20), "max_tokens": -1},  # large, and refused: the gateway's
            {"prompt": f"{number} " + _WORDS * 50_000, "max_tokens": 5},  # too long: the tokenizer's to refuse
            {"prompt": f"{number} " + _WORDS * 600, "max_tokens": 5, "echo": True, "logprobs": 20},
            {"prompt": f"{number}", "json_schema": {"enum": [f"{number} {word:06d}" for word in range(3000)]}},
        )[number % 4]
        gateway = self.name if self.role == "gateway" else "gateway-1"
        try:
            connection = connect(self.server.url, gateway)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().read()
        except (AssertionError, OSError, http.client.HTTPException, ValueError):
            pass

    def recover(self) -> None:
        for thread in self._pressing:
            thread.join(BACK_S)
        try:
            self._limit(resource.RLIM_INFINITY)
        except ProcessLookupError:
            super().recover()
            return
        self.note = "lived on what it had"
        check_whole(self.server)


class ExitAtStart(Fault):
    """kill -9, and the process that takes its place ends before it is ready, too."""

    def strike(self) -> None:
        known = {child.pid for child in self._starts()}
        self.pid = self.server.kill(self.name, signal.SIGKILL)
        threading.Thread(target=self._end_next, args=(known,), daemon=True).start()
        self.struck = threading.Event()

    def _starts(self) -> list[psutil.Process]:
        """Processes of the role that have not taken their title, which is the first thing they do once imported."""
        found = []
        for child in psutil.Process(self.server.process.pid).children():
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if PACKAGES[self.role] in line and "--index" in line and line[line.index("--index") + 1] == "0":
                found.append(child)
        return found

    def _end_next(self, known: set[int]) -> None:
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            for child in self._starts():
                if child.pid not in known:
                    child.terminate()
                    self.struck.set()
                    return
            time.sleep(0.002)

    def recover(self) -> None:
        assert self.struck.wait(BACK_S), f"no second {self.name} was seen starting"
        super().recover()
        assert self.server.log.count(f"{self.name} ended (killed by SIGTERM)") >= 1


class ExitAtShutdown(Fault):
    """The server was asked to stop and lets what runs finish; meanwhile the process ends, in its own way (SIGTERM)."""

    def strike(self) -> None:
        self.server.send(signal.SIGTERM)
        eventually(lambda: "draining:" in self.server.log, IDLE_S, "the drain begins")
        self.pid = self.server.kill(self.name, signal.SIGTERM)

    def recover(self) -> None:
        assert self.server.wait(BACK_S) == 0, self.server.last_line
        assert not self.server.leftovers()


FAULTS = {"kill": Kill, "stop": Stop, "memory": NoMemory, "start-up": ExitAtStart, "shutdown": ExitAtShutdown}


def engine_state(server: Server) -> dict[str, Any] | None:
    """The scheduler's metrics at this moment; None while the engine does not answer."""
    try:
        connection = connect(server.url)
        try:
            connection.request("GET", "/health")
            health = connection.getresponse()
            health.read()
            if health.status != 200:
                return None
            found: dict[str, Any] = server_info(connection)["scheduler"]["metrics"]
            return found
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, KeyError, ValueError):
        return None


def check_whole(server: Server) -> None:
    """Idle and ready, every page free or in the cache, every request ended once, no bookkeeping found wrong. Waits
    for the first two."""

    state: dict[str, Any] = {}

    def idle() -> bool:
        state.update(engine_state(server) or {"num_running_reqs": -1})
        return bool(state["num_running_reqs"] == 0 and state["num_queue_reqs"] == 0)

    eventually(idle, BACK_S, "ready and idle again")
    assert state["num_used_tokens"] == 0, f"pages are held with nothing running: {state}"
    assert state["num_invariant_failures_total"] == 0, server.log
    ended = sum(count for name, count in state.items() if name.startswith("num_finished_requests_total_"))
    assert state["num_requests_total"] == ended, f"{state['num_requests_total']} requests and {ended} endings: {state}"
    total = server.pages()
    cached = state["num_cached_tokens"] // 16
    assert state["num_free_pages"] + cached == total, f"{state['num_free_pages']} free + {cached} cached of {total}"

"""The soak: mixed traffic, floods, aborts, bad requests and kills, and a server that is the same afterwards.

    python -m tests.faults.soak --seconds 1800

The first half kills a process every so often; the second, which begins when all are back, does not, so that memory
can be judged over it. Ends with exit code 0 and a report, or with 1 and everything that was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.cells import ROLES
from tests.faults.faults import START_S, check_whole, engine_state
from tests.faults.folder import make_long_folder
from tests.faults.streams import Reply, Stream, connect
from tests.faults.traffic import KNOWN, Traffic
from tests.faults.watch import Watch, open_files
from tests.integration.server import Server, eventually

SERVER_ARGS = [
    "--device", "cpu", "--cpu-threads", "1", "--dtype", "auto", "--max-total-tokens", "8192", "--gateways", "2",
    "--max-running-requests", "8", "--max-queued-requests", "24", "--hang-timeout-s", "4", "--max-restarts", "1000",
]  # fmt: skip
"""A pool that the running requests can fill, and a queue that a flood can."""
NUM_CLIENTS = 6
MOST_BROKEN = 20
FILES_SLACK = 2
THREADS_SLACK = 4 + (os.cpu_count() or 1)
"""Pools of helper threads fill as they are needed, up to a size that may be that of the machine."""
END_S = 240.0
"""Until everything is back and every answer there, on a busy machine."""
BACK_OFF_S = 0.25


@dataclass
class Soak:
    """One run. ``run`` returns the report's lines and what was wrong."""

    server: Server
    seconds: float
    seed: int = 1
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    """Names, in order."""
    _gateway_back: float = 0.0
    """time.monotonic() at which a gateway's successor was there; infinity while one is being killed or stopped."""
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> tuple[list[str], list[str]]:
        """The report and the faults found; none: all is well."""
        answers = {name: self._answer(body) for name, body in KNOWN.items()}
        check_whole(self.server)
        files = open_files(self.server)
        watch = Watch(self.server, max(0.25, self.seconds / 1200))
        watch.start()
        began = time.monotonic()
        clients = [threading.Thread(target=self._client, args=(n, answers), daemon=True) for n in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        self._kill_until(began + self.seconds / 2)
        quiet_from = time.monotonic()
        time.sleep(self.seconds / 2)
        self._over.set()
        for client in clients:
            client.join(END_S)
        watch.stop()
        if hung := sum(client.is_alive() for client in clients):
            self.broken.append(f"{hung} clients still wait for an answer")
        return self._judge(watch, quiet_from, files)

    def _answer(self, body: dict[str, object]) -> Reply:
        stream = Stream(self.server.url, "", body)
        stream.start()
        stream.join()
        return stream.reply()

    def _client(self, number: int, answers: dict[str, Reply]) -> None:
        traffic = Traffic(self.server.url, 1000 * self.seed + number, answers, self._gateway_died)
        while not self._over.is_set() and len(self.broken) < MOST_BROKEN:
            try:
                name, how = traffic.act()
                self.outcomes[name, how] += 1
                if how == "refused":
                    self._over.wait(BACK_OFF_S)
            except AssertionError as error:
                self.broken.append(str(error))

    def _gateway_died(self, since: float) -> bool:
        return self._gateway_back >= since

    def _kill_until(self, until: float) -> None:
        """kill -9, now and then SIGSTOP, of a process that is there; the next when the last is back."""
        chosen = random.Random(self.seed)
        pause_s = min(15.0, max(1.0, self.seconds / 60))
        while time.monotonic() + pause_s < until:
            time.sleep(pause_s * chosen.uniform(0.5, 1.5))
            name = f"{chosen.choice(ROLES)}-0"
            pid = self.server.pids().get(name)
            if pid is None:
                continue
            self.kills.append(name)
            is_gateway = name.startswith("gateway")
            self._gateway_back = float("inf") if is_gateway else self._gateway_back
            self.server.kill(name, signal.SIGSTOP if chosen.random() < 0.15 else signal.SIGKILL)
            self.server.wait_replaced(name, pid, END_S)
            self._gateway_back = time.monotonic() if is_gateway else self._gateway_back
            eventually(lambda: engine_state(self.server) is not None, END_S, f"ready after {name} died")

    def _judge(self, watch: Watch, quiet_from: float, files: dict[str, tuple[int, int]]) -> tuple[list[str], list[str]]:
        wrong = list(self.broken)
        try:
            check_whole(self.server)
            eventually(lambda: self._open_requests() == 0, END_S, "no gateway has an open request")
        except AssertionError as error:
            wrong.append(str(error))
        lines, growing = watch.judge(quiet_from)
        wrong += [f"memory grows: {line}" for line in growing]
        now = open_files(self.server)
        for name, (fds, threads) in sorted(files.items()):
            after = now[name]
            lines.append(f"{name}: {fds} files, {threads} threads at the start; {after[0]} and {after[1]} at the end")
            if after[0] > fds + FILES_SLACK or after[1] > threads + THREADS_SLACK:
                wrong.append(f"files or threads grow: {lines[-1]}")
        by_name = Counter(self.kills)
        lines.append("kills: " + ", ".join(f"{name} {n}" for name, n in sorted(by_name.items())))
        lines.append("requests: " + ", ".join(f"{a} {how} {n}" for (a, how), n in sorted(self.outcomes.items())))
        return lines, wrong

    def _open_requests(self) -> float:
        """Of all gateways together, from whichever answers."""
        connection = connect(self.server.url)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        lines = [line for line in text.splitlines() if line.startswith("quintet:gateway_open_requests{")]
        assert len(lines) == 2, lines
        return sum(float(line.split()[-1]) for line in lines)


def soak(folder: Path, seconds: float, seed: int = 1) -> tuple[list[str], list[str]]:
    """Start a server on the model in ``folder``, soak it, end it; (report, faults found)."""
    server = Server(["--model", str(folder), *SERVER_ARGS])
    try:
        return Soak(server.wait_ready(START_S), seconds, seed).run()
    finally:
        server.close()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long [1800]")
    parser.add_argument("--seed", type=int, default=1, help="of what clients and kills are drawn from [1]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qt-soak-") as folder:
        report, wrong = soak(make_long_folder(Path(folder) / "tiny"), args.seconds, args.seed)
    print("\n".join(report))
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

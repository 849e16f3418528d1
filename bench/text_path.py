"""What streaming text costs: processor time of gateway, tokenizer and detokenizer at a fixed rate of tokens.

    python -m bench.text_path [--streams 8 32 50] [--rate 500] [--drafts] [--cold] [--windows 6] [--seconds 5]
        [--model DIR]

The real gateway, tokenizer, detokenizer and scheduler run as processes; the worker has no model and gives
``--rate`` tokens per second, whatever the number of streams (``bench.paced_worker``; with ``--drafts`` rows of several
ids are among them, and what is said to be per token is per row). Clients read chat streams
over HTTP, from another process. Two workloads for each number of streams:

* long: the same streams all the time, so that nothing but tokens is handled
* short: streams of 128 tokens, each followed by the next request

Processor time is what the kernel counted for each thread (``schedstat``), ZeroMQ's included, as a share of one core
at the rate asked for: seconds per token, times ``--rate``. Other work on the machine makes it larger (caches), never
smaller, so the least of several windows is given beside their median. With ``--cold`` somebody uses the caches all the
time, as a worker with a model does (``bench/scheduler_cold.py``). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.children import get, start, wait_ready
from bench.scheduler_cold import busy_cores
from bench.servers import free_port
from common import config as config_file
from common.channels import Channels
from common.config import HttpConfig, ModelConfig, RuntimeConfig, ServerConfig
from worker_proc.prepare.resolve import resolve

TEXT_ROLES = ("gateway", "tokenizer", "detokenizer")
"""The processes that the figure is about; the scheduler is shown beside them."""
PACKAGES = {"gateway": "gateway", "tokenizer": "tokenizer_proc", "detokenizer": "detokenizer_proc",
            "scheduler": "scheduler_proc"}  # fmt: skip
WORKLOADS = {"long": 7000, "short": 128}
"""Tokens of a stream."""
QUESTION = "Write about the sea, and about the people who live by it."


class Meter:
    """Processor time and wake-ups of a process, all threads."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")

    def read(self) -> tuple[float, int]:
        """(seconds on a core, times a thread went to sleep) so far; of threads that live."""
        seconds, sleeps = 0.0, 0
        for task in self._tasks.iterdir():
            seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
            status = (task / "status").read_text()
            sleeps += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        return seconds, sleeps


@dataclass
class Clients:
    """Streams that are read all the time."""

    port: int
    max_tokens: int
    flowing: set[int] = field(default_factory=set)

    async def run(self, index: int) -> None:
        """One request after the other on one connection."""
        body = {
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True, "max_tokens": self.max_tokens, "ignore_eos": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            while True:
                writer.write(head.encode() + data)
                tail = b""
                while b"[DONE]" not in tail:
                    data_read = await reader.read(1 << 16)
                    if not data_read:
                        raise RuntimeError(f"stream {index} was cut off")
                    self.flowing.add(index)
                    tail = tail[-16:] + data_read
        finally:
            writer.close()


@contextmanager
def processes(model_dir: str, rate: float, drafts: bool) -> Iterator[tuple[int, dict[str, int]]]:
    """The engine with a paced worker; yields (port, pid by role)."""
    with tempfile.TemporaryDirectory(prefix="qt-bench-") as folder:
        port = free_port()
        config = ServerConfig(
            model_dir=model_dir, http=HttpConfig(port=port), runtime=RuntimeConfig(log_level="warning")
        )
        (Path(folder) / "config.json").write_bytes(config_file.save(config))
        channels = Channels(folder)
        channels.receiver("supervisor")  # where heartbeats go; nobody reads them
        options = ["--run-dir", folder, "--rate", str(rate)] + ["--drafts"] * drafts
        started = {"worker": start("bench.paced_worker", *options)}
        try:
            for role, package in PACKAGES.items():
                started[role] = start(package, "--run-dir", folder)
            yield port, {role: child.pid for role, child in started.items()}
        finally:
            for child in started.values():
                child.send_signal(signal.SIGKILL)
                child.wait()
            channels.close()


async def num_tokens(port: int) -> int:
    """Output tokens that the gateway has seen."""
    found = re.search(rb"quintet:gateway_output_tokens_total{[^}]*} (\S+)", await get(port, "/metrics"))
    if found is None:
        raise RuntimeError("/metrics has no quintet:gateway_output_tokens_total")
    return int(float(found[1]))


async def measure(
    port: int, pids: dict[str, int], streams: int, max_tokens: int, windows: int, seconds: float, rate: float
) -> dict[str, Any]:
    """Shares of a core by role, least and median over the windows, at ``rate`` tokens per second."""
    clients = Clients(port, max_tokens)
    tasks = [asyncio.ensure_future(clients.run(index)) for index in range(streams)]
    meters = {role: Meter(pids[role]) for role in PACKAGES}
    try:
        while len(clients.flowing) < streams:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        shares: dict[str, list[float]] = {role: [] for role in (*PACKAGES, "text")}
        sleeps: dict[str, list[float]] = {role: [] for role in PACKAGES}
        rates = []
        for _ in range(windows):
            started, tokens = time.monotonic(), await num_tokens(port)
            before = {role: meter.read() for role, meter in meters.items()}
            await asyncio.sleep(seconds)
            after = {role: meter.read() for role, meter in meters.items()}
            count, elapsed = await num_tokens(port) - tokens, time.monotonic() - started
            if any(task.done() for task in tasks):
                raise RuntimeError("a stream ended early")
            rates.append(count / elapsed)
            for role in PACKAGES:
                shares[role].append(rate * (after[role][0] - before[role][0]) / count)
                sleeps[role].append((after[role][1] - before[role][1]) / elapsed)
            shares["text"].append(sum(shares[role][-1] for role in TEXT_ROLES))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "streams": streams,
        "tokens_per_s": round(statistics.median(rates), 1),
        "core_share_least": {role: round(min(values), 4) for role, values in shares.items()},
        "core_share_median": {role: round(statistics.median(values), 4) for role, values in shares.items()},
        "sleeps_per_s": {role: round(statistics.median(values), 1) for role, values in sleeps.items()},
    }


def main() -> None:
    """Every number of streams and workload, one server for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32, 50], help="streams at once")
    parser.add_argument("--rate", type=float, default=500.0, help="tokens per second of all streams together")
    parser.add_argument("--drafts", action="store_true", help="rows give several ids now and then")
    parser.add_argument("--cold", action="store_true", help="while others use the caches")
    parser.add_argument("--windows", type=int, default=6, help="measurements of each workload")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--model", default="", help="whose tokenizer; as for launch.py")
    args = parser.parse_args()
    model_dir = str(resolve(ModelConfig(model=args.model)).folder)
    result: dict[str, Any] = {"benchmark": "text_path", "rate": args.rate, "cores": os.cpu_count()}
    for streams in args.streams:
        for name in args.workloads:
            with processes(model_dir, args.rate, args.drafts) as (port, pids):
                asyncio.run(wait_ready(port))
                with busy_cores() if args.cold else nullcontext():
                    measured = asyncio.run(
                        measure(port, pids, streams, WORKLOADS[name], args.windows, args.seconds, args.rate)
                    )
            result[f"{name}-{streams}"] = measured
            print(f"{name}, {streams} streams: {measured}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

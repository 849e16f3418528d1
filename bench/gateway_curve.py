"""Streamed tokens per second by number of gateways, behind one fake engine that answers as fast as it is asked.

    python -m bench.gateway_curve [--gateways 1 2 3 4] [--seconds 5] [--streams 32] [--repeats 3]

Each gateway is a process with a port of its own, so that streams are spread evenly, and has a process of clients that
count what arrives. The fake engine is one process. ``--streams`` are all streams together, whatever the number of
gateways. What engine and clients take of the cores is printed too: more gateways than the cores left over by them
cannot give more tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import children
from bench.gateway_overhead import stream_client

TOKENS_PER_SECOND = 400
"""Of one stream, for the length of a run: roughly what a core gives 32 streams."""


class Fleet:
    """A fake engine and its gateways, in one run directory."""

    def __init__(self, run_dir: Path, num_gateways: int) -> None:
        self.engine = children.start("bench.gateway_overhead", "--engine", str(run_dir), "0")
        self.ports: list[int] = []
        self.gateways: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(num_gateways):
                process, port = children.start_gateway(run_dir, index, num_gateways)
                self.gateways.append(process)
                self.ports.append(port)
                asyncio.run(children.wait_ready(port))  # it has read its own port: the next may be written
        except BaseException:
            self.stop()
            raise

    def cpu_s(self) -> tuple[float, float]:
        """User and system time so far: of the engine, and of all gateways."""
        return children.cpu_s(self.engine), children.cpu_s(*self.gateways)

    def stop(self) -> None:
        """End all of it."""
        children.stop(*self.gateways, self.engine)


async def clients(port: int, streams: int, tokens: int) -> dict[str, float]:
    """What a process of clients prints: tokens read, and when it began and ended (time.time())."""
    began, cpu = time.time(), time.process_time()
    counts = await asyncio.gather(*[stream_client(port, tokens) for _ in range(streams)])
    return {"tokens": sum(counts), "began": began, "ended": time.time(), "cpu_s": time.process_time() - cpu}


def measure(num_gateways: int, streams: int, seconds: float) -> dict[str, float]:
    """One run with a fresh fleet."""
    tokens = 16 * max(1, round(seconds * TOKENS_PER_SECOND / 16))
    with tempfile.TemporaryDirectory(prefix="qt-bench-") as folder:
        fleet = Fleet(Path(folder), num_gateways)
        try:
            engine_cpu, gateway_cpu = fleet.cpu_s()
            readers = []
            for index, port in enumerate(fleet.ports):
                share = streams // num_gateways + (index < streams % num_gateways)
                arguments = ["--client", str(port), str(share), str(tokens)]
                readers.append(children.start("bench.gateway_curve", *arguments, stdout=subprocess.PIPE))
            replies = [json.loads(reader.communicate()[0]) for reader in readers]
            engine_after, gateway_after = fleet.cpu_s()
        finally:
            fleet.stop()
    total = sum(reply["tokens"] for reply in replies)
    if total != tokens * streams:
        raise RuntimeError(f"{total} tokens came, {tokens * streams} were generated")
    elapsed = max(reply["ended"] for reply in replies) - min(reply["began"] for reply in replies)
    return {
        "tokens_per_s": total / elapsed,
        "gateway_cpu_us_per_token": 1e6 * (gateway_after - gateway_cpu) / total,
        "engine_core_share": (engine_after - engine_cpu) / elapsed,
        "client_core_share": sum(reply["cpu_s"] for reply in replies) / elapsed,
    }


def main() -> None:
    """Print one line per number of gateways (medians over ``--repeats``), then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 3, 4], help="how many, one after the other")
    parser.add_argument("--streams", type=int, default=32, help="all streams together")
    parser.add_argument("--seconds", type=float, default=5.0, help="roughly how long one run takes")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns")
    parser.add_argument("--client", type=int, nargs=3, metavar=("PORT", "STREAMS", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(clients(*args.client))))
        return
    if min(args.gateways) < 1 or args.streams < max(args.gateways):
        parser.error("every gateway needs a stream: --streams at least the largest of --gateways")
    runs: dict[int, list[dict[str, float]]] = {number: [] for number in args.gateways}
    for _ in range(args.repeats):
        for number in args.gateways:
            runs[number].append(measure(number, args.streams, args.seconds))
    curve: list[dict[str, Any]] = []
    for number, each in runs.items():
        middle = {name: round(statistics.median(run[name] for run in each), 3) for name in each[0]}
        spread = [round(run["tokens_per_s"]) for run in each]
        curve.append({"gateways": number, **middle, "tokens_per_s_of_each_run": spread})
        print(f"{number} gateways: {middle['tokens_per_s']:.0f} tokens/s {curve[-1]}", flush=True)
    print(json.dumps({"benchmark": "gateway_curve", "cores": os.cpu_count(), "streams": args.streams, "curve": curve}))


if __name__ == "__main__":
    main()

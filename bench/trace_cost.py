"""What ``--trace`` costs a server: throughput and CPU time with it and without it, in turns.

    python -m bench.trace_cost --pairs 10

Two servers with the default model stand side by side, one with ``--trace``. They take turns, a burst of the same
requests each, and the one that waits is idle, so both see the same machine; who begins changes from pair to pair.
Told are the ratio of the throughputs (its median over the pairs, and an interval that holds it nineteen times in
twenty), the CPU time of each process per 1,000 tokens generated, and what one step's records cost where they are
made. Throughput on a busy machine says little, CPU time more; ``--control`` tells how much of a difference is the
machine's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import serve_bench
from bench.serve_bench import Options
from bench.servers import Running, quintet, serve
from bench.simulate_trace_cost import measure

SIDES = ("without", "with")


@dataclass
class Bursts:
    """One server's figures at one concurrency, an entry per pair."""

    tokens_per_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By process, over all bursts."""
    idle_cpu_s: float = 0.0
    """Of this server while the other had its turn."""

    def per_1000_tokens(self) -> dict[str, float]:
        """Process -> CPU seconds."""
        return {name: 1000 * seconds / max(self.tokens, 1) for name, seconds in self.cpu_s.items()}


def burst(server: Running, concurrency: int, n: int, seed: int) -> serve_bench.Run:
    """``n`` short requests. Raises RuntimeError when one fails: its figures would say nothing."""
    options = Options(server.url, "default", "short", concurrency, n, seed=seed, warmup=0)
    run = asyncio.run(serve_bench.run(options))
    if run.errors:
        raise RuntimeError(f"{len(run.errors)} of {n} requests failed, the first with: {run.errors[0]}")
    return run


def spent(server: Running, before: dict[str, float]) -> dict[str, float]:
    """CPU seconds since ``before`` by process, for those that used any."""
    after = server.cpu_seconds()
    return {name: after[name] - before.get(name, 0.0) for name in after if after[name] > before.get(name, 0.0)}


def alternate(servers: dict[str, Running], concurrency: int, n: int, pairs: int) -> dict[str, Bursts]:
    """Turns of both servers; the first pair warms up and does not count."""
    found = {side: Bursts() for side in SIDES}
    for pair in range(-1, pairs):
        for side in SIDES if pair % 2 == 0 else reversed(SIDES):
            other = SIDES[1 - SIDES.index(side)]
            before = {name: server.cpu_seconds() for name, server in servers.items()}
            run = burst(servers[side], concurrency, n, seed=1000 * concurrency + pair)
            if pair < 0:
                continue
            tokens = sum(reply.completion_tokens for reply in run.replies)
            mine = found[side]
            mine.tokens += tokens
            mine.tokens_per_s.append(tokens / run.wall_s)
            for name, seconds in spent(servers[side], before[side]).items():
                mine.cpu_s[name] += seconds
            found[other].idle_cpu_s += sum(spent(servers[other], before[other]).values())
        if pair >= 0:
            rates = [found[side].tokens_per_s[-1] for side in SIDES]
            print(f"c={concurrency} pair {pair + 1}: {rates[0]:.1f} tokens/s without, {rates[1]:.1f} with", flush=True)
    return found


def median_interval(values: list[float]) -> tuple[float, float]:
    """An interval that holds the median 19 times in 20 (order statistics); the whole range of fewer than 6 values."""
    ordered = sorted(values)
    n = len(ordered)
    skip, below = 0, 0.0
    chance = 0.5**n
    while skip <= n // 2:
        below += chance
        if below > 0.025:
            break
        skip += 1
        chance *= (n - skip + 1) / skip
    first = max(skip - 1, 0)
    return ordered[first], ordered[n - 1 - first]


def report(concurrency: int, found: dict[str, Bursts]) -> dict[str, Any]:
    """Print one concurrency's table; returns its figures."""
    off, on = (found[side] for side in SIDES)
    ratios = [b / a for a, b in zip(off.tokens_per_s, on.tokens_per_s, strict=True)]
    low, high = median_interval(ratios)
    cost = {side: found[side].per_1000_tokens() for side in SIDES}
    print(f"\nc={concurrency}, {len(ratios)} pairs: throughput with / without {statistics.median(ratios):.4f}"
          f" (between {low:.4f} and {high:.4f})")  # fmt: skip
    print(f"{'CPU s per 1,000 tokens':<26}{'without':>10}{'with':>10}{'more':>10}")
    for name in sorted(set(cost["without"]) | set(cost["with"])):
        a, b = cost["without"].get(name, 0.0), cost["with"].get(name, 0.0)
        title = name.removeprefix("quintet ").replace("python", "launch.py")
        print(f"  {title:<24}{a:>10.4f}{b:>10.4f}{b - a:>+10.4f}")
    sums = [sum(cost[side].values()) for side in SIDES]
    a, b = sums
    print(f"  {'together':<24}{a:>10.4f}{b:>10.4f}{b - a:>+10.4f}  {b / a - 1:+.2%}")
    print(f"  (while idle, the other's turn: {off.idle_cpu_s:.2f} and {on.idle_cpu_s:.2f} CPU s in all)")
    return {
        "c": concurrency,
        "ratio": round(statistics.median(ratios), 5),
        "ratio_low": round(low, 5),
        "ratio_high": round(high, 5),
        "tokens_per_s": {side: round(statistics.median(found[side].tokens_per_s), 2) for side in SIDES},
        "cpu_s_per_1000_tokens": {side: {k: round(v, 5) for k, v in cost[side].items()} for side in SIDES},
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="turns of each server at each concurrency")
    parser.add_argument("-c", type=int, nargs="+", default=[8, 32], help="requests in flight")
    parser.add_argument("--rounds", type=int, default=2, help="requests of a burst, in multiples of -c")
    parser.add_argument("--model", default="", help="default: the server's")
    parser.add_argument("--control", action="store_true", help="both without: how far two equal servers differ here")
    args = parser.parse_args(argv)
    if min(args.pairs, args.rounds, *args.c) < 1:
        parser.error("--pairs, --rounds and -c are at least 1")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        flags = [] if args.control else ["--trace", f"{folder}/trace"]
        with serve(quintet(model=args.model)) as plain, serve(quintet(*flags, model=args.model)) as traced:
            servers = dict(zip(SIDES, (plain, traced), strict=True))
            for concurrency in args.c:
                found = alternate(servers, concurrency, args.rounds * concurrency, args.pairs)
                results.append(report(concurrency, found))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.trace"))
        print(f"\nthe trace took {size / 1e6:.1f} MB\n\nwhere they are made, microseconds of CPU time per step:")
        steps = []
        for rows in args.c:
            one = measure(rows, 200, Path(folder) / str(rows))
            steps.append({"rows": rows, **{name: round(value, 2) for name, value in one.items()}})
            print("  " + ", ".join(f"{name} {value:g}" for name, value in steps[-1].items()))
    print(json.dumps({"control": args.control, "runs": results, "steps": steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

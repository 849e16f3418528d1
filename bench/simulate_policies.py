"""Which policy, which admission? Answered by the simulator: ``python -m bench.simulate_policies``.

Three questions, each a table, on the same requests for every run of a question:

1. ``policies``: order of the queue, the prefix cache on and off, an eviction of one's own, under bursts of
   requests with shared prefixes and conversations.
2. ``outputs end early`` and ``outputs run to the limit``: the same answers, asked for with a ``max_tokens``
   of 1 to 8 times their length or with exactly their length, under bold and careful admission. Careful
   admission leaves pages unused when outputs end early; bold admission preempts when they do not.
3. ``urgent``: one request in twenty has a high priority.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tools.simulate.__main__ import compare, make_parser

ROOT = Path(__file__).resolve().parents[1]
EVICTION = str(ROOT / "docs" / "examples" / "popular_stays.py")
SHORTEST = str(ROOT / "docs" / "examples" / "shortest_first.py")


def questions(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> the simulator's flags."""
    common = ["--requests", str(args.requests), "--cost", args.cost, "--seed", str(args.seed)]
    if args.fit:
        common += ["--fit", str(args.fit)]
    shared = [*common, "--rate", str(args.rate), "--arrivals", "bursty", "--pages", "3000", "--max-running", "64"]
    growth = [*common, "--rate", str(args.rate * 0.6), "--multi-turn", "0", "--prefix-len", "0", "--output-len", "256",
              "--pages", "950", "--max-running", "128", "--conservativeness", "0.1,0.3,1.0,1.4"]  # fmt: skip
    examples = ["--policy-file", SHORTEST, "--policy-file", EVICTION]
    return {
        "policies": [*shared, "--policy", "fcfs,lpm", "--cache", "on,off", *examples],
        "outputs end early": growth,
        "outputs run to the limit": [*growth, "--to-the-limit"],
        "urgent": [*shared, "--urgent", "0.05", "--policy", "fcfs,priority"],
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.simulate_policies", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=3000, help="per run")
    parser.add_argument("--rate", type=float, default=17.0, help="arrivals per second")
    parser.add_argument("--cost", default="5,60,200,10", help="as tools.simulate")
    parser.add_argument("--fit", type=Path, help="fit the cost to a recorded trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="only this question (may be repeated)")
    parser.add_argument("--plots", type=Path, help="folder for a picture of each question")
    args = parser.parse_args(argv)
    asked = questions(args)
    if unknown := set(args.only) - set(asked):
        parser.error(f"--only {unknown.pop()!r}: the questions are {', '.join(asked)}")
    results: dict[str, Any] = {}
    began = time.perf_counter()
    for name, flags in asked.items():
        if args.only and name not in args.only:
            continue
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            flags = [*flags, "--plot", str(args.plots / f"simulate_{name.replace(' ', '_')}.svg")]
        print(f"\n## {name}\n")
        results[name] = compare(make_parser().parse_args(flags))["runs"]
    print(json.dumps({"seconds": round(time.perf_counter() - began, 1), "requests_per_run": args.requests, **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

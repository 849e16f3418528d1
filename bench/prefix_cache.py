"""What the radix cache does to TTFT.

    python -m bench.prefix_cache [--model X] [--users 50] [-c 8] [--answer-tokens 32 128]

Two measurements, each on a fresh server with the cache and on one with ``--disable-radix-cache``:
users of five turns who resend their whole history (TTFT per turn; a question is of 60 words, an answer of so many
tokens), and two requests with the same
prefix of about 1,000 tokens (TTFT of the second over the first). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from typing import Any

from bench import serve_bench, servers, workloads
from bench.serve_bench import Options


def ttft_by_turn(url: str, users: int, concurrency: int, answer_tokens: int) -> list[float]:
    """Median TTFT in milliseconds of each of the five turns."""
    options = Options(
        url, "default", "multi-turn", concurrency, users * workloads.TURNS, answer_tokens=answer_tokens,
        seed=answer_tokens,  # its own, so that no run finds the prompts of another in the cache
    )  # fmt: skip
    run = asyncio.run(serve_bench.run(options))
    if run.errors:
        raise RuntimeError(f"{len(run.errors)} requests failed, first: {run.errors[0]}")
    turns: list[float] = serve_bench.summary(run)["ttft_ms_by_turn"]
    return turns


def same_prefix_pair(url: str, pairs: int) -> tuple[float, float, int]:
    """(first TTFT, second TTFT) in ms, medians over pairs of different prefixes, and the second's cached tokens."""
    first, second, cached = [], [], []
    for pair in range(pairs):
        options = Options(url, "default", "same-prefix", 1, 2, seed=1000 + pair, warmup=1)
        run = asyncio.run(serve_bench.run(options))
        if run.errors:
            raise RuntimeError(run.errors[0])
        first.append(1e3 * run.replies[0].ttft)
        second.append(1e3 * run.replies[1].ttft)
        cached.append(run.replies[1].cached_tokens)
    return statistics.median(first), statistics.median(second), int(statistics.median(cached))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("-c", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    out: dict[str, Any] = {"less_by_turn": {}}
    for label, flags in (("cache", ()), ("no cache", ("--disable-radix-cache",))):
        with servers.serve(servers.quintet(*flags, model=args.model)) as server:
            turns = {n: ttft_by_turn(server.url, args.users, args.c, n) for n in args.answer_tokens}
            first, second, cached = same_prefix_pair(server.url, args.pairs)
        out[label] = {"ttft_ms_by_turn": turns, "first_ms": first, "second_ms": second, "cached_tokens": cached}
        print(label, json.dumps(out[label]), flush=True)
    for n in args.answer_tokens:
        with_cache, without = (out[label]["ttft_ms_by_turn"][n] for label in ("cache", "no cache"))
        less = out["less_by_turn"][n] = [round(1 - a / b, 3) for a, b in zip(with_cache, without, strict=True)]
        for turn, (a, b, share) in enumerate(zip(with_cache, without, less, strict=True), 1):
            words = f"{a:.0f} ms with the cache, {b:.0f} ms without, {100 * share:.0f} % less"
            print(f"answers of {n} tokens, turn {turn}: {words}")
    out["second_over_first"] = round(out["cache"]["second_ms"] / out["cache"]["first_ms"], 3)
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

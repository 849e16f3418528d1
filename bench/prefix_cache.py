"""What the radix cache does to TTFT.

    python -m bench.prefix_cache [--model X] [--users 48] [-c 8] [--answer-tokens 32 128] [--rounds 3]

Two servers run at once, one of them with ``--disable-radix-cache``, and take turns at the same requests, so that
a machine that slows down does so for both; the one that waits is idle. Two measurements:

- users of five turns who resend their whole history (a question is of 60 words, an answer of so many tokens): TTFT
  per turn, the median over all users, and the share saved in each round, to show the spread;
- two requests with the same prefix of about 1,000 tokens: TTFT of the second over the first.

The last line is one JSON object.
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

HALF = ("--mem-fraction-static", "0.3")
"""Two servers share the memory."""

Turns = list[list[float]]
"""TTFT in seconds of each user, by turn."""


def ttft_by_turn(url: str, users: int, concurrency: int, answer_tokens: int, seed: int) -> Turns:
    """Serve ``users`` conversations; raises RuntimeError when a request fails."""
    options = Options(
        url, "default", "multi-turn", concurrency, users * workloads.TURNS, seed=seed, answer_tokens=answer_tokens
    )
    run = asyncio.run(serve_bench.run(options))
    if run.errors:
        raise RuntimeError(f"{len(run.errors)} requests failed, first: {run.errors[0]}")
    return [[reply.ttft for reply in run.replies if reply.turn == turn] for turn in range(workloads.TURNS)]


def in_turns(urls: dict[str, str], args: argparse.Namespace, answer_tokens: int) -> dict[str, Any]:
    """Rounds of the same users at each server, the order reversed each time; medians in ms and shares saved."""
    taken: dict[str, Turns] = {label: [[] for _ in range(workloads.TURNS)] for label in urls}
    rounds: list[list[float]] = []
    for number in range(args.rounds):
        users = -(-args.users // args.rounds)
        seed = 1000 * answer_tokens + number  # its own, so that no round finds the prompts of another in the cache
        now: dict[str, Turns] = {}
        for label in reversed(urls) if number % 2 else urls:
            now[label] = ttft_by_turn(urls[label], users, args.c, answer_tokens, seed)
            for turn, values in enumerate(now[label]):
                taken[label][turn] += values
        rounds.append(_less(_medians(now["cache"]), _medians(now["no cache"])))
    medians = {label: _medians(turns) for label, turns in taken.items()}
    return {
        **{label: [round(1e3 * value, 1) for value in values] for label, values in medians.items()},
        "less": _less(medians["cache"], medians["no cache"]),
        "less_in_each_round": rounds,
    }


def _medians(turns: Turns) -> list[float]:
    return [statistics.median(values) for values in turns]


def _less(with_cache: list[float], without: list[float]) -> list[float]:
    return [round(1 - a / b, 3) for a, b in zip(with_cache, without, strict=True)]


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
    parser.add_argument("--users", type=int, default=48, help="of one answer length, over all rounds")
    parser.add_argument("-c", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with (
        servers.serve(servers.quintet(*HALF, model=args.model)) as cache,
        servers.serve(servers.quintet(*HALF, "--disable-radix-cache", model=args.model)) as no_cache,
    ):
        urls = {"cache": cache.url, "no cache": no_cache.url}
        by_answer = {}
        for n in args.answer_tokens:
            by_answer[n] = found = in_turns(urls, args, n)
            for turn in range(workloads.TURNS):
                spread = ", ".join(f"{100 * row[turn]:.0f}" for row in found["less_in_each_round"])
                print(
                    f"answers of {n} tokens, turn {turn + 1}: {found['cache'][turn]:.0f} ms with the cache, "
                    f"{found['no cache'][turn]:.0f} ms without, {100 * found['less'][turn]:.0f} % less ({spread})",
                    flush=True,
                )
        first, second, cached = same_prefix_pair(cache.url, args.pairs)
    same_prefix = {"first_ms": first, "second_ms": second, "ratio": round(second / first, 3), "cached_tokens": cached}
    print("same prefix:", same_prefix)
    print(json.dumps({"turns": by_answer, "same_prefix": same_prefix}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

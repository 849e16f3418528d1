"""Load generator for any OpenAI-compatible server: the same work for every peer.

    python -m bench.serve_bench --url http://127.0.0.1:30000 --model NAME --workload shared-prefix -c 8 -n 64

Figures are the client's: TTFT is request sent -> first content delta, ITL the gap between content
deltas, E2E the whole request. Output tokens come from the server's usage block, never from
counting chunks. The last line is one JSON object. Exit code 1 if any request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench import workloads
from bench.workloads import Job


@dataclass
class Reply:
    """What one request gave. Times in seconds."""

    ttft: float
    e2e: float
    gaps: list[float]
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    text: str
    turn: int = 0


@dataclass
class Options:
    """What to send and where."""

    url: str
    model: str
    workload: str
    concurrency: int
    n: int
    seed: int = 0
    warmup: int = 2
    timeout_s: float = 600.0
    ignore_eos: bool = True
    label: str = ""
    answer_tokens: int = 32
    """New tokens of each turn of ``multi-turn``."""


@dataclass
class Run:
    """A finished run: replies, errors and wall time in seconds."""

    options: Options
    replies: list[Reply] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0


class Client:
    """Sends one job after another to one server and keeps what came back."""

    def __init__(self, options: Options, http: aiohttp.ClientSession, run: Run) -> None:
        self._options, self._http, self._run = options, http, run

    async def send(self, job: Job, turn: int = 0) -> str:
        """Send a request; its reply is kept, a failure is counted, never hidden. Returns the text."""
        body: dict[str, Any] = {
            "model": self._options.model,
            "messages": job.messages,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **job.extra,
        }
        if self._options.ignore_eos and "response_format" not in job.extra:
            body["ignore_eos"] = True
        try:
            reply = await self._stream(body)
        except (aiohttp.ClientError, TimeoutError, RuntimeError, ValueError) as error:
            self._run.errors.append(f"{type(error).__name__}: {error}")
            return ""
        reply.turn = turn
        self._run.replies.append(reply)
        return reply.text

    async def _stream(self, body: dict[str, Any]) -> Reply:
        sent = time.perf_counter()
        first = last = 0.0
        gaps: list[float] = []
        text: list[str] = []
        usage: dict[str, Any] = {}
        async with self._http.post(self._options.url + "/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for raw in response.content:
                line = raw.strip()
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise RuntimeError(f"error in the stream: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    piece = choice.get("delta", {}).get("content")
                    if not piece:
                        continue
                    now = time.perf_counter()
                    if first:
                        gaps.append(now - last)
                    else:
                        first = now
                    last = now
                    text.append(piece)
        end = time.perf_counter()
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            ttft=(first or end) - sent,
            e2e=end - sent,
            gaps=gaps,
            completion_tokens=usage.get("completion_tokens", 0),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            text="".join(text),
        )


async def run(options: Options) -> Run:
    """Warm up, then run the whole workload with ``concurrency`` requests in flight."""
    result = Run(options)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        client = Client(options, http, result)
        for _ in range(options.warmup):
            await client.send(workloads.single_turn(random.Random(99), "short", ""))
        result.replies.clear()
        start = time.perf_counter()
        if options.workload == "multi-turn":
            await _multi_turn(client, options)
        else:
            await _independent(client, options)
        result.wall_s = time.perf_counter() - start
    return result


async def _independent(client: Client, options: Options) -> None:
    pending = iter(workloads.jobs(options.workload, options.n, options.seed))

    async def one_client() -> None:
        for job in pending:
            await client.send(job)

    await asyncio.gather(*(one_client() for _ in range(options.concurrency)))


async def _multi_turn(client: Client, options: Options) -> None:
    gate = asyncio.Semaphore(options.concurrency)

    async def one_user(user: int) -> None:
        async with gate:
            rng, history = workloads.opening(options.seed, user)
            for turn in range(workloads.TURNS):
                reply = await client.send(workloads.next_turn(rng, history, options.answer_tokens), turn)
                history.append({"role": "assistant", "content": reply})

    await asyncio.gather(*(one_user(u) for u in range(max(1, options.n // workloads.TURNS))))


def percentile(values: list[float], p: float) -> float:
    """The p-th percentile (0..100); nan of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))] if ordered else float("nan")


def summary(result: Run) -> dict[str, Any]:
    """The figures of a run; times in milliseconds, rates per second."""
    replies, wall = result.replies, result.wall_s
    gaps = [gap for reply in replies for gap in reply.gaps]
    prompt_tokens = sum(reply.prompt_tokens for reply in replies)

    def ms(values: list[float], p: float) -> float:
        return round(1e3 * percentile(values, p), 2)

    return {
        "label": result.options.label,
        "workload": result.options.workload,
        "c": result.options.concurrency,
        "n": result.options.n,
        "ok": len(replies),
        "errors": len(result.errors),
        "wall_s": round(wall, 3),
        "req_s": round(len(replies) / wall, 3),
        "out_tok_s": round(sum(reply.completion_tokens for reply in replies) / wall, 1),
        "in_tok_s": round(prompt_tokens / wall, 1),
        "cached_frac": round(sum(reply.cached_tokens for reply in replies) / max(1, prompt_tokens), 3),
        "ttft_ms_p50": ms([reply.ttft for reply in replies], 50),
        "ttft_ms_p99": ms([reply.ttft for reply in replies], 99),
        "itl_ms_p50": ms(gaps, 50),
        "itl_ms_p99": ms(gaps, 99),
        "e2e_ms_p50": ms([reply.e2e for reply in replies], 50),
        "ttft_ms_by_turn": [
            ms([reply.ttft for reply in replies if reply.turn == turn], 50)
            for turn in range(max((reply.turn for reply in replies), default=0) + 1)
        ],
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default")
    parser.add_argument("--workload", default="short", choices=workloads.KINDS)
    parser.add_argument("-c", type=int, default=8, help="requests in flight")
    parser.add_argument("-n", type=int, default=64, help="requests in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one request")
    parser.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false")
    parser.add_argument("--label", default="")
    parser.add_argument("--save-text", help="write every reply's text here, one JSON string a line")
    args = parser.parse_args()
    options = Options(
        args.url, args.model, args.workload, args.c, args.n, args.seed, args.warmup, args.timeout, args.ignore_eos,
        args.label,
    )
    result = asyncio.run(run(options))
    if args.save_text:
        with open(args.save_text, "w") as file:
            file.writelines(json.dumps(reply.text) + "\n" for reply in result.replies)
    for error in result.errors[:5]:
        print("error:", error, file=sys.stderr)
    print(json.dumps(summary(result)))
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Structured output: forward passes per output token, and time against the same prompt without a constraint.

    python -m bench.structured [--model FOLDER] [--url URL] [--repeats 5]
    python -m bench.structured --keywords     # the table of docs/structured_output.md
    python -m bench.structured --neighbours 1000 --schemas 200

One request at a time on an idle server, so the worker's steps are this request's. Each constrained
answer is compared with a free one to the same prompt and of the same length (ignore_eos). Ends in one
JSON line.

``--neighbours N``: what N constrained requests over M different schemas cost the free streams beside them. ``-c`` free
streams run all the time; beside them a block of the constrained requests arrives, then the same block at the
same rate without constraints and of the same lengths, and so on in turns. Reported are the gaps between the
free streams' deltas (ITL) and tokens per second of one of them, each as the ratio constrained / free, and the
worker's memory, its KV cache filled beforehand. Only streams that began and ended within a block count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import jsonschema  # type: ignore[import-untyped]
import psutil

from bench.serve_bench import Client, Options, Reply, Run, percentile
from bench.servers import quintet, serve
from bench.workloads import WORDS, Job, single_turn, words
from common.schema_keywords import KEYWORDS

Schema = dict[str, Any]

SETTLE_S = 0.6
"""The engine publishes its counters a few times a second."""
KV_TOKENS = 8192
"""A small KV cache for ``--neighbours``: filled before, so that memory grows by grammars or not at all."""


def record(properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_FEATURES = ("wireless_networking", "parking_available", "wheelchair_accessible", "outdoor_seating",
             "accepts_reservations", "accepts_credit_cards",
             "serves_breakfast", "serves_alcohol", "family_friendly", "live_music_on_weekends")
_NAME = {"type": "string", "maxLength": 24}

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "flags": (
        "Describe a small restaurant as JSON with yes/no features.",
        record({name: {"type": "boolean"} for name in _FEATURES}),
    ),
    "choices": (
        "Classify this review as JSON: 'The food was cold, but the staff were lovely.'",
        record({
            "overall_sentiment": {"enum": ["positive", "negative", "mixed"]},
            "food_quality_rating": {"enum": ["poor", "average", "excellent"]},
            "service_quality_rating": {"enum": ["poor", "average", "excellent"]},
            "would_recommend_to_friends": {"type": "boolean"},
        }),
    ),
    "record": (
        "Invent a person and write the record as JSON.",
        record({
            "first_name": _NAME, "family_name": _NAME,
            "age_in_years": {"type": "integer", "minimum": 1, "maximum": 120},
            "home_city": _NAME, "is_currently_employed": {"type": "boolean"},
        }),
    ),
    "list": (
        "List three capitals of Europe with their countries as JSON.",
        record({"capitals": {"type": "array", "items": record({"city": _NAME, "country": _NAME}), "minItems": 3,
                             "maxItems": 3}}),
    ),
    "prose": (
        "Explain in one sentence why the sky is blue. Answer as JSON.",
        record({"answer": {"type": "string", "minLength": 80, "maxLength": 240}}),
    ),
}


def _post(url: str, body: Schema) -> tuple[Schema, float]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: Schema = json.load(response)
    return answer, time.perf_counter() - started


def _steps(url: str) -> float:
    """Forward passes of the worker so far."""
    time.sleep(SETTLE_S)
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("quintet:num_steps_total"):
                return float(line.rpartition(" ")[2])
    raise RuntimeError("the server's /metrics has no quintet:num_steps_total")


def _passes(url: str, body: Schema) -> tuple[int, float]:
    """(output tokens, forward passes) of one request, the caches warm."""
    _post(url, body)
    before = _steps(url)
    answer, _ = _post(url, body)
    return int(answer["usage"]["completion_tokens"]), _steps(url) - before


def compare(url: str, model: str, name: str, repeats: int) -> Schema:
    """One schema: constrained, and free text of the same length."""
    prompt, schema = SCHEMAS[name]
    plain: Schema = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    constrained = {**plain, "max_tokens": 400, "response_format": form}
    tokens, passes = _passes(url, constrained)
    free = {**plain, "max_tokens": tokens, "ignore_eos": True}
    _, free_passes = _passes(url, free)
    # In turns, so that whatever else the machine does meets both alike.
    pairs = [(_post(url, constrained)[1], _post(url, free)[1]) for _ in range(repeats)]
    constrained_s, free_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "schema": name, "tokens": tokens, "passes": passes, "passes_per_token": round(passes / tokens, 3),
        "constrained_ms": round(constrained_s * 1e3, 1), "free_passes": free_passes,
        "free_ms": round(free_s * 1e3, 1), "time_ratio": round(constrained_s / free_s, 3),
    }


# --------------------------------------------------------------------------- neighbours


def some_schema(rng: random.Random) -> Schema:
    """An object of a few fields, all different from schema to schema."""
    kinds = (
        lambda: {"type": "boolean"},
        lambda: {"type": "integer", "minimum": 0, "maximum": rng.randrange(10, 5000)},
        lambda: {"type": "string", "maxLength": rng.randrange(8, 24)},
        lambda: {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{{rng.randrange(2, 6)}}}$"},
        lambda: {"enum": rng.sample(WORDS, 4)},
        lambda: {"type": "array", "items": {"enum": rng.sample(WORDS, 5)}, "minItems": 1, "maxItems": 3},
        lambda: record({name: {"type": "boolean"} for name in rng.sample(WORDS, 2)}),
    )
    names = ["_".join(rng.sample(WORDS, 2)) for _ in range(rng.randrange(3, 7))]
    return record({name: rng.choice(kinds)() for name in names})


class Neighbours:
    """Blocks of requests beside free streams, on one server."""

    def __init__(self, options: Options, http: aiohttp.ClientSession, num_schemas: int, max_tokens: int) -> None:
        self._options, self._http, self._max_tokens = options, http, max_tokens
        rng = random.Random(options.seed)
        self._schemas = [some_schema(rng) for _ in range(num_schemas)]
        self._free_rng = random.Random(options.seed + 1)
        self.lengths: dict[int, int] = {}
        """Request -> tokens of its constrained answer."""
        self.errors: list[str] = []
        self.num_invalid = 0

    async def fill_cache(self) -> None:
        """Long prompts, all different, until every KV page has been written once."""
        rng, num_tokens = random.Random(self._options.seed + 2), 0
        while num_tokens < KV_TOKENS:
            reply = await self._send(replace(single_turn(rng, "long-prompt", ""), max_tokens=1))
            if reply is None:
                raise RuntimeError(f"a long prompt failed: {self.errors[-1]}")
            num_tokens += reply.prompt_tokens

    async def block(self, numbers: list[int], constrained: bool, rate: float) -> Schema:
        """These requests, ``rate`` arriving per second, beside the free streams; the free streams' replies."""
        others: list[Reply] = []

        async def neighbour(place: int, number: int) -> None:
            await asyncio.sleep(place / rate)
            await self._neighbour(number, constrained)

        async def other() -> None:
            while True:
                prompt = "Write a long story about " + words(self._free_rng, 5) + "."
                reply = await self._send(Job("decode", [{"role": "user", "content": prompt}], 64))
                others.extend([reply] if reply is not None else [])

        free = [asyncio.create_task(other()) for _ in range(self._options.concurrency)]
        start = time.perf_counter()
        await asyncio.gather(*(neighbour(place, number) for place, number in enumerate(numbers)))
        wall_s = time.perf_counter() - start
        for task in free:
            task.cancel()
        await asyncio.gather(*free, return_exceptions=True)
        return {"wall_s": wall_s, "others": others}

    async def _neighbour(self, number: int, constrained: bool) -> None:
        """One request of a block. The two kinds share no cached prefix: they differ in the salt alone."""
        schema = self._schemas[number % len(self._schemas)]
        prompt = f"Invent entry {number} about " + words(random.Random(number), 4) + " and answer in JSON."
        extra: Schema = {"cache_salt": "constrained" if constrained else "free"}
        if constrained:
            form = {"name": "entry", "strict": True, "schema": schema}
            extra["response_format"] = {"type": "json_schema", "json_schema": form}
        elif number not in self.lengths:
            return
        max_tokens = self._max_tokens if constrained else self.lengths[number]
        reply = await self._send(Job("json", [{"role": "user", "content": prompt}], max_tokens, extra))
        if reply is not None and constrained:
            self.lengths[number] = reply.completion_tokens
            if reply.completion_tokens < self._max_tokens:
                self.num_invalid += not _is_valid(reply.text, schema)

    async def _send(self, job: Job) -> Reply | None:
        run = Run(self._options)
        await Client(self._options, self._http, run).send(job)
        self.errors += run.errors
        return run.replies[0] if run.replies else None


def _is_valid(text: str, schema: Schema) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _figures(blocks: list[Schema]) -> dict[str, float]:
    """The free streams of all blocks of one kind. Times in milliseconds, rates per second."""
    others: list[Reply] = [reply for block in blocks for reply in block["others"]]
    if not others:
        raise RuntimeError("no free stream ended within a block; use more --neighbours or fewer --blocks")
    gaps = [gap for reply in others for gap in reply.gaps]
    return {
        "wall_s": round(sum(block["wall_s"] for block in blocks), 1),
        "num_streams": len(others),
        "itl_ms_mean": round(1e3 * statistics.fmean(gaps), 3),
        "itl_ms_p50": round(1e3 * percentile(gaps, 50), 3),
        "itl_ms_p99": round(1e3 * percentile(gaps, 99), 3),
        "ttft_ms_p50": round(1e3 * percentile([reply.ttft for reply in others], 50), 2),
        "tok_s_per_stream": round(sum(reply.completion_tokens for reply in others) / sum(r.e2e for r in others), 3),
    }


def worker_rss_mb(pid: int) -> float | None:
    """Resident memory of the server's worker processes; None where the server was not started here."""
    if not pid:
        return None
    titles = {p: " ".join(p.cmdline()) for p in psutil.Process(pid).children(recursive=True)}
    found = [p.memory_info().rss for p, title in titles.items() if title.startswith("quintet worker")]
    return round(sum(found) / 2**20, 1)


async def neighbours(url: str, model: str, pid: int, args: argparse.Namespace) -> Schema:
    """Constrained requests beside free streams, and the same without constraints, in turns."""
    n, c = args.neighbours, args.c
    options = Options(url, model, "json", c, n)
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        work = Neighbours(options, http, args.schemas, max_tokens=192)
        await work.fill_cache()
        extra = [n + i for i in range(2 * c)]
        await work.block(extra, constrained=True, rate=1e3)
        burst = await work.block(extra, constrained=False, rate=1e3)
        rate = args.rate or 0.5 * len(extra) / burst["wall_s"]
        work.lengths.clear()
        memory = [worker_rss_mb(pid)]
        kinds: dict[bool, list[Schema]] = {True: [], False: []}
        for number in range(args.blocks):
            block = list(range(n * number // args.blocks, n * (number + 1) // args.blocks))
            for constrained in (True, False):
                kinds[constrained].append(await work.block(block, constrained, rate))
                print(f"block {number} {'constrained' if constrained else 'free'}: "
                      f"{kinds[constrained][-1]['wall_s']:.1f} s", flush=True)
            memory.append(worker_rss_mb(pid))
    beside, plain = _figures(kinds[True]), _figures(kinds[False])
    names = ("itl_ms_mean", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "tok_s_per_stream")
    return {
        "benchmark": "structured-neighbours", "constrained": n, "schemas": args.schemas, "free_streams": c,
        "rate": round(rate, 3), "beside_constrained": beside, "beside_free": plain,
        "ratio": {name: round(beside[name] / plain[name], 4) for name in names},
        "mean_len": round(statistics.fmean(work.lengths.values()), 1),
        "worker_rss_mb": memory, "invalid": work.num_invalid, "errors": work.errors[:5],
    }


@contextmanager
def _server(url: str, model: str, *flags: str) -> Iterator[tuple[str, str, int]]:
    """(address, the model's name, process id or 0 for a server that ran before)."""
    if url:
        with urllib.request.urlopen(url + "/v1/models", timeout=10) as response:
            yield url, json.load(response)["data"][0]["id"], 0
    else:
        with serve(quintet(*flags, model=model)) as running:
            yield running.url, running.spec.model, running.process.pid


def keyword_table() -> str:
    """Markdown: what becomes of each keyword."""
    rows = ["| keyword | | |", "|---|---|---|"]
    for status in ("enforced", "partly", "refused", "annotation"):
        found = {name: keyword for name, keyword in KEYWORDS.items() if keyword.status == status}
        rows += [f"| `{name}` | {status} | {keyword.note} |" for name, keyword in found.items()]
    return "\n".join(rows)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder (default: the server's default model)")
    parser.add_argument("--url", default="", help="a running server instead of a fresh one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keywords", action="store_true", help="print the table of keywords and stop")
    parser.add_argument("--neighbours", type=int, default=0, help="constrained requests beside free ones, this many")
    parser.add_argument("--schemas", type=int, default=200, help="different schemas among them")
    parser.add_argument("--blocks", type=int, default=5, help="turns into which they are cut")
    parser.add_argument("-c", type=int, default=4, help="free streams beside the --neighbours")
    parser.add_argument("--rate", type=float, default=0.0,
                        help="--neighbours per second (default: half of what the server can do without constraints)")
    args = parser.parse_args()
    if args.keywords:
        print(keyword_table())
        return
    results = []
    flags = ("--max-total-tokens", str(KV_TOKENS)) if args.neighbours else ()
    with _server(args.url, args.model, *flags) as (url, model, pid):
        if args.neighbours:
            print(json.dumps(asyncio.run(neighbours(url, model, pid, args))))
            return
        for name in SCHEMAS:
            results.append(compare(url, model, name, args.repeats))
            print(" ".join(f"{key}={value}" for key, value in results[-1].items()), flush=True)
    print(json.dumps({"benchmark": "structured", "results": results}))


if __name__ == "__main__":
    main()

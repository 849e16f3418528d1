"""What constrained requests cost the free streams beside them (``python -m bench.structured --neighbours``).

``-c`` free streams run all the time; beside them a block of the constrained requests arrives, then the same
block at the same rate without constraints and of the same lengths, and so on in turns. Reported are the gaps
between the free streams' deltas (ITL) and tokens per second of one of them, as the medians of the ratios constrained /
free of blocks next to each other, and the memory of the worker and the tokenizer before and after each
pair of blocks, the KV cache filled beforehand. Only streams that began and ended within a block count.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import jsonschema  # type: ignore[import-untyped]
import psutil

from bench.serve_bench import Client, Options, Reply, Run, percentile
from bench.workloads import WORDS, Job, single_turn, words

Schema = dict[str, Any]

KV_TOKENS = 8192
"""A small KV cache: filled before, so that memory grows by grammars or not at all."""


def record(properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


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


def _processes(pid: int) -> dict[str, list[psutil.Process]]:
    """Role -> the server's processes of that role; empty where the server was not started here."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(pid).children(recursive=True) if pid else ():
        words = " ".join(process.cmdline()).split()
        if words[:1] == ["quintet"]:
            found.setdefault(words[1].partition("-")[0], []).append(process)
    return found


def rss_mb(pid: int) -> dict[str, float]:
    """Resident memory of the processes that hold grammars, by role."""
    return {
        role: round(sum(process.memory_info().rss for process in processes) / 2**20, 1)
        for role, processes in _processes(pid).items() if role in ("worker", "tokenizer", "gateway")
    }  # fmt: skip


def worker_cpu_s(pid: int) -> float:
    """CPU time of the worker processes so far; 0 where the server was not started here."""
    times = [process.cpu_times() for process in _processes(pid).get("worker", ())]
    return sum(each.user + each.system for each in times)


@dataclass(frozen=True, slots=True)
class Load:
    """What ``--neighbours`` runs; ``rate`` in arrivals per second, 0: half of what the server can do."""

    num_requests: int
    num_schemas: int
    num_blocks: int
    num_streams: int
    rate: float


async def neighbours(url: str, model: str, pid: int, load: Load) -> Schema:
    """Constrained requests beside free streams, and the same without constraints, in turns."""
    n, c = load.num_requests, load.num_streams
    options = Options(url, model, "json", c, n)
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        work = Neighbours(options, http, load.num_schemas, max_tokens=192)
        await work.fill_cache()
        extra = [n + i for i in range(2 * c)]
        await work.block(extra, constrained=True, rate=1e3)
        burst = await work.block(extra, constrained=False, rate=1e3)
        rate = load.rate or 0.5 * len(extra) / burst["wall_s"]
        work.lengths.clear()
        memory = [rss_mb(pid)]
        kinds: dict[bool, list[Schema]] = {True: [], False: []}
        for number in range(load.num_blocks):
            block = list(range(n * number // load.num_blocks, n * (number + 1) // load.num_blocks))
            for constrained in (True, False):
                kinds[constrained].append(await work.block(block, constrained, rate))
                print(f"block {number} {'constrained' if constrained else 'free'}: "
                      f"{kinds[constrained][-1]['wall_s']:.1f} s", flush=True)
            memory.append(rss_mb(pid))
    return {
        "benchmark": "structured-neighbours", "constrained": n, "schemas": load.num_schemas, "free_streams": c,
        "rate": round(rate, 3), "beside_constrained": _figures(kinds[True]), "beside_free": _figures(kinds[False]),
        "ratio": _ratios(kinds[True], kinds[False]),
        "mean_len": round(statistics.fmean(work.lengths.values()), 1),
        "rss_mb": memory, "invalid": work.num_invalid, "errors": work.errors[:5],
    }


def _ratios(constrained: list[Schema], free: list[Schema]) -> dict[str, float]:
    """Medians of the ratios of neighbouring blocks. Each free block lies between two constrained ones and is compared
    with both (the last with one), so that a machine that grows slower or faster favours neither kind."""
    mine, theirs = [_figures([block]) for block in constrained], [_figures([block]) for block in free]
    pairs = [*zip(mine, theirs, strict=True), *zip(mine[1:], theirs, strict=False)]
    names = ("itl_ms_mean", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "tok_s_per_stream")
    return {name: round(statistics.median(a[name] / b[name] for a, b in pairs), 4) for name in names}

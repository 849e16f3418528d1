"""Structured output: forward passes per output token, and time against the same prompt without a constraint.

    python -m bench.structured [--model FOLDER] [--url URL] [--repeats 9]
    python -m bench.structured --keywords     # the table of docs/structured_output.md
    python -m bench.structured --neighbours 1000 --schemas 200

One request at a time on an idle server, so the worker's steps are this request's. Each constrained
answer is compared with a free one to the same prompt and of the same length (ignore_eos), which of the two
comes first in turns: ``time_ratio`` is the median of the pairs' ratios (with its quartiles), so that neither a
slow minute nor an order favours one. ``cpu_ratio`` compares the CPU time of the worker process over all pairs,
which other work on the machine hardly changes (0.0 with ``--url``). Both are per token, as the lengths are
equal. Ends in one JSON line. ``--neighbours``: see bench/structured_neighbours.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from bench.serve_bench import percentile
from bench.servers import quintet, serve
from bench.structured_neighbours import KV_TOKENS, Load, Schema, neighbours, record, worker_cpu_s
from common.schema_keywords import KEYWORDS

SETTLE_S = 0.6
"""The engine publishes its counters a few times a second."""

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


def compare(url: str, model: str, name: str, repeats: int, pid: int) -> Schema:
    """One schema: constrained, and free text of the same length."""
    prompt, schema = SCHEMAS[name]
    plain: Schema = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    constrained = {**plain, "max_tokens": 400, "response_format": form}
    tokens, passes = _passes(url, constrained)
    free = {**plain, "max_tokens": tokens, "ignore_eos": True}
    _, free_passes = _passes(url, free)
    bodies = (constrained, free)
    times: tuple[list[float], list[float]] = ([], [])
    cpu_s = [0.0, 0.0]
    for number in range(repeats):
        for kind in (0, 1) if number % 2 == 0 else (1, 0):
            before = worker_cpu_s(pid)
            times[kind].append(_post(url, bodies[kind])[1])
            cpu_s[kind] += worker_cpu_s(pid) - before
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    constrained_s, free_s = (statistics.median(column) for column in times)
    return {
        "schema": name, "tokens": tokens, "passes": passes, "passes_per_token": round(passes / tokens, 3),
        "constrained_ms": round(constrained_s * 1e3, 1), "free_passes": free_passes,
        "free_ms": round(free_s * 1e3, 1), "time_ratio": round(statistics.median(ratios), 3),
        "ratio_p25": round(percentile(ratios, 25), 3), "ratio_p75": round(percentile(ratios, 75), 3),
        "cpu_ratio": round(cpu_s[0] / cpu_s[1], 3) if cpu_s[1] else 0.0,
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
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=SCHEMAS, help="one of the schemas")
    parser.add_argument("--keywords", action="store_true", help="print the table of keywords and stop")
    parser.add_argument("--neighbours", type=int, default=0, help="constrained requests beside free ones, this many")
    parser.add_argument("--schemas", type=int, default=200, help="different schemas among them")
    parser.add_argument("--blocks", type=int, default=8, help="turns into which they are cut")
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
            load = Load(args.neighbours, args.schemas, args.blocks, args.c, args.rate)
            print(json.dumps(asyncio.run(neighbours(url, model, pid, load))))
            return
        for name in [args.only] if args.only else SCHEMAS:
            results.append(compare(url, model, name, args.repeats, pid))
            print(" ".join(f"{key}={value}" for key, value in results[-1].items()), flush=True)
    print(json.dumps({"benchmark": "structured", "results": results}))


if __name__ == "__main__":
    main()

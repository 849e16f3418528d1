"""OpenVINO GenAI's continuous batching on the workloads of ``bench``; run by ``bench.peers`` with its interpreter.

    PATH/bin/python bench/openvino_peer.py MODEL_DIR < cases.json

It has no server here, so nothing of HTTP, tokens to text, or a load generator is in its figures: a little
flattered. ``concurrency`` requests are kept in flight, as the load generator does. Standard input is a list of
``{"name", "concurrency", "warmup": [job], "jobs": [job]}`` with ``job = {"messages", "max_tokens"}``; each line
of the output is one JSON object with the figures of ``serve_bench.summary`` that make sense.

MODEL_DIR is made in an environment with openvino-genai, optimum-intel and nncf (PyPI):
``optimum-cli export openvino --model DIR --task text-generation-with-past --weight-format int8 MODEL_DIR``.
Needs nothing of this project: it runs in another environment.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

Json = dict[str, Any]


def make_pipe(folder: str, threads: int) -> Any:
    """Continuous batching with prefix caching, chunked prefill of at most 512 tokens and bf16 arithmetic."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties, {})


def settings(max_tokens: int) -> Any:
    """Greedy, to the limit."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    return config


class Flight:
    """Requests in flight: when each began, and when its tokens came."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.tokenizer = pipe.get_tokenizer()
        self.open: dict[int, tuple[Any, float, list[float]]] = {}
        self.done: list[tuple[int, float, list[float]]] = []
        """(prompt tokens, began, times of the tokens)."""
        self._prompt_tokens: dict[int, int] = {}
        self._next = 0

    def add(self, job: Json) -> None:
        """Render the chat and hand it over."""
        began = time.perf_counter()
        text = self.tokenizer.apply_chat_template(job["messages"], True)
        ids = self.tokenizer.encode(text, add_special_tokens=False).input_ids
        self._next += 1
        self._prompt_tokens[self._next] = int(ids.get_shape()[1])
        self.open[self._next] = (self.pipe.add_request(self._next, ids, settings(job["max_tokens"])), began, [])

    def step(self) -> None:
        """One step, and what it gave each request."""
        self.pipe.step()
        now = time.perf_counter()
        for number, (handle, began, times) in list(self.open.items()):
            while handle.can_read():
                for output in handle.read().values():
                    times += [now] * len(output.generated_ids)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self.open[number]
                self.done.append((self._prompt_tokens.pop(number), began, times))


def run(pipe: Any, jobs: list[Json], concurrency: int) -> tuple[float, Flight]:
    """Seconds for all jobs, ``concurrency`` at a time."""
    flight, pending = Flight(pipe), iter(jobs)
    began = time.perf_counter()
    for job in itertools.islice(pending, concurrency):
        flight.add(job)
    while flight.open:
        before = len(flight.done)
        flight.step()
        for job in itertools.islice(pending, len(flight.done) - before):
            flight.add(job)
    return time.perf_counter() - began, flight


def main() -> None:
    """Read the cases, run each, print a line for each."""
    pipe = make_pipe(sys.argv[1], threads=2)
    for case in json.load(sys.stdin):
        run(pipe, case["warmup"], case["concurrency"])
        wall, flight = run(pipe, case["jobs"], case["concurrency"])
        tokens = sum(len(times) for _, _, times in flight.done)
        gaps = [b - a for _, _, times in flight.done for a, b in itertools.pairwise(times)]
        summary = {
            "name": case["name"], "ok": len(flight.done), "errors": 0, "wall_s": round(wall, 3),
            "req_s": round(len(flight.done) / wall, 3), "out_tok_s": round(tokens / wall, 1),
            "in_tok_s": round(sum(n for n, _, _ in flight.done) / wall, 1),
            "ttft_ms_p50": round(1e3 * statistics.median(times[0] - began for _, began, times in flight.done), 2),
            "itl_ms_p50": round(1e3 * statistics.median(gaps), 2) if gaps else float("nan"),
        }  # fmt: skip
        expected = sum(job["max_tokens"] for job in case["jobs"])
        if tokens != expected:
            raise SystemExit(f"{case['name']}: {tokens} tokens came, {expected} were asked for")
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()

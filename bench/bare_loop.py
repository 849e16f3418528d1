"""What the system around the forward pass costs: the server beside a bare loop of the same steps.

    python -m bench.bare_loop --model DIR [--case 'short -c 8'] [--runs 3]

Each run serves a workload with ``--trace`` on and the load generator on the same cores, then takes the
batches from the trace and runs the worker's forward on them alone: packed beforehand, one after the other,
no sampling, no messages, no other process. Both give the same tokens, so the ratio of their rates is what
arrives at the client of what the forward could give. CPU seconds per 1,000 tokens of every process, the load
generator's too, are those of the served run. The last line is one JSON object with medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import load, serve_bench, servers
from bench.serve_bench import Options
from common.messages import ForwardBatch, WorkerReady
from common.trace import SchedulerStep
from tools.replay.reader import read_run
from worker_proc.executor import StepExecutor
from worker_proc.runner import ModelRunner, PackedBatch
from worker_proc.sampling.cpu import CpuSampler

CASES = {"short -c 8": ("short", 8, 96), "short -c 32": ("short", 32, 192)}


@dataclass
class Recording:
    """The batches of a served run, in order, and the pool they were made for."""

    before: list[ForwardBatch] = field(default_factory=list)
    """Of the warm-up: their requests and pages are what the measured ones build on."""
    measured: list[ForwardBatch] = field(default_factory=list)
    num_pages: int = 0
    page_size: int = 0
    threads: int = 0


class Taker:
    """A ``ModelRunner`` that keeps a copy of every packed batch it passes on."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.taken: list[PackedBatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: PackedBatch) -> Any:
        """Keep, then run."""
        self.taken.append(PackedBatch(*(getattr(batch, name).copy() for name in PackedBatch.__slots__)))
        return self._runner.forward(batch)


def serve_case(model: str, case: str, folder: str) -> tuple[dict[str, Any], Recording]:
    """Serve a workload; its summary, with CPU seconds by process, and its batches."""
    workload, concurrency, n = CASES[case]
    with servers.serve(servers.quintet("--trace", folder, model=model)) as server:
        warm_up = Options(server.url, "default", workload, concurrency, concurrency, seed=99)
        asyncio.run(serve_bench.run(warm_up))
        served = load.put(server, Options(server.url, "default", workload, concurrency, n, warmup=0))
    if served.run.errors:
        raise RuntimeError(f"{len(served.run.errors)} requests failed, first: {served.run.errors[0]}")
    return served.summary | {"tokens": served.tokens}, read_batches(folder, served.began)


def read_batches(folder: str, began: float) -> Recording:
    """The scheduler's batches, those from ``began`` (time.time()) on apart."""
    recording = Recording()
    for segment in read_run(Path(folder)):
        for record in segment.records:
            if not isinstance(record, SchedulerStep):
                continue
            for message in record.messages:
                if isinstance(message, WorkerReady):
                    recording.num_pages, recording.page_size = message.num_pages, message.page_size
                    recording.threads = message.threads
            if record.batch is not None:
                (recording.measured if record.now >= began else recording.before).append(record.batch)
    return recording


def bare_seconds(runner: ModelRunner, recording: Recording, runs: int = 3) -> float:
    """Seconds of the measured batches on the forward alone; the median of ``runs``."""
    taker = Taker(runner)
    executor = StepExecutor(taker, CpuSampler(recording.threads))
    for batch in recording.before:
        executor.execute(batch)
    first = len(taker.taken)
    for batch in recording.measured:
        executor.execute(batch)
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        for packed in taker.taken[first:]:
            runner.forward(packed)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def fast_runner(model: str, recording: Recording) -> ModelRunner:
    """The worker's CPU fast path with the server's pool. Raises SystemExit where there is none."""
    import torch
    from transformers import AutoModelForCausalLM

    from worker_proc.kernels.cpu.fast_runner import CpuFastRunner

    torch.set_num_threads(1)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    runner = CpuFastRunner.try_build(weights, recording.page_size, recording.threads, lambda words: None, ())
    if isinstance(runner, str):
        raise SystemExit(runner)
    runner.allocate(recording.num_pages)
    return runner


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a bf16 transformers model")
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    out: dict[str, Any] = {}
    for case in args.case or CASES:
        ratios, served, bare, cpu = [], [], [], []
        for _ in range(args.runs):
            with tempfile.TemporaryDirectory(prefix="quintet-bare-") as folder:
                summary, recording = serve_case(args.model, case, folder)
            runner = fast_runner(args.model, recording)
            bare.append(summary["tokens"] / bare_seconds(runner, recording))
            runner.close()
            served.append(summary["out_tok_s"])
            ratios.append(served[-1] / bare[-1])
            cpu.append(summary["cpu_s_per_1000_tokens"])
            print(f"{case}: served {served[-1]:.1f} tokens/s, bare {bare[-1]:.1f}, ratio {ratios[-1]:.3f}", flush=True)
        out[case] = {
            "served_tok_s": statistics.median(served), "bare_tok_s": round(statistics.median(bare), 1),
            "ratio": round(statistics.median(ratios), 3),
            "cpu_s_per_1000_tokens": {
                name: round(statistics.median(row.get(name, 0.0) for row in cpu), 3) for name in cpu[0]
            },
        }  # fmt: skip
        print(f"{case}: median ratio {out[case]['ratio']}, {out[case]['cpu_s_per_1000_tokens']}", flush=True)
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

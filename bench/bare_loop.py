"""What the system around the forward pass costs: the server beside a bare loop of the same steps.

    python -m bench.bare_loop --model DIR [--case 'short -c 8'] [--turns 8]

In each turn a server with ``--trace`` on gets some requests, with the load generator on the same cores, and then
the turn's batches run again on the worker's forward alone, in this process: packed beforehand, one after the other,
no sampling, no messages, no other process. Both give the same tokens, so the ratio of their rates is what
arrives at the client of what the forward could give; the turns are short, so that a machine that is faster at one
minute than at the next is in both. CPU seconds per 1,000 tokens of every process, the load generator's too, are
those of serving. The last line is one JSON object with medians over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import load, serve_bench, servers
from bench.serve_bench import Options
from common.messages import ForwardBatch, StepResult, WorkerReady, unpack_i32
from common.trace import SchedulerStep
from tools.replay.reader import read_run
from worker_proc.executor import StepExecutor
from worker_proc.packing import Row
from worker_proc.runner import ModelRunner, PackedBatch
from worker_proc.sampling.cpu import CpuSampler
from worker_proc.speculation.speculator import Speculator
from worker_proc.speculation.step_times import StepTimes

CASES = {"short -c 8": ("short", 8, 32), "short -c 32": ("short", 32, 96)}
"""Workload, concurrency, requests of a turn."""
SETTLE_S = 3.0
"""After so long a server without work has written its trace out."""


@dataclass(frozen=True)
class Recording:
    """The batches that a server has run, in order, and what its worker said of itself."""

    ready: WorkerReady
    batches: list[ForwardBatch]
    results: dict[int, StepResult]
    """By step."""


class SameDrafts(Speculator):
    """Gives each row as many drafts as it had in the recording. ``counts``: [R] of the step to come."""

    def __init__(self, max_drafts: int, context_length: int) -> None:
        super().__init__(max_drafts, context_length, StepTimes([1.0, 1.0], [1, 64]))
        self.counts: list[int] = []

    def add(self, rows: Sequence[Row], page_size: int) -> None:
        """See ``Speculator``."""
        for row in rows:
            if self.counts and self.counts[row.index]:
                self.propose(row, self.counts[row.index])
                row.num_drafts = len(row.proposal)
                row.length += row.num_drafts


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


def read_batches(folder: str) -> Recording:
    """What the scheduler has written so far. Raises RuntimeError before a worker was ready."""
    ready, batches, results = None, [], {}
    for segment in read_run(Path(folder)):
        for record in segment.records:
            if not isinstance(record, SchedulerStep):
                continue
            for message in record.messages:
                if isinstance(message, WorkerReady):
                    ready = ready or message
                elif isinstance(message, StepResult):
                    results[message.step] = message
            if record.batch is not None:
                batches.append(record.batch)
    if ready is None:
        raise RuntimeError(f"{folder}: no worker has become ready; is the server up?")
    return Recording(ready, batches, results)


class BareLoop:
    """The worker's forward in this process, and a server's pages and requests as its batches left them."""

    def __init__(self, model: str, ready: WorkerReady) -> None:
        self._runner = fast_runner(model, ready)
        self._taker = Taker(self._runner)
        self._drafts = SameDrafts(ready.max_drafts, ready.context_len)
        self._executor = StepExecutor(self._taker, CpuSampler(ready.threads), speculator=self._drafts)
        self._num_followed = 0

    def follow(self, recording: Recording) -> list[PackedBatch]:
        """Run those of a server's batches that are new; packed, as the forward took them.

        Raises RuntimeError where they do not give the ids that they gave the server.
        """
        self._taker.taken = []
        for batch in recording.batches[self._num_followed :]:
            recorded = recording.results[batch.step]
            self._drafts.counts = unpack_i32(recorded.num_drafts).tolist()
            if self._executor.execute(batch).ids != recorded.ids:
                raise RuntimeError(f"step {batch.step} gives other ids than it gave the server")
        self._num_followed = len(recording.batches)
        return self._taker.taken

    def seconds(self, packed: list[PackedBatch]) -> float:
        """Seconds of the forward alone. What it writes into pages is there already."""
        began = time.perf_counter()
        for batch in packed:
            self._runner.forward(batch)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the threads."""
        self._executor.close()


def fast_runner(model: str, ready: WorkerReady) -> ModelRunner:
    """The worker's CPU fast path with the server's pool. Raises SystemExit where there is none."""
    import torch
    from transformers import AutoModelForCausalLM

    from worker_proc.kernels.cpu.fast_runner import CpuFastRunner

    torch.set_num_threads(1)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    runner = CpuFastRunner.try_build(weights, ready.page_size, ready.threads, lambda words: None, ())
    if isinstance(runner, str):
        raise SystemExit(runner)
    runner.allocate(ready.num_pages)
    return runner


def take_turns(model: str, case: str, turns: int, folder: str, rest_s: float) -> dict[str, Any]:
    """Medians of a case over its turns. ``rest_s``: before the first, while both pools' memory is made real."""
    workload, concurrency, n = CASES[case]
    served, bare, ratios, cpu = [], [], [], []
    with servers.serve(servers.quintet("--trace", folder, model=model)) as server:
        asyncio.run(serve_bench.run(Options(server.url, "default", workload, concurrency, concurrency, seed=99)))
        time.sleep(SETTLE_S)
        loop = BareLoop(model, read_batches(folder).ready)
        try:
            loop.follow(read_batches(folder))
            time.sleep(rest_s)
            for turn in range(turns):
                served_load = load.put(server, Options(server.url, "default", workload, concurrency, n, turn, warmup=0))
                if served_load.run.errors:
                    raise RuntimeError(f"{len(served_load.run.errors)} requests failed: {served_load.run.errors[0]}")
                time.sleep(SETTLE_S)
                packed = loop.follow(read_batches(folder))
                served.append(served_load.summary["out_tok_s"])
                bare.append(served_load.tokens / loop.seconds(packed))
                ratios.append(served[-1] / bare[-1])
                cpu.append(served_load.summary["cpu_s_per_1000_tokens"])
                words = f"served {served[-1]:.1f} tokens/s, bare {bare[-1]:.1f}, ratio {ratios[-1]:.3f}"
                print(f"{case}: {words}", flush=True)
        finally:
            loop.close()
    cpu_s = {name: round(statistics.median(row.get(name, 0.0) for row in cpu), 3) for name in cpu[0]}
    return {
        "served_tok_s": statistics.median(served),
        "bare_tok_s": round(statistics.median(bare), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_s_per_1000_tokens": cpu_s,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a bf16 transformers model")
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rest-s", type=float, default=30.0, help="seconds between the start and the first turn")
    args = parser.parse_args()
    out: dict[str, Any] = {}
    for case in args.case or CASES:
        with tempfile.TemporaryDirectory(prefix="quintet-bare-") as folder:
            out[case] = take_turns(args.model, case, args.turns, folder, args.rest_s)
        print(f"{case}: median ratio {out[case]['ratio']}, {out[case]['cpu_s_per_1000_tokens']}", flush=True)
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

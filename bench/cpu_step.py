"""Time of single steps of the CPU fast path, beside the limits measured in the same run.

    python -m bench.cpu_step --model DIR [--threads N] [--isa NAME] [--profile] [--only TEXT]

Cases: decoding 1, 8 and 32 rows at contexts of 100 and 1000, 8 rows that share 1000 tokens, prefill
of 512 tokens and of 8 x 46, and 32 new tokens on 1000 cached. Median of the repetitions. For each:
bytes read (weights and KV once) over time against the read bandwidth of the same threads, and
multiply-adds over time against the tile kernel's rate in the first-level cache. No sampling, no
server. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from bench.timing import on_threads
from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
from worker_proc.kernels.cpu.isa import Isa
from worker_proc.kernels.cpu.kernels import build
from worker_proc.kernels.cpu.packing import huge_buffer
from worker_proc.kernels.cpu.tiles import STEP_BYTES, tile_config
from worker_proc.runner import PackedBatch

NUM_PAGES = 6144


@dataclass(frozen=True)
class Case:
    """``rows`` sequences of ``context`` tokens, of which ``new`` are computed in the step."""

    name: str
    rows: int
    context: int
    new: int
    shared: int = 0
    """Leading tokens whose pages all sequences share."""


CASES = (
    Case("decode 1, context 100", 1, 100, 1),
    Case("decode 1, context 1000", 1, 1000, 1),
    Case("decode 8, context 100", 8, 100, 1),
    Case("decode 8, context 1000", 8, 1000, 1),
    Case("decode 8, context 1100, 1024 shared", 8, 1100, 1, 1024),
    Case("decode 32, context 100", 32, 100, 1),
    Case("decode 32, context 1000", 32, 1000, 1),
    Case("prefill 512", 1, 512, 512),
    Case("prefill 8 x 46", 8, 46, 46),
    Case("32 new on 1000 cached", 1, 1032, 32),
)


def make_batch(case: Case, page_size: int, vocab: int) -> PackedBatch:
    """A random batch of a case, on scattered pages."""
    rng = np.random.default_rng(0)
    pages = -(-case.context // page_size)
    table = rng.permutation(NUM_PAGES)[: case.rows * pages].reshape(case.rows, pages).astype(np.int32)
    table[:, : case.shared // page_size] = table[0, : case.shared // page_size]
    starts = np.arange(case.rows + 1, dtype=np.int32) * case.new
    positions = np.tile(np.arange(case.context - case.new, case.context, dtype=np.int32), case.rows)
    return PackedBatch(
        ids=rng.integers(0, vocab, case.rows * case.new).astype(np.int32),
        positions=positions,
        query_start=starts,
        context_lens=np.full(case.rows, case.context, np.int32),
        page_table=table,
        logit_rows=(starts[1:] - 1).astype(np.int32),
    )


def read_bandwidth(num_threads: int) -> Callable[[], float]:
    """A function that measures GB/s of reading 256 MiB."""
    data = huge_buffer(256 << 20, "bandwidth test")
    data[:] = 1
    words = data.view(np.int64)
    share = words.size // num_threads

    @njit(nogil=True)
    def fold(part: Any) -> Any:
        total = np.int64(0)
        for i in range(part.size):
            total ^= part[i]
        return total

    fold(words[:8])
    return lambda: data.size / 1e9 / on_threads(num_threads, lambda t: fold(words[t * share : (t + 1) * share]))


def tile_rate(isa: Isa, num_threads: int) -> Callable[[], float]:
    """A function that measures GFLOP/s of the largest tile on data in the first-level cache."""
    kernels = build(isa)
    dot, rows, steps, repeats = kernels.dot_rows, isa.row_tiles[0], 8, 20000
    ldx = 32 * steps * isa.activation_bytes
    configure = kernels.configure_tiles
    config = np.frombuffer(tile_config(False), np.uint8)
    buffers = [np.zeros(1 << 17, np.uint8) for _ in range(num_threads)]

    @njit(nogil=True)
    def setup(address: int) -> None:
        if configure is not None:
            configure(address)

    @njit(nogil=True)
    def loop(base: int) -> None:
        for _ in range(repeats):
            w = base + 32768
            dot(rows, base, ldx, w, w + STEP_BYTES, steps, 2 * STEP_BYTES, base + 65536, 128, w, 0)

    def work(tid: int) -> None:
        if configure is not None:
            setup(config.ctypes.data)
        loop((buffers[tid].ctypes.data + 63) // 64 * 64)

    flops = 2 * rows * 32 * 32 * steps * repeats * num_threads
    on_threads(1, work)
    return lambda: flops / 1e9 / on_threads(num_threads, work)


def work_of(case: Case, runner: CpuFastRunner) -> tuple[float, float]:
    """(bytes that must be read, floating point operations) of a step."""
    d = runner._image.shape
    per_layer = d.hidden * d.head_dim * (2 * d.num_heads + 2 * d.num_kv_heads) + 3 * d.hidden * d.inner
    tokens = case.rows * case.new
    kv_token = 4 * d.num_kv_heads * d.head_dim * d.num_layers
    seen = case.context - (case.new - 1) / 2
    flops: float = 2 * tokens * per_layer * d.num_layers + 2 * case.rows * d.hidden * d.vocab
    flops += 4 * tokens * seen * d.num_heads * d.head_dim * d.num_layers
    own = case.rows * (case.context - case.shared) + case.shared
    return runner._image.read_bytes + kv_token * own, flops


def write_pool(runner: CpuFastRunner) -> None:
    """A page that was never written is read from one page of zeros, and by a map of 4 KiB: not what a server sees."""
    if runner._pool is not None:
        runner._pool.pages[:, ::4096] = 0


def run_case(case: Case, runner: CpuFastRunner, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of each repetition, and the calling thread's processor seconds: on a machine shared with
    others the former also counts the time the core was theirs."""
    batch = make_batch(case, runner.page_size, runner.vocab_size)
    runner.forward(batch)
    times: list[float] = []
    busy: list[float] = []
    started = time.perf_counter()
    while len(times) < 7 or (time.perf_counter() - started < seconds and len(times) < 101):
        before, before_busy = time.perf_counter(), time.thread_time()
        runner.forward(batch)
        times.append(time.perf_counter() - before)
        busy.append(time.thread_time() - before_busy)
    return times, busy


def show_profile(runner: CpuFastRunner, case: Case) -> None:
    """Milliseconds of each phase in a step."""
    batch, steps = make_batch(case, runner.page_size, runner.vocab_size), 10
    runner.profile(True)
    for _ in range(steps):
        runner.forward(batch)
    found = runner.profile(False)
    parts = [f"{name} " + "/".join(f"{ms / steps:.2f}" for ms in times) for name, times in found.items()]
    print("    ms, processor / wall / waiting: " + "  ".join(parts))


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder of a bf16 transformers model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--isa", default="", help="one of the names in worker_proc/kernels/cpu/isa.py")
    parser.add_argument("--seconds", type=float, default=1.5, help="per case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    runner = CpuFastRunner.try_build(
        model, args.page_size, args.threads, print, (args.isa,) if args.isa else ()
    )
    if isinstance(runner, str):
        raise SystemExit(runner)
    del model
    runner.allocate(NUM_PAGES)
    write_pool(runner)
    bandwidth, rate = read_bandwidth(args.threads), tile_rate(runner.isa, args.threads)
    limits: dict[str, list[float]] = {"gb_s": [], "gflop_s": []}
    results = {}
    for case in CASES:
        if args.only not in case.name:
            continue
        # The best of three: what others take from a shared machine is not a limit of the machine.
        limits["gb_s"].append(max(bandwidth() for _ in range(3)))
        limits["gflop_s"].append(max(rate() for _ in range(3)))
        times, busy = run_case(case, runner, args.seconds)
        middle, busy_ms = statistics.median(times), statistics.median(busy) * 1e3
        read, flops = work_of(case, runner)
        results[case.name] = {
            "ms": round(middle * 1e3, 3), "min_ms": round(min(times) * 1e3, 3),
            "cpu_ms": round(busy_ms, 3), "repeats": len(times),
            "gb_s": round(read / middle / 1e9, 2), "gflop_s": round(flops / middle / 1e9, 1),
        }  # fmt: skip
        print(f"{case.name:38s} {middle * 1e3:8.2f} ms (min {min(times) * 1e3:7.2f}, cpu {busy_ms:7.2f})  "
              f"{read / middle / 1e9:6.1f} GB/s  {flops / middle / 1e9:7.1f} GFLOP/s", flush=True)  # fmt: skip
        if args.profile:
            show_profile(runner, case)
    summary = {name: {"median": round(statistics.median(v), 1), "max": round(max(v), 1)} for name, v in limits.items()}
    print(f"limits of {args.threads} threads: {summary}")
    print(json.dumps({"isa": runner.isa.name, "threads": args.threads, "limits": summary, "steps": results}))
    runner.close()


if __name__ == "__main__":
    main()

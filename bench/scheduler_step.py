"""The scheduler's own time: decode-only steps beside a full cache, and matching a long prompt.

    python -m bench.scheduler_step [--sequences 100000] [--running 1000] [--steps 600]
    python -m bench.scheduler_step --cold [--running 8] [--trace]

The pool holds ``--sequences`` cached sequences (64 to 192 tokens, half of them behind shared prefixes) and
``--running`` requests decode. A step takes in one StepResult, commits it, builds the next batch and the next
TokenBatch; encoding messages is measured apart. ``wall`` is what passed, ``cpu`` what the thread itself used: on a
machine that does other work too, the second is the scheduler's. With ``--cold`` instead: the whole process beside a
worker that computes (``bench/scheduler_cold.py``). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from bench.scheduler_cold import measure_cold
from common.config import SchedulerConfig, ServerConfig
from common.messages import (
    ForwardBatch,
    Reset,
    SamplingParams,
    StepResult,
    TextParams,
    Tokenized,
    WorkerReady,
    pack_i32,
)
from scheduler_proc.main import tune_gc
from scheduler_proc.scheduler import Scheduler

PAGE = 16
EOS = 2


def ready(epoch: int, num_pages: int, max_slots: int) -> WorkerReady:
    """A worker that is not there."""
    return WorkerReady(
        epoch=epoch, generation=0, rank=0, num_pages=num_pages, page_size=PAGE, context_len=8192, vocab_size=32000,
        max_slots=max_slots, model_path="none", batch_invariant=True, dtype="none", device="none", threads=0,
    )  # fmt: skip


def answer(batch: ForwardBatch, rng: np.random.Generator) -> StepResult:
    """One id for each row (never an end)."""
    rows = len(batch.slots) // 4
    ids = rng.integers(10, 32000, rows)
    ones = np.ones(rows, dtype=np.int32)
    return StepResult(epoch=batch.epoch, step=batch.step, num_ids=pack_i32(ones), ids=pack_i32(ids), flags=bytes(rows),
                      forward_s=0.02)  # fmt: skip


def fill_cache(scheduler: Scheduler, sequences: int, rng: np.random.Generator) -> None:
    """Put sequences into the tree as finished requests would have."""
    pool = scheduler.state.need_pool()
    prefixes = rng.integers(10, 32000, (100, 4 * PAGE))
    for i in range(sequences):
        own = rng.integers(10, 32000, int(rng.integers(4, 9)) * PAGE)
        ids = np.concatenate([prefixes[i % 100], own]) if i % 2 else own
        num_pages = len(ids) // PAGE
        pages = pool.allocator.alloc(num_pages)
        if pages is None:
            raise SystemExit(f"the pool is full after {i} sequences")
        pool.tree.insert("", pack_i32(ids), pages)
        pool.allocator.release(pages)


def start_requests(scheduler: Scheduler, running: int, rng: np.random.Generator) -> Iterator[Tokenized]:
    """Requests that decode for as long as the benchmark runs."""
    for i in range(running):
        prompt = rng.integers(10, 32000, int(rng.integers(64, 512)))
        sampling = SamplingParams(max_tokens=4000)
        yield Tokenized(rid=f"request-{i:06d}", gateway="gateway-0", input_ids=pack_i32(prompt), sampling=sampling,
                        eos_token_ids=(EOS,), text=TextParams())  # fmt: skip


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds."""
    return time.perf_counter(), time.thread_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Milliseconds since ``clocks()``: wall, CPU."""
    wall, cpu = clocks()
    return (wall - began[0]) * 1e3, (cpu - began[1]) * 1e3


def percentiles(name: str, samples: list[tuple[float, float]]) -> dict[str, float]:
    """p50 and p99 of (wall, CPU) milliseconds."""
    out = {}
    for i, clock in enumerate(("wall", "cpu")):
        for p in (50, 99):
            out[f"{name}_{clock}_p{p}_ms"] = float(np.percentile([sample[i] for sample in samples], p))
    return out


def measure_steps(scheduler: Scheduler, running: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds of each decode-only step, pipelined as in the server."""
    now = 1.0
    messages = list(start_requests(scheduler, running, rng))
    flying: list[ForwardBatch] = []
    out = scheduler.step(messages, now)  # type: ignore[arg-type]
    took: list[tuple[float, float]] = []
    encode: list[float] = []
    encoder = msgspec.msgpack.Encoder()
    tune_gc()
    while len(took) < steps:
        flying += [order for order in out.to_worker if isinstance(order, ForwardBatch)]
        result = answer(flying.pop(0), rng)
        now += 0.02
        began = clocks()
        out = scheduler.step([result], now, max_batches=1)
        elapsed = since(began)
        rows = [len(order.slots) // 4 for order in out.to_worker if isinstance(order, ForwardBatch)]
        decode_only = not scheduler.state.queue and rows == [running] and out.tokens and len(out.tokens.rows) == running
        if decode_only:
            took.append(elapsed)
            began = clocks()
            encoder.encode(out.tokens)
            encoder.encode(out.to_worker[0])
            encode.append(since(began)[1])
    return percentiles("step", took) | {"encode_cpu_p50_ms": float(np.percentile(encode, 50))}


def measure_match(scheduler: Scheduler, rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds of ``match`` for a 4,000-token prompt that is cached in pieces, whole, and not at all."""
    pool = scheduler.state.need_pool()
    ids = rng.integers(10, 32000, 4000)
    data = pack_i32(ids)
    in_pieces = rng.integers(10, 32000, 4000)
    pool.ensure(1000)
    chain = pack_i32(in_pieces)
    both: tuple[tuple[bytes, Iterable[int]], ...] = ((data, [250]), (chain, range(1, 251)))
    for prompt, lengths in both:
        held = pool.allocator.alloc(250)
        if held is None:
            raise SystemExit("the pool is full")
        for end in lengths:  # one node per page is the deepest path a prompt of this length can have
            pool.tree.insert("", prompt, held[:end])
        pool.allocator.release(held)
    out: dict[str, float] = {}
    prompts = {"whole": data, "pieces": chain, "none": pack_i32(rng.integers(10, 32000, 4000))}
    for name, prompt in prompts.items():
        times = []
        for _ in range(500):
            began = clocks()
            pool.tree.match("", prompt, 249)
            times.append(since(began))
        out |= percentiles(f"match_{name}", times)
    return out


def report(settings: dict[str, int], result: dict[str, float]) -> None:
    """Print the figures, and all in one line of JSON."""
    for name, value in result.items():
        print(f"{name:26} {value:8.3f}")
    print(json.dumps(settings | {name: round(value, 4) for name, value in result.items()}))


def main() -> None:
    """Build the state, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--running", type=int, help="requests (default: 1000, with --cold 8)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--cold", action="store_true", help="the process, while others use the caches")
    parser.add_argument("--trace", action="store_true", help="with --cold: it records what it does")
    args = parser.parse_args()
    if args.cold:
        args.running = args.running or 8
        report({"running": args.running}, measure_cold(args.running, windows=4, seconds=4.0, trace=args.trace))
        return
    args.running = args.running or 1000
    rng = np.random.default_rng(0)
    config = ServerConfig(
        scheduler=SchedulerConfig(
            max_running_requests=args.running, chunked_prefill_size=1 << 20, schedule_conservativeness=0.01
        )
    )
    scheduler = Scheduler(config)
    num_pages = args.sequences * 8 + args.running * (4500 // PAGE)
    reset = scheduler.step([ready(0, num_pages, args.running)], 0.0).to_worker[0]
    if isinstance(reset, Reset):
        scheduler.step([ready(reset.epoch, num_pages, args.running)], 0.0)
    began = time.perf_counter()
    fill_cache(scheduler, args.sequences, rng)
    tree, took_s = scheduler.state.need_pool().tree, time.perf_counter() - began
    print(f"{args.sequences} sequences, {tree.num_nodes} nodes, {tree.num_pages} pages cached in {took_s:.1f} s")
    result = measure_match(scheduler, rng) | measure_steps(scheduler, args.running, args.steps, rng)
    report({"sequences": args.sequences, "running": args.running}, result)


if __name__ == "__main__":
    main()

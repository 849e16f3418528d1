"""Decode steps of a whole model by number of rows, against the time that reading the weights and the KV takes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.gpu_kernels import Machine
from worker_proc.generic.graphs import CudaCapture
from worker_proc.generic.runner import GenericRunner
from worker_proc.runner import PackedBatch

PAGE = 16


def step_table(machine: Machine, shape: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """One line per number of rows, launched from Python and, on a GPU, as a graph; and a prefill chunk."""
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
    model = model.eval().requires_grad_(False)
    runner = GenericRunner(model, PAGE, attention="triton")
    context, sizes = (20, (1, 2)) if tiny else (1024, (1, 2, 4, 8, 16, 32, 64))
    width = -(-context // PAGE)
    runner.allocate(width * sizes[-1])
    # One row of the embedding per token is read, not the table.
    weights = runner.weight_bytes() - model.get_input_embeddings().weight.nbytes
    kv_bytes = runner.kv_bytes_per_page() / PAGE * context
    modes = ["launches"]
    out = []
    for mode in [*modes, "graph"] if machine.device.type == "cuda" else modes:
        if mode == "graph":
            runner.record_graphs(sizes[-1], CudaCapture(), lambda line: None)
        for rows in sizes:
            floor = (weights + rows * kv_bytes) / machine.bytes_per_s
            took = step_seconds(runner, decode_batch(rows, context, width), machine)
            out.append({"step": f"decode, {rows} rows, {mode}", "ms": took * 1e3, "floor_ms": floor * 1e3,
                        "ratio": took / floor})  # fmt: skip
    chunk = context
    positions, one = np.arange(chunk, dtype=np.int32), np.array([chunk], np.int32)
    table = np.arange(width, dtype=np.int32)[None]
    batch = PackedBatch(positions % 7, positions, np.array([0, chunk], np.int32), one, table, one - 1)
    took, floor = step_seconds(runner, batch, machine), 2 * (weights / 2) * chunk / machine.flops_per_s
    out.append({"step": f"prefill, {chunk} tokens", "ms": took * 1e3, "floor_ms": floor * 1e3, "ratio": took / floor})
    runner.close()
    return out


def decode_batch(rows: int, context: int, width: int) -> PackedBatch:
    """One token for each of ``rows`` sequences of ``context`` positions."""
    arange, lens = np.arange(rows, dtype=np.int32), np.full(rows, context, np.int32)
    table = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    return PackedBatch(arange + 3, lens - 1, np.arange(rows + 1, dtype=np.int32), lens, table, arange)


def step_seconds(runner: GenericRunner, batch: PackedBatch, machine: Machine) -> float:
    """Median wall time of a step, from plan to finished logits: what the step loop would see."""
    times = []
    for turn in range(machine.repeats + 2):
        started = time.perf_counter()
        runner.forward(batch)
        if machine.device.type == "cuda":
            torch.cuda.synchronize(machine.device)
        if turn >= 2:
            times.append(time.perf_counter() - started)
    return float(np.median(times))

"""Each GPU kernel's time against its floor: bytes over measured bandwidth, or operations over the measured rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.messages import SamplingParams
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.attention.triton_backend import TritonBackend
from worker_proc.device_io import make_io
from worker_proc.kernels.cuda.activation import gate_mul
from worker_proc.kernels.cuda.norm import rms_norm
from worker_proc.runner import PackedBatch
from worker_proc.sampling.gpu import GpuSampler
from worker_proc.sampling.request import SampleRequest

PAGE = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """What the device can do, as measured."""

    device: torch.device
    bytes_per_s: float
    flops_per_s: float
    repeats: int


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of ``work``, after two warm-up runs."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def measure_machine(device: torch.device, tiny: bool) -> Machine:
    """Bandwidth by copying, rate by a square matrix product in bfloat16."""
    repeats = 3 if tiny else 20
    source = torch.zeros(2**20 if tiny else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = seconds(lambda: target.copy_(source), device, repeats)
    side = 128 if tiny else 8192
    a = torch.randn(side, side, device=device).bfloat16()
    multiplying = seconds(lambda: a @ a, device, repeats)
    return Machine(device, 2 * source.numel() / copying, 2 * side**3 / multiplying, repeats)


def report(name: str, machine: Machine, took: float, num_bytes: float = 0.0, flops: float = 0.0) -> dict[str, Any]:
    """One line of the table."""
    floor = max(num_bytes / machine.bytes_per_s, flops / machine.flops_per_s)
    return {"kernel": name, "us": took * 1e6, "floor_us": floor * 1e6, "ratio": took / floor}


def attention_case(machine: Machine, lens: list[tuple[int, int]], spec: LayerSpec, groups: int) -> Callable[[], object]:
    """``attend`` for sequences of (cached, new) positions, pages in order."""
    dtype, device = torch.bfloat16, machine.device
    backend = TritonBackend((spec,), PAGE, 32_768, dtype, make_io(device))
    widths = [-(-(cached + new) // PAGE) for cached, new in lens]
    table, taken = np.zeros((len(lens), max(widths)), np.int32), 0
    for row, width in zip(table, widths, strict=True):
        row[:width] = np.arange(taken, taken + width)
        taken += width
    starts = np.concatenate([[0], np.cumsum([new for _, new in lens])]).astype(np.int32)
    batch = PackedBatch(
        ids=np.zeros(starts[-1], np.int32),
        positions=np.concatenate([np.arange(c, c + n, dtype=np.int32) for c, n in lens]),
        query_start=starts, context_lens=np.array([c + n for c, n in lens], np.int32), page_table=table,
        logit_rows=starts[1:] - 1,
    )  # fmt: skip
    plan, args = backend.plan(batch), AttentionArgs(spec.key_dim**-0.5)
    query = torch.randn(int(starts[-1]), spec.num_kv_heads * groups, spec.key_dim, device=device).to(dtype)
    keys, values = (
        torch.randn(taken * PAGE, spec.num_kv_heads, spec.key_dim, device=device).to(dtype) for _ in range(2)
    )
    return lambda: backend.attend(query, keys, values, plan, spec, args)


def kernel_table(machine: Machine, shape: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """Every kernel in the shapes of the model."""
    kv_heads, heads = shape["num_key_value_heads"], shape["num_attention_heads"]
    dim, device, repeats = shape["hidden_size"] // heads, machine.device, machine.repeats
    spec, out = LayerSpec(kv_heads, dim, dim), []
    context, sizes = (40, (1, 2)) if tiny else (1024, (1, 8, 64))
    for rows in sizes:
        work = attention_case(machine, [(context - 1, 1)] * rows, spec, heads // kv_heads)
        num_bytes = rows * context * kv_heads * dim * 2 * 2
        name = f"decode attention, {rows} x {context}"
        out.append(report(name, machine, seconds(work, device, repeats), num_bytes))
    chunk = 32 if tiny else 4096
    work = attention_case(machine, [(0, chunk)], spec, heads // kv_heads)
    flops = 2 * chunk * (chunk + 1) * heads * dim
    out.append(report(f"extend attention, {chunk}", machine, seconds(work, device, repeats), flops=flops))
    for rows in (2,) if tiny else (64, 4096):
        x = torch.randn(rows, shape["hidden_size"], device=device).bfloat16()
        weight, residual, normed = x[0].clone(), x.clone(), torch.empty_like(x)

        def norm(x: torch.Tensor = x, weight: torch.Tensor = weight, residual: torch.Tensor = residual,
                 normed: torch.Tensor = normed) -> None:  # fmt: skip
            rms_norm(x, weight, 1e-6, normed, residual=residual)

        out.append(report(f"add and norm, {rows}", machine, seconds(norm, device, repeats), 4 * x.nbytes))
        gate = torch.randn(rows, shape["intermediate_size"], device=device).bfloat16()
        took = seconds(lambda gate=gate: gate_mul(gate, gate), device, repeats)  # type: ignore[misc]
        out.append(report(f"silu and product, {rows}", machine, took, 3 * gate.nbytes))
    return out + sampling_table(machine, shape["vocab_size"], tiny)


def sampling_table(machine: Machine, vocab_size: int, tiny: bool) -> list[dict[str, Any]]:
    """Sampling with its copies, for 64 rows: greedy, plain draws, top-k and top-p."""
    rows, out = 2 if tiny else 64, []
    logits = torch.randn(rows, vocab_size, device=machine.device) * 3
    sampler, none = GpuSampler(make_io(machine.device)), np.empty(0, np.int32)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0}, "temperature": {}, "top-p 0.9": {"top_p": 0.9}, "top-k 50": {"top_k": 50},
    }  # fmt: skip
    for name, kind in kinds.items():
        requests = [SampleRequest(r, SamplingParams(seed=r, **kind), 0, none, 0) for r in range(rows)]
        took = seconds(lambda requests=requests: sampler.sample(logits, requests), machine.device, 3 if tiny else 10)  # type: ignore[misc]
        out.append(report(f"sampling, {name}, {rows} rows", machine, took, logits.nbytes))
    return out

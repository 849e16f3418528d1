"""A first measurement of int8 weights on AMX, as ground for a later step.

    python -m bench.int8_weights [--model DIR] [--threads 2]

**Speed**: the linear layers of one step of SmolLM2-135M's shape, its head included, as the fast path runs
them (panels of 32 columns, one tile kernel, an epilogue), once with bf16 weights and ``tdpbf16ps`` and once
with int8 weights and activations and ``tdpbssd``, whose panels have half the bytes and half the steps. The
int8 figure includes making int8 of every activation row (its largest magnitude, then rounding) and an epilogue that
scales the sums. Attention, norms and sampling are the same for both and left out.

**Accuracy** (with ``--model``): weights rounded to int8 per output column and activations per row, in torch, beside
the model in float32 and in bf16: the median relative error of a row of logits, and how often the likeliest token
is the same, over the prompts' positions.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from bench.timing import on_threads
from worker_proc.kernels.cpu import isa
from worker_proc.kernels.cpu.kernels import build
from worker_proc.kernels.cpu.packing import huge_buffer
from worker_proc.kernels.cpu.tiles import ACC, GEMM_A, GEMM_B, STEP_BYTES, tile_config
from worker_proc.kernels.cpu.vector_ir import I8, I64, PTR, V16F, V16I, VOID, VectorEmitter

LAYERS = 30
LINEARS = ((576, 960), (576, 576), (576, 3072), (1536, 576))
"""(inputs, outputs) of q/k/v, o, gate/up, down."""
HEAD = (576, 49152)
ROWS = (1, 8, 32, 96, 512)
PROMPTS = (
    "The river rises in the mountains and flows through three countries before it reaches the sea. ",
    "def fibonacci(n):\n    a, b = 0, 1\n    while a < n:\n        yield a\n        a, b = b, a + b\n",
    "In 1969 two people walked on the moon for the first time, while a third waited in orbit around it. ",
)


def make_int8_dot(rows: int) -> Any:
    """``dot(x, ldx, w, steps, out)``: as the bf16 tile kernel, on int8; a step is 64 inputs. Sums are int32."""

    @intrinsic
    def dot(tc: Any, x: Any, ldx: Any, w: Any, steps: Any, out: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, ldx, w, steps, out = args
            e = VectorEmitter(b, isa.AMX)

            def tile(n: int) -> Any:
                return ir.Constant(I8, n)

            def load(n: int, address: Any, stride: Any) -> None:
                e.call("llvm.x86.tileloadd64", VOID, tile(n), b.inttoptr(address, PTR), stride)

            for acc in ACC[: rows // 8]:
                e.call("llvm.x86.tilezero", VOID, tile(acc))
            with cgutils.for_range(b, steps, intp=I64) as loop:
                at = b.add(w, b.mul(loop.index, e.i64(2 * STEP_BYTES)))
                for line in range(0, 2 * STEP_BYTES, 64):
                    e.prefetch(e.at(at, 2048 + line))
                for j in range(2):
                    load(GEMM_B[j], e.at(at, j * STEP_BYTES), e.i64(64))
                    for m in range(rows // 16):
                        if j == 0:
                            load(GEMM_A[m], e.at(e.at(x, loop.index, 64), e.at(e.i64(0), ldx, 16 * m)), ldx)
                        e.call("llvm.x86.tdpbssd", VOID, tile(ACC[2 * m + j]), tile(GEMM_A[m]), tile(GEMM_B[j]))
            for m in range(rows // 16):
                for j in range(2):
                    place = e.at(e.at(out, 16 * m * 128), 64 * j)
                    e.call("llvm.x86.tilestored64", VOID, tile(ACC[2 * m + j]), b.inttoptr(place, PTR), e.i64(128))
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 5), emit

    return dot


@intrinsic
def scale_sums(tc: Any, sums: Any, rows: Any, scales: Any, columns: Any, out: Any, ldo: Any) -> Any:
    """out = sums * scale of the row * scale of the column, float32; 32 columns."""

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        sums, rows, scales, columns, out, ldo = args
        e = VectorEmitter(b, isa.AMX)
        column = [e.load(e.at(columns, 64 * j), V16F) for j in range(2)]
        with cgutils.for_range(b, rows, intp=I64) as loop:
            scale = e.splat(e.load(e.at(scales, loop.index, 4), ir.FloatType()))
            for j in range(2):
                whole = e.load(e.at(e.at(sums, loop.index, 128), 64 * j), V16I)
                value = b.fmul(b.fmul(b.sitofp(whole, V16F), scale), column[j])
                e.store(value, e.at(b.add(out, b.mul(loop.index, ldo)), 64 * j))
        return ctx.get_dummy_value()

    return types.void(*(types.int64,) * 6), emit


@njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def quantize_rows(x: Any, out: Any, scales: Any) -> None:
    """int8 of each row of float32 ``x``, and the scales that undo it."""
    for r in range(x.shape[0]):
        most = np.float32(0)
        for i in range(x.shape[1]):
            most = max(most, abs(x[r, i]))
        factor = np.float32(127) / max(most, np.float32(1e-30))
        scales[r] = np.float32(1) / factor
        for i in range(x.shape[1]):
            out[r, i] = np.int8(np.rint(x[r, i] * factor))


class Bench:
    """Buffers and compiled loops; ``bf16_ms`` and ``int8_ms`` are the two sides."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.weights = huge_buffer(290 << 20, "weights")
        self.weights[:] = 1
        self.config = np.frombuffer(tile_config(False), np.uint8).copy()
        self.x = np.ones((512 + 32, 1536 + 32), np.float32)
        self.q = np.zeros((512 + 32, 1536 + 64), np.int8)
        self.scales = np.ones(544, np.float32)
        self.out = np.zeros((num_threads, 544, 3072), np.float32)
        self.sums = np.zeros((num_threads, 8192), np.uint8)
        kernels = build(isa.AMX)
        self.bf16, self.int8 = _make_bf16(kernels), _make_int8(kernels)

    def ms(self, rows: int, int8: bool) -> float:
        """Milliseconds of all linear layers for ``rows`` rows (logits of at most 32); the best of nine."""
        run = self.int8 if int8 else self.bf16
        layers = np.array(LINEARS * LAYERS + (HEAD,), np.int64)

        def work(tid: int) -> None:
            run(
                self.config.ctypes.data, self.weights.ctypes.data, layers, rows, tid, self.num_threads, self.x,
                self.q, self.scales, self.out[tid], (self.sums[tid].ctypes.data + 63) // 64 * 64,
            )  # fmt: skip

        on_threads(self.num_threads, work)
        return 1e3 * min(on_threads(self.num_threads, work) for _ in range(9))


def _make_run(kernels: Any, inputs_a_step: int, prepare: Any, multiply: Any) -> Any:
    """One thread's share of all linear layers, compiled; the two sides differ in these three alone.

    ``prepare(x, q, scales, inputs, first, last)`` rows of activations, then for every panel of 32 columns and block
    of 32 rows ``multiply(x, q, scales, first row, rows, panel, steps, sums, place of the result)``.
    """
    configure = kernels.configure_tiles

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def run(
        config: int, weights: int, layers: Any, rows: int, tid: int, nt: int, x: Any, q: Any, scales: Any, out: Any,
        sums: int,
    ) -> None:  # fmt: skip
        configure(config)
        at = weights
        for index in range(layers.shape[0]):
            inputs = layers[index, 0]
            steps, panels = inputs // inputs_a_step, layers[index, 1] // 32
            n = min(rows, 32) if index + 1 == layers.shape[0] else rows
            prepare(x, q, scales, inputs, tid * n // nt, (tid + 1) * n // nt)
            for panel in range(tid * panels // nt, (tid + 1) * panels // nt):
                w = at + panel * steps * 2048
                for r in range(0, n, 32):
                    place = out.ctypes.data + r * 12288 + panel % 96 * 128
                    multiply(x, q, scales, r, n - r, w, steps, sums, place)
            at += panels * steps * 2048
        configure(0)

    return run


def _make_bf16(kernels: Any) -> Any:
    first, dot, store = kernels.dot_rows_first, kernels.dot_rows, kernels.epilogues["store"]

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def prepare(x: Any, q: Any, scales: Any, inputs: int, begin: int, end: int) -> None:
        pass

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def multiply(x: Any, q: Any, scales: Any, r: int, n: int, w: int, steps: int, sums: int, place: int) -> None:
        xr = x.ctypes.data + r * 1216
        if r == 0:
            first(n, xr, 1216, w, w + 1024, steps, 2048, sums, 128, 0, 0)
        else:
            dot(n, xr, 1216, w, w + 1024, steps, 2048, sums, 128, 0, 0)
        store(sums, min(32, n), 0, place, 12288)

    return _make_run(kernels, 32, prepare, multiply)


def _make_int8(kernels: Any) -> Any:
    dot32, dot16 = make_int8_dot(32), make_int8_dot(16)

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def prepare(x: Any, q: Any, scales: Any, inputs: int, begin: int, end: int) -> None:
        quantize_rows(x[begin:end, :inputs], q[begin:end, :inputs], scales[begin:end])

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def multiply(x: Any, q: Any, scales: Any, r: int, n: int, w: int, steps: int, sums: int, place: int) -> None:
        xr = q.ctypes.data + r * 1600
        if n > 16:
            dot32(xr, 1600, w, steps, sums)
        else:
            dot16(xr, 1600, w, steps, sums)
        scale_sums(sums, min(32, n), scales.ctypes.data + 4 * r, scales.ctypes.data, place, 12288)

    return _make_run(kernels, 64, prepare, multiply)


def accuracy(model_dir: str) -> dict[str, dict[str, float]]:
    """Median relative error of a row of logits and agreement of the likeliest token, beside float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [tokenizer(text * 6, return_tensors="pt").input_ids for text in PROMPTS]

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return torch.cat([model(ids).logits[0].float() for ids in prompts])

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    exact = logits(model)
    rounded = logits(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16))

    def forward(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return ((x / scale).round() * scale,)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            module.weight = torch.nn.Parameter((module.weight.detach() / scale).round() * scale, requires_grad=False)
            module.register_forward_pre_hook(forward)
    out = {}
    for name, found in (("bf16", rounded), ("int8", logits(model))):
        error = ((found - exact).norm(dim=1) / exact.norm(dim=1)).median().item()
        same = (found.argmax(1) == exact.argmax(1)).float().mean().item()
        out[name] = {"relative_error": round(error, 4), "same_token": round(same, 4), "positions": len(exact)}
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a transformers model, for the accuracy")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = isa.detect(("amx_bf16",))
    if isinstance(found, str):
        raise SystemExit(found)
    bench = Bench(args.threads)
    out: dict[str, Any] = {"ms": {}}
    for rows in ROWS:
        pairs = [(bench.ms(rows, False), bench.ms(rows, True)) for _ in range(args.rounds)]
        bf16, int8 = (statistics.median(side) for side in zip(*pairs, strict=True))
        out["ms"][rows] = {"bf16": round(bf16, 2), "int8": round(int8, 2), "ratio": round(bf16 / int8, 2)}
        print(f"{rows:4d} rows: bf16 {bf16:7.2f} ms, int8 {int8:7.2f} ms, {bf16 / int8:.2f} times as fast", flush=True)
    if args.model:
        out["accuracy"] = accuracy(args.model)
        print(out["accuracy"])
    print(json.dumps(out))


if __name__ == "__main__":
    main()

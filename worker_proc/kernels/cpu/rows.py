"""Vector loops over one row of float32: the parts of RMS norms.

Rows are padded with zeros to a multiple of 32 (see ``layout.py``), so there is no tail. The sum of
squares runs in two accumulators in a fixed order: the same for every row, wherever it is called.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker_proc.kernels.cpu.epilogue import ordered_sum
from worker_proc.kernels.cpu.isa import Isa
from worker_proc.kernels.cpu.vector_ir import I64, V16F, VectorEmitter


def make_sum_squares(isa: Isa) -> Any:
    """``sum_squares(x, n) -> float32``: x the address of n float32, n a multiple of 32."""

    @intrinsic
    def sum_squares(tc: Any, x: Any, n: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, n = args
            e = VectorEmitter(b, isa)
            totals = [cgutils.alloca_once(b, V16F) for _ in range(2)]
            for total in totals:
                b.store(e.zero(), total)
            with cgutils.for_range(b, b.lshr(n, e.i64(5)), intp=I64) as loop:
                for j, total in enumerate(totals):
                    v = e.load(e.at(e.at(x, loop.index, 128), 64 * j), V16F)
                    b.store(e.fma(v, v, b.load(total)), total)
            return ordered_sum(e, b.fadd(*(b.load(total) for total in totals)))

        return types.float32(types.int64, types.int64), emit

    return sum_squares


def _scaled(e: VectorEmitter, x: Any, factor: Any, w: Any, index: Any) -> Any:
    place = e.at(x, index, 64)
    return e.b.fmul(e.b.fmul(e.load(place, V16F), factor), e.load(e.at(w, index, 64), V16F))


def make_scale_to_bf16(isa: Isa) -> Any:
    """``scale_to_bf16(x, factor, w, n, out)``: out[i] = bf16(x[i] * factor * w[i])."""

    @intrinsic
    def scale_to_bf16(tc: Any, x: Any, factor: Any, w: Any, n: Any, out: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, factor, w, n, out = args
            e = VectorEmitter(b, isa)
            factors = e.splat(factor)
            with cgutils.for_range(b, b.lshr(n, e.i64(4)), intp=I64) as loop:
                value = _scaled(e, x, factors, w, loop.index)
                e.store(e.to_bf16(value), e.at(out, loop.index, 32), align=2)
            return ctx.get_dummy_value()

        i = types.int64
        return types.void(i, types.float32, i, i, i), emit

    return scale_to_bf16


def make_scale_add(isa: Isa) -> Any:
    """``scale_add(x, factor, w, n, out, add)``: out[i] = add * out[i] + x[i] * factor * w[i]; add is 0 or 1."""

    @intrinsic
    def scale_add(tc: Any, x: Any, factor: Any, w: Any, n: Any, out: Any, add: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, factor, w, n, out, add = args
            e = VectorEmitter(b, isa)
            factors = e.splat(factor)
            keep = e.splat(b.icmp_signed("!=", add, e.i64(0)), ir.VectorType(ir.IntType(1), 16))
            with cgutils.for_range(b, b.lshr(n, e.i64(4)), intp=I64) as loop:
                place = e.at(out, loop.index, 64)
                value = _scaled(e, x, factors, w, loop.index)
                old = b.select(keep, e.load(place, V16F), e.zero())
                e.store(b.fadd(old, value), place)
            return ctx.get_dummy_value()

        i = types.int64
        return types.void(i, types.float32, i, i, i, i), emit

    return scale_add

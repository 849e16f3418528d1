"""Vector loops over one row of float32: the parts of RMS norms, of rotary embedding and of K and V writes.

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
from worker_proc.kernels.cpu.tiles import V_COLUMN_BYTES
from worker_proc.kernels.cpu.vector_ir import I16, I32, I64, V16F, V16H, VectorEmitter


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


def make_scale_row(isa: Isa) -> Any:
    """``scale_row(x, factor, w, n, out)``: out[i] = x[i] * factor * w[i], as activations."""

    @intrinsic
    def scale_row(tc: Any, x: Any, factor: Any, w: Any, n: Any, out: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, factor, w, n, out = args
            e = VectorEmitter(b, isa)
            factors = e.splat(factor)
            with cgutils.for_range(b, b.lshr(n, e.i64(4)), intp=I64) as loop:
                value = _scaled(e, x, factors, w, loop.index)
                e.store_activations(value, out, loop.index)
            return ctx.get_dummy_value()

        i = types.int64
        return types.void(i, types.float32, i, i, i), emit

    return scale_row


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


def make_rotate(isa: Isa, element_bytes: int) -> Any:
    """``rotate(x, table, half, out)``: rotary embedding of one head; out is bf16 or, of 4 bytes, float32.

    A head's two halves are padded apart (``half`` floats each, a multiple of 16), so that the pairs
    (i, half + i) are whole vectors. ``table``: ``half`` cosines, then ``half`` sines.
    """

    @intrinsic
    def rotate(tc: Any, x: Any, table: Any, half: Any, out: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, table, half, out = args
            e = VectorEmitter(b, isa)
            second = b.mul(half, e.i64(4))
            with cgutils.for_range(b, b.lshr(half, e.i64(4)), intp=I64) as loop:
                at = b.mul(loop.index, e.i64(64))
                first, other = (e.load(b.add(base, at), V16F) for base in (x, b.add(x, second)))
                cos, sin = (e.load(b.add(base, at), V16F) for base in (table, b.add(table, second)))
                turned = (
                    b.fsub(b.fmul(first, cos), b.fmul(other, sin)),
                    b.fadd(b.fmul(other, cos), b.fmul(first, sin)),
                )
                target = e.at(out, loop.index, 16 * element_bytes)
                for value, place in zip(turned, (target, e.at(target, half, element_bytes)), strict=True):
                    e.store(e.to_bf16(value) if element_bytes == 2 else value, place, align=2)
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 4), emit

    return rotate


def make_store_value(isa: Isa) -> Any:
    """``store_value(x, columns, line, odd)``: one token's value into the lines of its pair in a V block.

    ``line``: address of the pair's 64 bytes in the first column block; ``odd``: the token is the second
    of the pair. The store leaves the other token's bytes alone: another thread may be writing them.
    """
    pairs = ir.VectorType(I16, 32)
    lanes = ir.VectorType(ir.IntType(1), 32)

    @intrinsic
    def store_value(tc: Any, x: Any, columns: Any, line: Any, odd: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, columns, line, odd = args
            e = VectorEmitter(b, isa)
            twice = ir.Constant(ir.VectorType(I32, 32), [lane // 2 for lane in range(32)])
            masks = [ir.Constant(lanes, [(lane % 2 == parity) for lane in range(32)]) for parity in (0, 1)]
            mask = b.select(b.icmp_signed("!=", odd, e.i64(0)), masks[1], masks[0])
            with cgutils.for_range(b, columns, intp=I64) as loop:
                value = e.to_bf16(e.load(e.at(x, loop.index, 64), V16F))
                value = b.shuffle_vector(value, ir.Constant(V16H, ir.Undefined), twice)
                target = b.inttoptr(e.at(line, loop.index, V_COLUMN_BYTES), pairs.as_pointer())
                kind = ir.FunctionType(ir.VoidType(), [pairs, pairs.as_pointer(), I32, lanes])
                store = cgutils.get_or_insert_function(b.module, kind, "llvm.masked.store.v32i16.p0")
                b.call(store, [value, target, ir.Constant(I32, 2), mask])
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 4), emit

    return store_value


def make_prefetch_lines(isa: Isa) -> Any:
    """``prefetch_lines(address, count, stride)``: ask for ``count`` cache lines, into L2."""

    @intrinsic
    def prefetch_lines(tc: Any, address: Any, count: Any, stride: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            address, count, stride = args
            e = VectorEmitter(b, isa)
            with cgutils.for_range(b, count, intp=I64) as loop:
                e.prefetch(b.add(address, b.mul(loop.index, stride)), locality=2)
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 3), emit

    return prefetch_lines

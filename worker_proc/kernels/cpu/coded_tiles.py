"""Register tiles that multiply by a coded panel (``coding.py``), whose weights they decode on the way.

Decoding 64 weights takes a shift or none, one ``and``, one shuffle that looks up their upper bytes and two that
interleave these with the lower ones: 2 instructions a vector of weights, beside a product for each row. A thread of a
Zen 5 takes 33 ns for a step of eight rows from its caches instead of 31, and 51 instead of 47 for one of twelve;
at 47 GB/s for two threads it waits 87 ns for the 2 KiB of a plain step and 65 for the 1.5 of a coded one.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker_proc.kernels.cpu import coding
from worker_proc.kernels.cpu.isa import Isa
from worker_proc.kernels.cpu.tiles import (
    PAIR_BYTES,
    STEP_BYTES,
    STEP_PAIRS,
    accumulators,
    multiply_pair,
    row_starts,
    spill,
)
from worker_proc.kernels.cpu.vector_ir import I8, I16, I32, I64, VectorEmitter

V64C = ir.VectorType(I8, 64)
V32S = ir.VectorType(I16, 32)
_INTERLEAVED = [
    [16 * lane + 8 * pair + byte + 64 * high for lane in range(4) for byte in range(8) for high in (0, 1)]
    for pair in (0, 1)
]
"""Of two registers, the lower bytes of words and the upper ones: the places of one pair's, then of the other's."""


def _decode_group(e: VectorEmitter, table: Any, group: Any, out: Any) -> None:
    """Emit: four pairs of a coded block (``coding.py``), as bf16 to ``out``."""
    b = e.b
    sixteen = e.load(table, ir.VectorType(I8, 16))
    every = ir.Constant(ir.VectorType(I32, 64), [i % 16 for i in range(64)])
    uppers = b.shuffle_vector(sixteen, ir.Constant(sixteen.type, ir.Undefined), every)
    low = e.load(e.at(group, 128), V64C)
    high = b.bitcast(b.lshr(b.bitcast(low, V32S), ir.Constant(V32S, [4] * 32)), V64C)
    for half, numbers in enumerate((low, high)):
        # Of a number the shuffle looks at the last four bits, and gives 0 if the first is set.
        numbers = b.and_(numbers, ir.Constant(V64C, [127] * 64))
        upper = e.call("llvm.x86.avx512.pshuf.b.512", V64C, uppers, numbers)
        lower = e.load(e.at(group, 64 * half), V64C)
        for pair, order in enumerate(_INTERLEAVED):
            weights = b.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, 64), order))
            e.store(weights, e.at(out, (2 * half + pair) * PAIR_BYTES), align=64)


def make_coded_dot(isa: Isa, rows: int) -> Any:
    """``dot`` from a coded panel ``w0``, each step of which is decoded to ``w1 + (s & w_step) * 2 KiB``.

    So with a ``w_step`` of 1 two steps take turns in the same lines, and with -1 the whole panel stays, and one step
    more. A step is decoded while the one before it is multiplied, a group beside two pairs: products and shuffles are
    different units' work.
    """

    @intrinsic
    def dot(
        tc: Any, x: Any, ldx: Any, w0: Any, w1: Any, steps: Any, w_step: Any, out: Any, ldo: Any, ahead: Any, lines: Any
    ) -> Any:  # fmt: skip
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, ldx, w0, w1, steps, w_step, out, ldo = args[:8]
            e = VectorEmitter(b, isa)
            first = b.add(w0, b.and_(b.add(b.mul(steps, e.i64(2 * coding.TABLE_BYTES)), e.i64(63)), e.i64(-64)))
            one = e.i64(1)

            def decode(step: Any, place: Any, number: Any) -> None:
                """Group ``number`` of the step's eight."""
                table = e.at(e.at(w0, step, 2 * coding.TABLE_BYTES), b.lshr(number, e.i64(2)), coding.TABLE_BYTES)
                group = e.at(e.at(first, step, coding.STEP_BYTES), number, coding.GROUP_BYTES)
                _decode_group(e, table, group, e.at(place, number, 4 * PAIR_BYTES))

            with cgutils.for_range(b, e.i64(2 * coding.GROUPS), intp=I64) as loop:
                decode(e.i64(0), w1, loop.index)
            accs = accumulators(e, rows, 2)
            starts = row_starts(e, x, ldx, rows)
            with cgutils.for_range(b, steps, intp=I64) as outer:
                later = b.add(outer.index, one)
                here = e.at(w1, b.and_(outer.index, w_step), 2 * STEP_BYTES)
                next_place = e.at(w1, b.and_(later, w_step), 2 * STEP_BYTES)
                following = b.select(b.icmp_signed("<", later, steps), later, outer.index)
                source = e.at(e.at(first, outer.index, coding.STEP_BYTES), isa.prefetch_bytes)
                with cgutils.for_range(b, e.i64(2 * coding.GROUPS), intp=I64) as inner:
                    for line in range(coding.GROUP_BYTES // 64):
                        there = e.at(e.at(source, inner.index, coding.GROUP_BYTES), 64 * line)
                        e.prefetch(there, locality=isa.prefetch_into)
                    for which in range(STEP_PAIRS // (2 * coding.GROUPS)):
                        in_step = b.add(b.shl(inner.index, one), e.i64(which))
                        pair = b.add(b.mul(outer.index, e.i64(STEP_PAIRS)), in_step)
                        weights = [e.at(e.at(here, STEP_BYTES * block), in_step, PAIR_BYTES) for block in range(2)]
                        multiply_pair(e, accs, [e.at(s, pair, 2 * isa.activation_bytes) for s in starts], weights)
                    decode(following, next_place, inner.index)
            spill(e, accs, out, ldo)
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 10), emit

    return dot

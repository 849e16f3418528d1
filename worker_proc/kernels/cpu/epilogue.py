"""What happens to a tile's sums before they leave the first-level cache, and the attention rows.

An epilogue reads ``rows`` x 32 float32 sums from the scratch buffer (row stride 128 bytes), adds a
bias when its address is not 0, and writes one output row each:

    store     float32, 32 columns
    add       float32, 32 columns, added to what is there (the residual stream)
    silu      activations, 16 columns: silu(g) * u; the panel's first block holds gate, the second up columns
    gelu      as silu, with the tanh form of GELU
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker_proc.kernels.cpu.isa import Isa
from worker_proc.kernels.cpu.vector_ir import F32, I32, I64, V16F, V16I, VectorEmitter

SCRATCH_ROW_BYTES = 128
MODES = ("store", "add", "silu", "gelu")
MASKED = -1e30
"""A score no row can see; also the running maximum before the first key."""
_LOWEST_PEAK = -1e20
"""Peaks are taken as no lower: a row that sees nothing has a masked one, and its powers are still to be 0."""


def _gate(e: VectorEmitter, mode: str, g: Any, u: Any) -> Any:
    """silu(g) * u or gelu_tanh(g) * u; gelu_tanh(g) = g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3))."""
    inner = g
    if mode == "gelu":
        cubic = e.fma(e.b.fmul(g, g), e.vec(0.044715), e.vec(1.0))
        inner = e.b.fmul(e.b.fmul(g, e.vec(1.5957691216057308)), cubic)
    return e.b.fmul(e.b.fmul(g, e.sigmoid(inner)), u)


def make_epilogue(isa: Isa, mode: str) -> Any:
    """``epilogue(scratch, rows, bias, out, ldo)``: addresses of the panel's first column; ldo in bytes."""

    @intrinsic
    def epilogue(tc: Any, scratch: Any, rows: Any, bias: Any, out: Any, ldo: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            scratch, rows, bias, out, ldo = args
            e = VectorEmitter(b, isa)
            biases = [cgutils.alloca_once(b, V16F) for _ in range(2)]
            for slot in biases:
                b.store(e.zero(), slot)
            with b.if_then(b.icmp_signed("!=", bias, e.i64(0))):
                for j, slot in enumerate(biases):
                    b.store(e.load(e.at(bias, 64 * j), V16F), slot)
            with cgutils.for_range(b, rows, intp=I64) as loop:
                row = e.at(scratch, loop.index, SCRATCH_ROW_BYTES)
                target = b.add(out, b.mul(loop.index, ldo))
                v = [b.fadd(e.load(e.at(row, 64 * j), V16F), b.load(biases[j])) for j in range(2)]
                if mode in ("silu", "gelu"):
                    e.store_activations(_gate(e, mode, v[0], v[1]), target, e.i64(0))
                else:
                    for j in range(2):
                        place = e.at(target, 64 * j)
                        e.store(b.fadd(v[j], e.load(place, V16F)) if mode == "add" else v[j], place)
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 5), emit

    return epilogue


def make_row_peaks(isa: Isa) -> Any:
    """``row_peaks(values, rows, ldv, peaks)``: the largest of 32 float32 of each row, NaN where any of them is.

    ``peaks``: where the first row's goes; the others' are ``ldv`` bytes apart, as the rows are.
    """

    @intrinsic
    def row_peaks(tc: Any, values: Any, rows: Any, ldv: Any, peaks: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            values, rows, ldv, peaks = args
            e = VectorEmitter(b, isa)

            def larger(x: Any, y: Any) -> Any:
                either = b.fcmp_unordered("uno", x, y)
                return b.select(either, e.vec(float("nan")), e.maximum(x, y))

            with cgutils.for_range(b, rows, intp=I64) as loop:
                down = b.mul(loop.index, ldv)
                row = b.add(values, down)
                top = larger(e.load(row, V16F), e.load(e.at(row, 64), V16F))
                for distance in (8, 4, 2, 1):
                    top = larger(top, e.rotate_lanes(top, distance))
                e.store(b.extract_element(top, ir.Constant(I32, 0)), b.add(peaks, down))
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 4), emit

    return row_peaks


def _visible(e: VectorEmitter, index: Any, lo: Any, hi: Any) -> Any:
    """Which of the 16 columns from ``16 * index`` on lie in lo..hi-1."""
    first = e.splat(e.b.trunc(e.b.mul(index, e.i64(16)), I32), V16I)
    column = e.b.add(ir.Constant(V16I, list(range(16))), first)
    low, high = (e.splat(e.b.trunc(bound, I32), V16I) for bound in (lo, hi))
    return e.b.and_(e.b.icmp_signed(">=", column, low), e.b.icmp_signed("<", column, high))


def make_score_peak(isa: Isa) -> Any:
    """``score_peak(scores, num_vectors, lo, hi, state)``: first pass of the softmax over a segment.

    Writes the largest score of the columns lo..hi-1 to ``state``. Scores (float32, 16 a vector) outside
    become :data:`MASKED`. Most rows see their whole segment and take the shorter loop.
    """

    @intrinsic
    def score_peak(tc: Any, scores: Any, num: Any, lo: Any, hi: Any, state: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            scores, num, lo, hi, state = args
            e = VectorEmitter(b, isa)
            best = cgutils.alloca_once(b, V16F)
            b.store(e.vec(MASKED), best)
            covered = b.icmp_signed(">=", hi, b.mul(num, e.i64(16)))
            everything = b.and_(b.icmp_signed("<=", lo, e.i64(0)), covered)
            for masked, branch in ((False, everything), (True, b.not_(everything))):
                with b.if_then(branch), cgutils.for_range(b, num, intp=I64) as loop:
                    place = e.at(scores, loop.index, 64)
                    score = e.load(place, V16F)
                    if masked:
                        score = b.select(_visible(e, loop.index, lo, hi), score, e.vec(MASKED))
                        e.store(score, place)
                    b.store(e.maximum(score, b.load(best)), best)
            top = b.load(best)
            for distance in (8, 4, 2, 1):
                top = e.maximum(top, e.rotate_lanes(top, distance))
            e.store(b.extract_element(top, ir.Constant(I32, 0)), state)
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 5), emit

    return score_peak


def make_score_powers(isa: Isa) -> Any:
    """``score_powers(scores, num_vectors, scale, p, state)``: second pass, after :func:`make_score_peak`.

    Writes 2**((score - peak) * scale) to ``p`` (activations), exactly 0 where masked, and (peak * scale, sum) to
    ``state``. ``scale`` is positive and includes log2(e). A masked vector more or less changes no bit: it
    adds exact zeros. The passes are apart so that rows overlap in the processor: a row's peak, its
    powers and its sum wait for each other, different rows do not. (One function took twice as long.)
    """

    @intrinsic
    def score_powers(tc: Any, scores: Any, num: Any, scale: Any, p: Any, state: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            scores, num, scale, p, state = args
            e = VectorEmitter(b, isa)
            peak = b.fmul(e.load(state, F32), scale)
            e.store(peak, state)
            lowest = ir.Constant(F32, _LOWEST_PEAK)
            seen = b.select(b.fcmp_ordered(">", peak, lowest), peak, lowest)
            offset, factor = b.fneg(e.splat(seen)), e.splat(scale)
            total = cgutils.alloca_once(b, V16F)
            b.store(e.zero(), total)
            with cgutils.for_range(b, num, intp=I64) as loop:
                score = e.load(e.at(scores, loop.index, 64), V16F)
                power = e.exp2(e.fma(score, factor, offset))
                if not isa.splits_powers:  # whose exp2 does not reach 0
                    power = b.select(b.fcmp_ordered(">", score, e.vec(MASKED)), power, e.zero())
                b.store(b.fadd(b.load(total), power), total)
                e.store_activations(power, p, loop.index)
            e.store(ordered_sum(e, b.load(total)), e.at(state, 4))
            return ctx.get_dummy_value()

        i = types.int64
        return types.void(i, i, types.float32, i, i), emit

    return score_powers


def ordered_sum(e: VectorEmitter, v: Any) -> Any:
    """Sum of 16 lanes, halves onto each other: a fixed order on every machine."""
    for distance in (8, 4, 2, 1):
        v = e.b.fadd(v, e.rotate_lanes(v, distance))
    return e.b.extract_element(v, ir.Constant(I32, 0))


def make_merge_row(isa: Isa) -> Any:
    """``merge_row(state, o, seg_state, seg_o, num_vectors)``: join one more segment to a running row.

    Both sides hold (maximum, sum) and the unnormalised output. The factors of a side that already
    has the maximum are exactly 1, and those of an empty side multiply zeros, so a segment in which a
    row sees nothing leaves every bit as it was. (Online softmax: Milakov and Gimelshein 2018.)
    """

    @intrinsic
    def merge_row(tc: Any, state: Any, o: Any, seg_state: Any, seg_o: Any, num: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            state, o, seg_state, seg_o, num = args
            e = VectorEmitter(b, isa)
            tops = [e.splat(e.load(s, F32)) for s in (state, seg_state)]
            sums = [e.splat(e.load(e.at(s, 4), F32)) for s in (state, seg_state)]
            peak = e.maximum(*tops)
            smaller = e.exp2(b.fsub(e.minimum(*tops), peak))
            running = b.fcmp_ordered(">", *tops)
            old, new = b.select(running, e.vec(1.0), smaller), b.select(running, smaller, e.vec(1.0))
            zero = ir.Constant(I32, 0)
            e.store(b.extract_element(peak, zero), state)
            total = e.fma(sums[1], new, b.fmul(sums[0], old))
            e.store(b.extract_element(total, zero), e.at(state, 4))
            with cgutils.for_range(b, num, intp=I64) as loop:
                place = e.at(o, loop.index, 64)
                part = b.fmul(e.load(place, V16F), old)
                e.store(e.fma(e.load(e.at(seg_o, loop.index, 64), V16F), new, part), place)
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 5), emit

    return merge_row


def make_finish_row(isa: Isa) -> Any:
    """``finish_row(state, o, num_vectors, out)``: divide by the sum, store as activations."""

    @intrinsic
    def finish_row(tc: Any, state: Any, o: Any, num: Any, out: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            state, o, num, out = args
            e = VectorEmitter(b, isa)
            total = e.load(e.at(state, 4), F32)
            inverse = e.splat(b.fdiv(ir.Constant(F32, 1.0), total))
            with cgutils.for_range(b, num, intp=I64) as loop:
                e.store_activations(b.fmul(e.load(e.at(o, loop.index, 64), V16F), inverse), out, loop.index)
            return ctx.get_dummy_value()

        return types.void(*(types.int64,) * 4), emit

    return finish_row

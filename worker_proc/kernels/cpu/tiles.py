"""Register tiles: the inner loops of every matrix product, in three machine dialects.

One shape serves everything. A tile multiplies M rows of activations (row stride ``ldx`` bytes; float32 in
the fma dialect, bf16 in the others) by two *column blocks* of bf16 and leaves M x 32 float32 sums in a
scratch buffer that stays in the first-level cache; an epilogue (``epilogue.py``) or the softmax takes
them from there.

A column block holds 16 columns, pairs of input rows interleaved: ``[K / 2][16][2]`` bf16. That is
what ``vdpbf16ps`` eats (one register = 16 columns x one pair) and also what an AMX B tile wants
(16 pairs x 16 columns = 1 KiB). Weights, and the pages of K and V, are stored so.

Arithmetic of the limits, per core and cycle (Sapphire Rapids class)
    AMX:        16 x 16 x 32 multiply-adds in 16 cycles. Two by two tiles: 4 products (64 cycles)
                for 4 tile loads (32 cycles), so loads hide behind products.
    vdpbf16ps:  32 multiply-adds an instruction. 12 rows x 2 columns vectors: 24 products for 2
                weight loads and 12 broadcasts; 24 accumulators fit into 32 registers.
    fma:        16 multiply-adds an instruction, two instructions a cycle. Widening the weights, a shift and a
                mask, takes the same units: 4 for the 48 products of 12 rows and a pair.
    AVX2, NEON: 12 products of 8 lanes (24 of 4) for an element of 6 rows and 16 columns, one block of them. That
                leaves 4 (8) registers for widened weights and a row's input, so a pair of weights is loaded twice
                rather than kept.

Order of summation: ``vdpbf16ps`` and ``fma`` add pair after pair. AMX sums the even and the odd
elements of 32 inputs apart, then adds both to the accumulator. Each is the same for every row and
tile height, but they differ from each other, so one process uses one dialect for all its products.

The tile kernels as Numba sees them
    dot(x, ldx, w0, w1, steps, w_step, out, ldo, ahead, lines)
        out[M, 32] = x[M, 32 * steps] @ [w0 | w1]; step s of a column block lies at ``w + s * w_step``.
        Meanwhile, in each step, ``lines`` cache lines from ``ahead`` on are asked for, into L2. (Vector tiles ask
        in any case: where there is nothing to ask for, ``ahead`` is something at hand.)
    weigh(p, ldp, blocks, num_blocks, offset, out, ldo)
        out[M, 32] = p[M, 16 * num_blocks] @ V; ``blocks`` is the address of int64 addresses of V blocks,
        the two column blocks of 16 tokens are at ``offset`` and ``offset + 512`` in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker_proc.kernels.cpu.isa import L2, Isa
from worker_proc.kernels.cpu.layout import SEGMENT_BLOCKS
from worker_proc.kernels.cpu.vector_ir import F32, I8, I32, I64, PTR, V16F, V16I, VOID, VectorEmitter

PAIR_BYTES = 64
"""One pair of inputs of a column block."""
STEP_PAIRS = 16
"""Pairs in one step: 32 inputs, the depth of an AMX tile."""
STEP_BYTES = PAIR_BYTES * STEP_PAIRS
V_BLOCK_PAIRS = 8
"""Pairs in a column block of V: 16 tokens."""
V_COLUMN_BYTES = PAIR_BYTES * V_BLOCK_PAIRS
AMX_PREFETCH_BYTES = 2048
"""How far ahead AMX tiles ask for weights, one step: best of 0..32 KiB. Vector tiles: ``Isa.prefetch_bytes``. On
Intel's Emerald Rapids 16 KiB into L2 are the best of L1 and L2 and 1 to 32 KiB at 2 to 12 rows (8 rows: 12 % less time
than 2 KiB ahead into L1, where the lines wait for too few fill buffers), and as good as any at one."""

_ints = (types.int64,) * 10


# ------------------------------------------------------------------------------- vdpbf16ps and fma


def accumulators(e: VectorEmitter, rows: int, blocks: int) -> list[list[Any]]:
    accs = [[cgutils.alloca_once(e.b, V16F) for _ in range(blocks)] for _ in range(rows)]
    for row in accs:
        for acc in row:
            e.b.store(e.zero(), acc)
    return accs


def multiply_pair(e: VectorEmitter, accs: list[list[Any]], x_rows: list[Any], w: list[Any]) -> None:
    """One pair of inputs: load the weights once, broadcast each row's pair, or its elements in turn."""
    if e.isa.dot == "vdpbf16ps":
        weights = [e.load(address, V16I) for address in w]
        for acc_row, x in zip(accs, x_rows, strict=True):
            pair = e.splat(e.load(x, I32), V16I)
            for acc, weight in zip(acc_row, weights, strict=True):
                e.b.store(e.dot_bf16(e.b.load(acc), pair, weight), acc)
        return
    for element, widened in enumerate(_widened(e, w)):
        for acc_row, x in zip(accs, x_rows, strict=True):
            value = e.splat(e.load(e.at(x, 4 * element), F32))
            for acc, half in zip(acc_row, widened, strict=True):
                e.b.store(e.fma(value, half, e.b.load(acc)), acc)


def _widened(e: VectorEmitter, w: list[Any]) -> Iterator[list[Any]]:
    """The first elements of a pair as float32, one vector per column block, then the second elements."""
    if e.isa.splits_powers:
        pairs = [e.load(address, V16I) for address in w]
        yield [e.widen_first(pair) for pair in pairs]
        yield [e.widen_second(pair) for pair in pairs]
        return
    # Where registers are few the pair is loaded again rather than kept; volatile, or LLVM would keep it.
    yield [e.widen_first(e.load(address, V16I, volatile=True)) for address in w]
    yield [e.widen_second(e.load(address, V16I, volatile=True)) for address in w]


def spill(e: VectorEmitter, accs: list[list[Any]], out: Any, ldo: Any) -> None:
    for m, row in enumerate(accs):
        for j, acc in enumerate(row):
            e.store(e.b.load(acc), e.at(e.at(out, ldo, m) if m else out, j * 64))


def row_starts(e: VectorEmitter, x: Any, ldx: Any, rows: int) -> list[Any]:
    return [e.at(x, ldx, m) if m else x for m in range(rows)]


def _passes(isa: Isa, rows: int) -> list[list[int]]:
    """The column blocks, 0 and 1, that a tile of so many rows takes at once: both, or one after the other."""
    return [[0, 1]] if rows <= isa.most_wide_rows else [[0], [1]]


def _look_ahead(e: VectorEmitter, ahead: Any, lines: Any, pair: Any, parts: int) -> None:
    """Ask for a pair's share of what comes next, of which a step asks for ``lines`` <= 16 ``parts`` cache lines.

    Pair by pair, since misses that come all at once fill the core's queue, and products wait for them.
    """
    share = e.b.mul(lines, e.i64(64 // STEP_PAIRS))
    at = e.b.add(ahead, e.b.mul(pair, share))
    for part in range(parts):
        e.prefetch(e.b.add(at, e.b.udiv(e.b.mul(share, e.i64(part)), e.i64(parts))), locality=L2)


def make_vector_dot(isa: Isa, rows: int, prefetch: bool, one_block: bool = False, pages: bool = False) -> Any:
    """``dot`` for a fixed number of rows, on vector registers. ``one_block``: only ``w0``, so out[M, 16].

    ``pages``: ``ahead`` and ``lines`` are the addresses of two blocks of K or V, of which each pair asks for a line.
    """

    @intrinsic
    def dot(
        tc: Any, x: Any, ldx: Any, w0: Any, w1: Any, steps: Any, w_step: Any, out: Any, ldo: Any, ahead: Any, lines: Any
    ) -> Any:  # fmt: skip
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, ldx, w0, w1, steps, w_step, out, ldo, ahead, lines = args
            e = VectorEmitter(b, isa)
            for blocks in [[0]] if one_block else _passes(isa, rows):
                accs = accumulators(e, rows, len(blocks))
                starts = row_starts(e, x, ldx, rows)
                with cgutils.for_range(b, steps, intp=I64) as outer:
                    bases = [b.add((w0, w1)[j], b.mul(outer.index, w_step)) for j in blocks]
                    with cgutils.for_range(b, e.i64(STEP_PAIRS), intp=I64) as inner:
                        pair = b.add(b.mul(outer.index, e.i64(STEP_PAIRS)), inner.index)
                        here = [e.at(base, inner.index, PAIR_BYTES) for base in bases]
                        if prefetch:
                            for address in here:
                                e.prefetch(e.at(address, isa.prefetch_bytes), locality=isa.prefetch_into)
                        elif pages:
                            for block in (ahead, lines):
                                e.prefetch(e.at(block, pair, PAIR_BYTES), locality=isa.prefetch_into)
                        elif blocks[0] == 0:
                            _look_ahead(e, ahead, lines, pair, 1 if one_block else 2)
                        multiply_pair(e, accs, [e.at(s, pair, 2 * isa.activation_bytes) for s in starts], here)
                spill(e, accs, e.at(out, 64 * blocks[0]), ldo)
            return ctx.get_dummy_value()

        return types.void(*_ints), emit

    return dot


def make_vector_weigh(isa: Isa, rows: int) -> Any:
    """``weigh`` for a fixed number of rows, on vector registers.

    With ``Isa.asks_for_pages`` the addresses of as many other blocks lie ``SEGMENT_BLOCKS`` after those of
    ``blocks``, and it asks for the same two columns' share of each.
    """

    @intrinsic
    def weigh(tc: Any, p: Any, ldp: Any, blocks: Any, num_blocks: Any, offset: Any, out: Any, ldo: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            p, ldp, blocks, num_blocks, offset, out, ldo = args
            e = VectorEmitter(b, isa)
            for columns in _passes(isa, rows):
                accs = accumulators(e, rows, len(columns))
                starts = row_starts(e, p, ldp, rows)
                with cgutils.for_range(b, num_blocks, intp=I64) as outer:
                    base = b.add(e.load(e.at(blocks, outer.index, 8), I64, align=8), offset)
                    with cgutils.for_range(b, e.i64(V_BLOCK_PAIRS), intp=I64) as inner:
                        pair = b.add(b.mul(outer.index, e.i64(V_BLOCK_PAIRS)), inner.index)
                        here = e.at(base, inner.index, PAIR_BYTES)
                        w = [e.at(here, j * V_COLUMN_BYTES) for j in columns]
                        if isa.asks_for_pages:
                            other = e.load(e.at(e.at(blocks, SEGMENT_BLOCKS * 8), outer.index, 8), I64, align=8)
                            line = e.at(b.add(other, offset), inner.index, 2 * PAIR_BYTES)
                            e.prefetch(line, locality=isa.prefetch_into)
                            e.prefetch(e.at(line, PAIR_BYTES), locality=isa.prefetch_into)
                        multiply_pair(e, accs, [e.at(s, pair, 2 * isa.activation_bytes) for s in starts], w)
                spill(e, accs, e.at(out, 64 * columns[0]), ldo)
            return ctx.get_dummy_value()

        return types.void(*_ints[:7]), emit

    return weigh


# ------------------------------------------------------------------------------- AMX

ACC = (0, 1, 2, 3)
"""Tile registers of the accumulators."""
GEMM_A, GEMM_B = (4, 5), (6, 7)
"""Rows and columns in the linear layers: all at full depth (32 inputs)."""
QK_A, QK_B, PV_A, PV_B = (4, 4), (6, 6), (5, 5), (7, 7)
"""In attention: tiles 5 and 7 have half the depth, 16 tokens. Using one register again and again costs
nothing but the reload, since the processor renames it; changing the configuration would cost more."""


def tile_config(attention: bool) -> bytes:
    """The 64 bytes ``ldtilecfg`` reads: palette 1, per tile the bytes of a row and the rows."""
    config = bytearray(64)
    config[0] = 1
    for tile in range(8):
        row_bytes = 32 if attention and tile in PV_A else 64
        rows = V_BLOCK_PAIRS if attention and tile in PV_B else 16
        config[16 + 2 * tile : 18 + 2 * tile] = row_bytes.to_bytes(2, "little")
        config[48 + tile] = rows
    return bytes(config)


class _Amx:
    """Emits tile instructions with constant tile numbers."""

    def __init__(self, e: VectorEmitter, a: tuple[int, int], b: tuple[int, int]) -> None:
        self.e = e
        self.a = a
        self.b = b

    def _tile(self, number: int) -> Any:
        return ir.Constant(I8, number)

    def zero(self, tile: int) -> None:
        self.e.call("llvm.x86.tilezero", VOID, self._tile(tile))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        pointer = self.e.b.inttoptr(address, PTR)
        self.e.call("llvm.x86.tileloadd64", VOID, self._tile(tile), pointer, stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        pointer = self.e.b.inttoptr(address, PTR)
        self.e.call("llvm.x86.tilestored64", VOID, self._tile(tile), pointer, stride)

    def dot(self, acc: int, rows: int, columns: int) -> None:
        self.e.call("llvm.x86.tdpbf16ps", VOID, *(self._tile(t) for t in (acc, rows, columns)))

    def multiply(self, row_tiles: int, x: Any, ldx: Any, w: list[Any]) -> None:
        """One step: load column blocks and row tiles, accumulate all products."""
        for j, address in enumerate(w):
            self.load(self.b[j], address, self.e.i64(PAIR_BYTES))
            for m in range(row_tiles):
                if j == 0 or (self.a[0] == self.a[1] and row_tiles > 1):
                    self.load(self.a[m], self.e.at(x, ldx, 16 * m) if m else x, ldx)
                self.dot(ACC[2 * m + j], self.a[m], self.b[j])

    def spill(self, row_tiles: int, out: Any, ldo: Any) -> None:
        for m in range(row_tiles):
            for j in range(2):
                row = self.e.at(out, ldo, 16 * m) if m else out
                self.store(ACC[2 * m + j], self.e.at(row, 64 * j), ldo)


def make_amx_dot(isa: Isa, rows: int, prefetch: bool, attention: bool = False) -> Any:
    """``dot`` for 16 or 32 rows on tile registers. x must be readable for all those rows."""
    row_tiles = rows // 16

    @intrinsic
    def dot(
        tc: Any, x: Any, ldx: Any, w0: Any, w1: Any, steps: Any, w_step: Any, out: Any, ldo: Any, ahead: Any, lines: Any
    ) -> Any:  # fmt: skip
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, ldx, w0, w1, steps, w_step, out, ldo, ahead, lines = args
            e = VectorEmitter(b, isa)
            amx = _Amx(e, *((QK_A, QK_B) if attention else (GEMM_A, GEMM_B)))
            for acc in ACC[: 2 * row_tiles]:
                amx.zero(acc)
            with cgutils.for_range(b, steps, intp=I64) as loop:
                here = [b.add(w, b.mul(loop.index, w_step)) for w in (w0, w1)]
                if prefetch:
                    for address in here:
                        for line in range(STEP_PAIRS):
                            e.prefetch(e.at(address, AMX_PREFETCH_BYTES + line * 64))
                elif not attention:
                    at = b.add(ahead, b.mul(loop.index, b.mul(lines, e.i64(64))))
                    with cgutils.for_range(b, lines, intp=I64) as line:
                        e.prefetch(e.at(at, line.index, 64), locality=L2)
                amx.multiply(row_tiles, e.at(x, loop.index, 64), ldx, here)
            amx.spill(row_tiles, out, ldo)
            return ctx.get_dummy_value()

        return types.void(*_ints), emit

    return dot


def make_amx_weigh(isa: Isa, rows: int) -> Any:
    """``weigh`` for 16 or 32 rows on tile registers, under ``tile_config(attention=True)``."""
    row_tiles = rows // 16

    @intrinsic
    def weigh(tc: Any, p: Any, ldp: Any, blocks: Any, num_blocks: Any, offset: Any, out: Any, ldo: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            p, ldp, blocks, num_blocks, offset, out, ldo = args
            e = VectorEmitter(b, isa)
            amx = _Amx(e, PV_A, PV_B)
            for acc in ACC[: 2 * row_tiles]:
                amx.zero(acc)
            with cgutils.for_range(b, num_blocks, intp=I64) as loop:
                base = b.add(e.load(e.at(blocks, loop.index, 8), I64, align=8), offset)
                amx.multiply(row_tiles, e.at(p, loop.index, 32), ldp, [base, e.at(base, V_COLUMN_BYTES)])
            amx.spill(row_tiles, out, ldo)
            return ctx.get_dummy_value()

        return types.void(*_ints[:7]), emit

    return weigh


def make_tile_configure() -> Any:
    """``configure(address)``: load a tile configuration; address 0 releases the tiles."""

    @intrinsic
    def configure(tc: Any, address: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            release = b.icmp_signed("==", args[0], ir.Constant(I64, 0))
            with b.if_else(release) as (yes, no):
                with yes:
                    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(VOID, []), "llvm.x86.tilerelease")
                    b.call(fn, [])
                with no:
                    kind = ir.FunctionType(VOID, [PTR])
                    fn = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.ldtilecfg")
                    b.call(fn, [b.inttoptr(args[0], PTR)])
            return ctx.get_dummy_value()

        return types.void(types.int64), emit

    return configure

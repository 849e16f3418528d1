"""Helpers that emit LLVM vector code inside Numba intrinsics.

Everything is 16 lanes of float32, one AVX-512 register; LLVM splits the vectors where registers
are narrower. Addresses are plain int64, as in the kernels that use these helpers: a kernel is a
few loops around loads, and types would only be cast back and forth.

The emitted arithmetic carries no fast-math flags, so LLVM keeps its order. That is what makes a
row's result independent of the tile it was computed in.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba.core import cgutils

from worker_proc.kernels.cpu.isa import Isa

LANES = 16
_POWER_OF_FRACTION = (
    0.001865033758804202, 0.009022697806358337, 0.05579448491334915, 0.24016660451889038, 0.69315105676651, 1.0,
)  # fmt: skip
"""2**f for 0 <= f < 1, highest power first: the smallest relative error with 1 as its last term."""
_POWER_OF_REST = (
    1.326472614891827e-3, 9.671512991189957e-3, 5.550733581185341e-2, 0.24022242426872253, 0.6931470036506653, 1.0,
)  # fmt: skip
"""2**f for -0.5 <= f <= 0.5."""


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite has no class for."""

    null = "zeroinitializer"
    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
VOID = ir.VoidType()
PTR = I8.as_pointer()
V16F = ir.VectorType(F32, LANES)
V16I = ir.VectorType(I32, LANES)
V16H = ir.VectorType(I16, LANES)
V16B = ir.VectorType(BFloat(), LANES)
V32B = ir.VectorType(BFloat(), 2 * LANES)


class VolatileLoad(ir.LoadInstr):  # type: ignore[misc]
    """A load that LLVM neither joins with another of the same address nor moves; llvmlite has none."""

    def descr(self, buf: list[str]) -> None:
        """Append the instruction's text."""
        pointer = self.operands[0]
        buf.append(f"load volatile {self.type}, {pointer.type} {pointer.get_reference()}, align {self.align}\n")


class VectorEmitter:
    """An llvmlite builder with the vocabulary of our kernels."""

    def __init__(self, builder: Any, isa: Isa) -> None:
        self.b = builder
        self.isa = isa

    # ---- constants, addresses, memory

    def i64(self, value: int) -> Any:
        """A 64-bit integer constant."""
        return ir.Constant(I64, value)

    def vec(self, value: float) -> Any:
        """A float32 constant in every lane."""
        return ir.Constant(V16F, [float(np.float32(value))] * LANES)

    def ivec(self, value: int) -> Any:
        """An int32 constant in every lane."""
        return ir.Constant(V16I, [value] * LANES)

    def zero(self) -> Any:
        """0.0 in every lane."""
        return ir.Constant(V16F, None)

    def at(self, base: Any, offset: Any, scale: int = 1) -> Any:
        """The address ``base + offset * scale``; offset is a value or an int."""
        if isinstance(offset, int):
            return self.b.add(base, self.i64(offset * scale)) if offset else base
        return self.b.add(base, self.b.mul(offset, self.i64(scale)) if scale != 1 else offset)

    def load(self, address: Any, kind: Any, align: int = 4, volatile: bool = False) -> Any:
        """Load a ``kind`` from an integer address. ``volatile``: not to be joined with another load of it."""
        pointer = self.b.inttoptr(address, kind.as_pointer())
        if not volatile:
            return self.b.load(pointer, align=align)
        loaded = VolatileLoad(self.b.block, pointer)
        loaded.align = align
        self.b._insert(loaded)
        return loaded

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        """Store a value at an integer address."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def call(self, name: str, result: Any, *args: Any) -> Any:
        """Call an LLVM intrinsic or a C function by name."""
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def prefetch(self, address: Any, locality: int = 3) -> None:
        """Ask for a cache line to be read (3: into L1, 2: into L2)."""
        pointer = self.b.inttoptr(address, PTR)
        flags = [ir.Constant(I32, v) for v in (0, locality, 1)]
        self.call("llvm.prefetch.p0", VOID, pointer, *flags)

    def splat(self, scalar: Any, kind: Any = V16F) -> Any:
        """The scalar in every lane."""
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(V16I, [0] * LANES))

    def rotate_lanes(self, v: Any, distance: int) -> Any:
        """Lane i of the result is lane (i + distance) modulo 16."""
        mask = ir.Constant(V16I, [(lane + distance) % LANES for lane in range(LANES)])
        return self.b.shuffle_vector(v, ir.Constant(V16F, ir.Undefined), mask)

    # ---- arithmetic

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once."""
        return self.call("llvm.fma.v16f32", V16F, x, y, z)

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of two, lane by lane."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of two, lane by lane."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def exp2(self, x: Any) -> Any:
        """2**x for x <= 126; relative error below 3e-7, exp2(0) exactly 1; far below -126 it is 0 or 2**-126.

        x = n + f with n an integer; 2**f is a polynomial, and n goes to its exponent. The constant term is
        exactly 1: were it 0.99999994, a running sum would be rescaled by a factor other than 1 whenever a row
        meets keys it cannot see, and the row's bits would depend on how it was batched.

        AVX-512 takes the fraction (0 <= f < 1) and scales by 2**floor(x) in one instruction each. Elsewhere n is
        the nearest integer, found by adding 1.5 * 2**23, whose last bits then are n.
        """
        if self.isa.splits_powers:
            f = self._fraction(x)
            p = self._polynomial(f, _POWER_OF_FRACTION)
            return self._masked("scalef", p, x, self.zero())
        magic = self.vec(12582912.0)
        shifted = self.b.fadd(self.maximum(x, self.vec(-126.0)), magic)
        part = self.b.fsub(self.maximum(x, self.vec(-126.0)), self.b.fsub(shifted, magic))
        p = self._polynomial(part, _POWER_OF_REST)
        exponent = self.b.shl(self.b.bitcast(shifted, V16I), self.ivec(23))
        return self.b.bitcast(self.b.add(self.b.bitcast(p, V16I), exponent), V16F)

    def _polynomial(self, x: Any, coefficients: tuple[float, ...]) -> Any:
        value = self.vec(coefficients[0])
        for c in coefficients[1:]:
            value = self.fma(value, x, self.vec(c))
        return value

    def _masked(self, name: str, x: Any, y: Any, otherwise: Any) -> Any:
        """An AVX-512 instruction of two vectors, in all lanes, rounding as usual."""
        everywhere, usual = ir.Constant(I16, -1), ir.Constant(I32, 4)
        return self.call(f"llvm.x86.avx512.mask.{name}.ps.512", V16F, x, y, otherwise, everywhere, usual)

    def _fraction(self, x: Any) -> Any:
        """x - floor(x)."""
        everywhere, usual, floor = ir.Constant(I16, -1), ir.Constant(I32, 4), ir.Constant(I32, 9)
        return self.call("llvm.x86.avx512.mask.reduce.ps.512", V16F, x, floor, self.zero(), everywhere, usual)

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + e**-x); relative error below 1e-6 + |x| * 1e-7."""
        scaled = self.minimum(self.b.fmul(x, self.vec(-1.4426950408889634)), self.vec(120.0))
        return self._reciprocal(self.b.fadd(self.exp2(scaled), self.vec(1.0)))

    def _reciprocal(self, x: Any) -> Any:
        """1 / x for positive, finite x. A division keeps its unit busy for 16 cycles; a guess of 14 bits and a
        step of Newton's method take four."""
        if not self.isa.splits_powers:
            return self.b.fdiv(self.vec(1.0), x)
        guess = self.call("llvm.x86.avx512.rcp14.ps.512", V16F, x, self.zero(), ir.Constant(I16, -1))
        rest = self.fma(self.b.fneg(x), guess, self.vec(1.0))
        return self.fma(guess, rest, guess)

    def to_bf16(self, x: Any) -> Any:
        """Round to nearest even bf16; 16 lanes of int16 bits."""
        if self.isa.native_bf16_store:
            return self.b.bitcast(self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", V16B, x), V16H)
        u = self.b.bitcast(x, V16I)
        odd = self.b.and_(self.b.lshr(u, self.ivec(16)), self.ivec(1))
        rounded = self.b.lshr(self.b.add(self.b.add(u, self.ivec(0x7FFF)), odd), self.ivec(16))
        # A NaN must stay one: rounding could carry its mantissa into infinity.
        nan = self.b.fcmp_unordered("uno", x, x)
        return self.b.trunc(self.b.select(nan, self.ivec(0x7FC0), rounded), V16H)

    def store_activations(self, x: Any, row: Any, index: Any) -> None:
        """Store the 16 lanes as elements ``16 * index`` on of a row that a tile will multiply."""
        if self.isa.activation_bytes == 4:
            self.store(x, self.at(row, index, 64))
        else:
            self.store(self.to_bf16(x), self.at(row, index, 32), align=2)

    def dot_bf16(self, acc: Any, x_pair: Any, w_pairs: Any) -> Any:
        """acc[j] += x[0] * w[j, 0] + x[1] * w[j, 1] for 16 columns j, in one ``vdpbf16ps``.

        ``x_pair``: the pair's 32 bits in every lane; ``w_pairs``: one pair of bf16 per lane, int32.
        """
        args = [self.b.bitcast(v, V32B) for v in (x_pair, w_pairs)]
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", V16F, acc, *args)

    def widen_first(self, w_pairs: Any) -> Any:
        """The first bf16 of each lane's pair (int32), as float32."""
        return self.b.bitcast(self.b.shl(w_pairs, self.ivec(16)), V16F)

    def widen_second(self, w_pairs: Any) -> Any:
        """The second bf16 of each lane's pair (int32), as float32."""
        return self.b.bitcast(self.b.and_(w_pairs, self.ivec(-65536)), V16F)

"""Scalar intrinsics: bf16 bits, typed views of addresses, atomics, waiting.

Numba has no bfloat16; the kernels hold it as uint16 bits and widen by a shift.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker_proc.kernels.cpu.vector_ir import F32, I32, I64, PTR, VOID


@intrinsic
def bf16_to_f32(tc: Any, bits: Any) -> Any:
    """Widen bf16 bits to float32 (exact)."""

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(b.shl(b.zext(args[0], I32), ir.Constant(I32, 16)), F32)

    return types.float32(types.uint16), emit


def _pointer_intrinsic(element: Any) -> Any:
    @intrinsic
    def cast(tc: Any, address: Any) -> Any:
        pointer = types.CPointer(element)

        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], ctx.get_value_type(pointer))

        return pointer(types.int64), emit

    return cast


f32_pointer = _pointer_intrinsic(types.float32)
u8_pointer = _pointer_intrinsic(types.uint8)
u16_pointer = _pointer_intrinsic(types.uint16)
i32_pointer = _pointer_intrinsic(types.int32)
i64_pointer = _pointer_intrinsic(types.int64)


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@intrinsic
def atomic_add(tc: Any, address: Any, value: Any) -> Any:
    """Add to an int64 in memory, sequentially consistent; the old value."""

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _pointer(b, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_load(tc: Any, address: Any) -> Any:
    """Read an int64, sequentially consistent.

    Who adds to one word and then reads another must not read it before others can see the sum: ``team.py``'s
    last arrival looks for sleepers, a sleeper for arrivals. Acquire order would allow it (Arm's ``ldapr``).
    """

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(_pointer(b, args[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def atomic_store(tc: Any, address: Any, value: Any) -> Any:
    """Write an int64 with release order."""

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store_atomic(args[1], _pointer(b, args[0]), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def write_back(tc: Any, address: Any) -> Any:
    """Write to an int64 in memory what it holds, in one piece: the page is real then, and no other write is lost.

    Compares with 0 and exchanges for 0. (LLVM makes a mere read of an addition of 0, and a page that is read only is
    a page of zeros that all share.)
    """

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        zero = ir.Constant(I64, 0)
        b.cmpxchg(_pointer(b, args[0]), zero, zero, "seq_cst", "seq_cst")
        return ctx.get_dummy_value()

    return types.void(types.int64), emit


CLOCK_MONOTONIC, CLOCK_THREAD_CPU = 1, 3
"""Linux's clocks: time, and processor time of the calling thread."""


@intrinsic
def clock_ns(tc: Any, clock: Any) -> Any:
    """Nanoseconds of a Linux clock, by libc's ``clock_gettime``."""

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        pair = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, [I32, PTR]), "clock_gettime")
        b.call(fn, [b.trunc(args[0], I32), b.bitcast(pair, PTR)])
        value = b.load(pair)
        seconds, rest = (b.extract_value(value, k) for k in range(2))
        return b.add(b.mul(seconds, ir.Constant(I64, 1_000_000_000)), rest)

    return types.int64(types.int64), emit


@intrinsic
def current_core(tc: Any) -> Any:
    """The core that the calling thread is on, by libc's ``sched_getcpu`` (no system call)."""

    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_getcpu")
        return b.sext(b.call(fn, []), I64)

    return types.int64(), emit


@intrinsic
def get_affinity(tc: Any, num_bytes: Any, mask: Any) -> Any:
    """The calling thread's cores, a bit each, into ``num_bytes`` at an address, by libc; 0 if that worked."""
    return types.int64(types.int64, types.int64), _affinity("sched_getaffinity")


@intrinsic
def set_affinity(tc: Any, num_bytes: Any, mask: Any) -> Any:
    """Restrict the calling thread to the cores at an address, by libc; 0 if that worked."""
    return types.int64(types.int64, types.int64), _affinity("sched_setaffinity")


def _affinity(name: str) -> Any:
    def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, [I32, I64, PTR]), name)
        return b.sext(b.call(fn, [ir.Constant(I32, 0), args[0], b.inttoptr(args[1], PTR)]), I64)

    return emit


def make_pause(machine: str) -> Any:
    """An intrinsic that tells the core it is spinning."""
    name = "llvm.x86.sse2.pause" if machine == "x86_64" else "llvm.aarch64.hint"

    @intrinsic
    def pause(tc: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            values = [] if machine == "x86_64" else [ir.Constant(I32, 1)]
            kind = ir.FunctionType(VOID, [v.type for v in values])
            b.call(cgutils.get_or_insert_function(b.module, kind, name), values)
            return ctx.get_dummy_value()

        return types.void(), emit

    return pause


def futex_number(machine: str) -> int:
    """The system call's number."""
    return 202 if machine == "x86_64" else 98


def make_futex(machine: str) -> Any:
    """``futex(address, operation, value)``: Linux's wait and wake on an int32 in memory."""
    number = futex_number(machine)

    @intrinsic
    def futex(tc: Any, address: Any, operation: Any, value: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            kind = ir.FunctionType(I64, [I64], var_arg=True)
            fn = cgutils.get_or_insert_function(b.module, kind, "syscall")
            zero = ir.Constant(I64, 0)
            pointer = b.inttoptr(args[0], PTR)
            return b.call(fn, [ir.Constant(I64, number), pointer, args[1], args[2], zero, zero, zero])

        return types.int64(types.int64, types.int64, types.int64), emit

    return futex

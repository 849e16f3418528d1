"""The micro-kernels of one instruction set, chosen by row count.

``dot_rows(n, ...)`` runs the tile that fits n rows best and returns how many rows it did; callers
loop. Which tile computes a row never changes the row's bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import njit, types

from worker_proc.kernels.cpu import epilogue, rows, scalar, tiles
from worker_proc.kernels.cpu.isa import Isa

Kernel = Callable[..., Any]


def _widened(kind: Any) -> Any:
    """int64 for every integer, literals included; other types as they are."""
    plain = types.unliteral(kind)
    return types.int64 if isinstance(plain, types.Integer) else plain


def jit(function: Any) -> Any:
    """Compile without the interpreter lock, one version for all integer types.

    No fast-math: the order of sums is part of the result. Numba would compile a version for each
    constant and each integer width that a call happens to have; that tripled the start-up time.
    """
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    resolve = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        wide = {name: _widened(kind) for name, kind in kws.items()}
        return resolve(tuple(_widened(kind) for kind in args), wide)

    dispatcher.get_call_template = get_call_template
    return dispatcher


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Numba functions of one :class:`Isa`; addresses are int64."""

    isa: Isa
    dot_rows: Kernel
    """(n, x, ldx, w0, w1, steps, w_step, out, ldo) -> rows done."""
    dot_rows_first: Kernel
    """The same, prefetching the weights: for the first rows that meet a panel."""
    qk_rows: Kernel
    """The same under attention's tile configuration."""
    weigh_rows: Kernel
    """(n, p, ldp, blocks, num_blocks, offset, out, ldo) -> rows done."""
    epilogues: dict[str, Kernel]
    softmax_row: Kernel
    merge_row: Kernel
    finish_row: Kernel
    sum_squares: Kernel
    scale_to_bf16: Kernel
    scale_add: Kernel
    configure_tiles: Kernel | None
    """AMX only: (address of a tile configuration, or 0)."""
    pause: Kernel
    futex: Kernel


def _chain(makers: list[tuple[int, int, Any]], weigh: bool) -> Any:
    """A function that tries (threshold, rows, kernel) in turn; the last one always runs."""
    follow: Any = None
    for threshold, rows_done, kernel in reversed(makers):
        follow = (_weigh_level if weigh else _dot_level)(threshold, rows_done, kernel, follow)
    return follow


def _dot_level(threshold: int, rows_done: int, kernel: Any, follow: Any) -> Any:
    if follow is None:

        @jit
        def last(n: int, x: int, ldx: int, w0: int, w1: int, steps: int, w_step: int, out: int, ldo: int) -> int:
            kernel(x, ldx, w0, w1, steps, w_step, out, ldo)
            return rows_done

        return last

    @jit
    def level(n: int, x: int, ldx: int, w0: int, w1: int, steps: int, w_step: int, out: int, ldo: int) -> Any:
        if n < threshold:
            return follow(n, x, ldx, w0, w1, steps, w_step, out, ldo)
        kernel(x, ldx, w0, w1, steps, w_step, out, ldo)
        return rows_done

    return level


def _weigh_level(threshold: int, rows_done: int, kernel: Any, follow: Any) -> Any:
    if follow is None:

        @jit
        def last(n: int, p: int, ldp: int, blocks: int, num: int, offset: int, out: int, ldo: int) -> int:
            kernel(p, ldp, blocks, num, offset, out, ldo)
            return rows_done

        return last

    @jit
    def level(n: int, p: int, ldp: int, blocks: int, num: int, offset: int, out: int, ldo: int) -> Any:
        if n < threshold:
            return follow(n, p, ldp, blocks, num, offset, out, ldo)
        kernel(p, ldp, blocks, num, offset, out, ldo)
        return rows_done

    return level


def _tile_functions(isa: Isa) -> tuple[Any, Any, Any, Any]:
    """(dot_rows, dot_rows_first, qk_rows, weigh_rows)."""
    if isa.dot == "amx":
        limits = [(17, 32), (1, 16)]

        def amx(prefetch: bool, attention: bool) -> Any:
            return _chain([(t, r, tiles.make_amx_dot(isa, r, prefetch, attention)) for t, r in limits], False)

        weigh = _chain([(t, r, tiles.make_amx_weigh(isa, r)) for t, r in limits], True)
        return amx(False, False), amx(True, False), amx(False, True), weigh
    plain, first = (
        _chain([(r, r, tiles.make_vector_dot(isa, r, prefetch)) for r in isa.row_tiles], False)
        for prefetch in (False, True)
    )
    weigh = _chain([(r, r, tiles.make_vector_weigh(isa, r)) for r in isa.row_tiles], True)
    return plain, first, plain, weigh


def build(isa: Isa) -> KernelSet:
    """Generate the kernels; nothing is compiled before its first call."""
    dot_rows, dot_rows_first, qk_rows, weigh_rows = _tile_functions(isa)
    machine = platform.machine()
    return KernelSet(
        isa=isa,
        dot_rows=dot_rows,
        dot_rows_first=dot_rows_first,
        qk_rows=qk_rows,
        weigh_rows=weigh_rows,
        epilogues={mode: epilogue.make_epilogue(isa, mode) for mode in epilogue.MODES},
        softmax_row=epilogue.make_softmax_row(isa),
        merge_row=epilogue.make_merge_row(isa),
        finish_row=epilogue.make_finish_row(isa),
        sum_squares=rows.make_sum_squares(isa),
        scale_to_bf16=rows.make_scale_to_bf16(isa),
        scale_add=rows.make_scale_add(isa),
        configure_tiles=tiles.make_tile_configure() if isa.dot == "amx" else None,
        pause=scalar.make_pause(machine),
        futex=scalar.make_futex(machine),
    )

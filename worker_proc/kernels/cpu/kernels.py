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

from worker_proc.kernels.cpu import coded_tiles, epilogue, rows, scalar, tiles
from worker_proc.kernels.cpu.isa import Isa
from worker_proc.kernels.cpu.lean_compile import LeanCompiler

Kernel = Callable[..., Any]


def _widened(kind: Any) -> Any:
    """int64 for every integer, literals included; other types as they are."""
    plain = types.unliteral(kind)
    return types.int64 if isinstance(plain, types.Integer) else plain


def jit_as(tag: str) -> Any:
    """:func:`jit` for functions made in a factory: ``tag`` says which of its products this is.

    Machine code loaded from disk is linked by name, and two products of a factory would have one
    name. With the tag, functions with the same name and signature are the same code.
    """

    def decorate(function: Any) -> Any:
        function.__qualname__ = f"{function.__qualname__}.{tag}"
        return jit(function)

    return decorate


def jit(function: Any) -> Any:
    """Compile without the interpreter lock, one version for all integer types. For callers in compiled code.

    No fast-math: the order of sums is part of the result. Numba would compile a version for each
    constant and each integer width that a call happens to have; that tripled the start-up time.
    Nor are there wrappers for calls from Python or C, a third of the rest: only the step function is
    called from there, which is optimised as a whole (``lean_compile.py``).
    """
    wrap = njit(
        nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=LeanCompiler
    )
    dispatcher = wrap(function)
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
    jit: Kernel
    """Decorator for functions built on these kernels."""
    dot_rows: Kernel
    """(n, x, ldx, w0, w1, steps, w_step, out, ldo, ahead, lines) -> rows done."""
    dot_rows_first: Kernel
    """The same, prefetching the weights it reads and not ``ahead``: for the first rows that meet a panel. Where blocks
    lie apart, for ``most_wide_rows`` at most."""
    dot_rows_coded: Any
    """The same from a coded panel w0, which is decoded to w1 (None where weights are not coded)."""
    dot_block: Any
    """dot_rows for the column block w0 alone and a tile of exactly n rows, more than ``most_wide_rows``; where a
    panel's blocks lie apart (else None)."""
    dot_block_first: Any
    qk_rows: Kernel
    """The same for attention: under its tile configuration, or asking for pages."""
    weigh_rows: Kernel
    """(n, p, ldp, blocks, num_blocks, offset, out, ldo) -> rows done."""
    epilogues: dict[str, Kernel]
    row_peaks: Kernel
    score_peak: Kernel
    score_powers: Kernel
    merge_row: Kernel
    finish_row: Kernel
    sum_squares: Kernel
    scale_row: Kernel
    scale_add: Kernel
    rotate_query: Kernel
    """To activations."""
    rotate_key: Kernel
    """To bf16, the form of pages."""
    store_value: Kernel
    prefetch_lines: Kernel
    configure_tiles: Kernel | None
    """AMX only: (address of a tile configuration, or 0)."""
    pause: Kernel
    futex: Kernel


Level = tuple[int, int, Any]
"""(fewest rows it is worth, rows done, tile kernel)."""


def _dot_chain(tag: str, levels: list[Level]) -> Any:
    """``dot_rows``: the first level whose threshold n reaches; the last one always runs."""
    threshold, rows_done, kernel = levels[0]
    compiled = jit_as(f"{tag}_{rows_done}")
    if len(levels) == 1:

        @compiled
        def last(
            n: int, x: int, ldx: int, w0: int, w1: int, steps: int, w_step: int, out: int, ldo: int, ahead: int,
            lines: int,
        ) -> int:  # fmt: skip
            kernel(x, ldx, w0, w1, steps, w_step, out, ldo, ahead, lines)
            return rows_done

        return last
    follow = _dot_chain(tag, levels[1:])

    @compiled
    def level(
        n: int, x: int, ldx: int, w0: int, w1: int, steps: int, w_step: int, out: int, ldo: int, ahead: int, lines: int
    ) -> Any:
        if n < threshold:
            return follow(n, x, ldx, w0, w1, steps, w_step, out, ldo, ahead, lines)
        kernel(x, ldx, w0, w1, steps, w_step, out, ldo, ahead, lines)
        return rows_done

    return level


def _weigh_chain(tag: str, levels: list[Level]) -> Any:
    """``weigh_rows``, likewise."""
    threshold, rows_done, kernel = levels[0]
    compiled = jit_as(f"{tag}_{rows_done}")
    if len(levels) == 1:

        @compiled
        def last(n: int, p: int, ldp: int, blocks: int, num: int, offset: int, out: int, ldo: int) -> int:
            kernel(p, ldp, blocks, num, offset, out, ldo)
            return rows_done

        return last
    follow = _weigh_chain(tag, levels[1:])

    @compiled
    def level(n: int, p: int, ldp: int, blocks: int, num: int, offset: int, out: int, ldo: int) -> Any:
        if n < threshold:
            return follow(n, p, ldp, blocks, num, offset, out, ldo)
        kernel(p, ldp, blocks, num, offset, out, ldo)
        return rows_done

    return level


def _padded_levels(row_tiles: tuple[int, ...]) -> list[tuple[int, int]]:
    """(fewest rows, rows of the tile): up to the tallest tile's, all rows are in one tile, so that a panel passes once.

    Nine rows in a tile of twelve cost three that nobody reads; in eight and one, the panel a second time. Three rows
    take as long as four, so there is no tile of three.
    """
    tiles = [rows for rows in row_tiles if rows != 3]
    return [(lower + 1, rows) for rows, lower in zip(tiles, [*tiles[1:], 0], strict=True)]


def _tile_functions(isa: Isa) -> tuple[Any, ...]:
    """(dot_rows, dot_rows_first, dot_rows_coded, qk_rows, weigh_rows, dot_block, dot_block_first)."""
    # A tile of 32 rows pays from 17 on: half of it costs as much as the tile of 16.
    limits = [(17, 32), (1, 16)] if isa.dot == "amx" else [(rows, rows) for rows in isa.row_tiles]
    padded = _padded_levels(isa.row_tiles) if isa.codes_weights else limits
    most_first = isa.most_wide_rows if isa.blocks_apart else isa.row_tiles[0]  # more rows begin with dot_block_first

    def block(tag: str, prefetch: bool) -> Any:
        every = range(isa.row_tiles[0], isa.most_wide_rows, -1)
        tall = [(rows, rows, tiles.make_vector_dot(isa, rows, prefetch, one_block=True)) for rows in every]
        return _dot_chain(f"{isa.name}_{tag}", tall) if isa.blocks_apart else None

    def dot(tag: str, prefetch: bool, attention: bool, coded: bool = False) -> Any:
        def make(rows: int) -> Any:
            if isa.dot == "amx":
                return tiles.make_amx_dot(isa, rows, prefetch, attention)
            if coded:
                return coded_tiles.make_coded_dot(isa, rows)
            return tiles.make_vector_dot(isa, rows, prefetch, pages=attention)

        levels = limits if attention else padded
        used = [(least, rows) for least, rows in levels if rows <= most_first] if prefetch else levels
        return _dot_chain(f"{isa.name}_{tag}", [(least, rows, make(rows)) for least, rows in used])

    make_weigh = tiles.make_amx_weigh if isa.dot == "amx" else tiles.make_vector_weigh
    weigh = _weigh_chain(f"{isa.name}_weigh", [(least, rows, make_weigh(isa, rows)) for least, rows in limits])
    plain = dot("plain", False, False)
    qk = dot("qk", False, True) if isa.dot == "amx" or isa.asks_for_pages else plain
    coded = dot("coded", True, False, coded=True) if isa.codes_weights else None
    return plain, dot("first", True, False), coded, qk, weigh, block("block", False), block("block_first", True)


def build(isa: Isa) -> KernelSet:
    """Generate the kernels; nothing is compiled before its first call."""
    dot_rows, dot_rows_first, dot_rows_coded, qk_rows, weigh_rows, dot_block, dot_block_first = _tile_functions(isa)
    machine = platform.machine()
    rotate_key = rows.make_rotate(isa, 2)
    return KernelSet(
        isa=isa,
        jit=jit_as(isa.name),
        dot_rows=dot_rows,
        dot_rows_first=dot_rows_first,
        dot_rows_coded=dot_rows_coded,
        dot_block=dot_block,
        dot_block_first=dot_block_first,
        qk_rows=qk_rows,
        weigh_rows=weigh_rows,
        epilogues={mode: epilogue.make_epilogue(isa, mode) for mode in epilogue.MODES},
        row_peaks=epilogue.make_row_peaks(isa),
        score_peak=epilogue.make_score_peak(isa),
        score_powers=epilogue.make_score_powers(isa),
        merge_row=epilogue.make_merge_row(isa),
        finish_row=epilogue.make_finish_row(isa),
        sum_squares=rows.make_sum_squares(isa),
        scale_row=rows.make_scale_row(isa),
        scale_add=rows.make_scale_add(isa),
        rotate_query=rotate_key if isa.activation_bytes == 2 else rows.make_rotate(isa, 4),
        rotate_key=rotate_key,
        store_value=rows.make_store_value(isa),
        prefetch_lines=rows.make_prefetch_lines(isa),
        configure_tiles=tiles.make_tile_configure() if isa.dot == "amx" else None,
        pause=scalar.make_pause(machine),
        futex=scalar.make_futex(machine),
    )

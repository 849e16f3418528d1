"""A linear layer as one phase of the step: claim a panel, run tiles over rows, finish each tile.

Weights are packed once into panels of 32 columns (``packing.py``); a panel is read front to back.
An item is one panel times one block of rows. The block is chosen so that its activations stay in
the second-level cache while the panels pass by (``row_block``); with fewer rows than that there is
one block and the weights are read exactly once, which is the limit of decoding: bytes of weights
over memory bandwidth. The first tile of a panel waits for memory; while the others compute, they ask for the
next panel, which follows in memory, so that a chunk of prefill takes the longer of the two times, not their sum.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from worker_proc.kernels.cpu import coding
from worker_proc.kernels.cpu.coding import CODED
from worker_proc.kernels.cpu.epilogue import MODES, SCRATCH_ROW_BYTES
from worker_proc.kernels.cpu.kernels import KernelSet
from worker_proc.kernels.cpu.scalar import i64_pointer
from worker_proc.kernels.cpu.team import next_item
from worker_proc.kernels.cpu.tiles import STEP_BYTES

PANEL_STEP_BYTES = 2 * STEP_BYTES
STEP_LINES = PANEL_STEP_BYTES // 64
STORE, ADD, SILU, GELU = range(len(MODES))
GROUP_TILES = 4
"""Tiles of rows that meet a column block one after the other, where blocks lie apart."""
ACTIVATION_BYTES = 1 << 20
"""Activations of a row block: half of a 2 MiB second-level cache."""


def row_block(inner: int, activation_bytes: int) -> int:
    """Rows of a block for ``inner`` inputs: a multiple of 32 between 32 and 512."""
    return max(32, min(512, ACTIVATION_BYTES // (activation_bytes * inner) // 32 * 32))


def _make_panel(kernels: KernelSet, finish: Any) -> Any:
    """``panel(mode, x, ldx, rows, w, bias, steps, out, ldo, sums, room)``: some rows times a panel, tile after tile."""
    dot_rows, dot_rows_first = kernels.dot_rows, kernels.dot_rows_first

    @kernels.jit
    def panel(
        mode: int, x: int, ldx: int, rows: int, w: int, bias: int, steps: int, out: int, ldo: int, sums: int, room: int
    ) -> None:
        row, ahead, lines = 0, w + steps * PANEL_STEP_BYTES, 0
        second = w + STEP_BYTES  # the other column block
        while row < rows:
            left = rows - row
            at = x + row * ldx
            if row == 0:
                done = dot_rows_first(left, at, ldx, w, second, steps, PANEL_STEP_BYTES, sums, SCRATCH_ROW_BYTES, 0, 0)
                if left > done:
                    lines = STEP_LINES // ((left - 1) // done)
            else:
                done = dot_rows(
                    left, at, ldx, w, second, steps, PANEL_STEP_BYTES, sums, SCRATCH_ROW_BYTES, ahead, lines
                )
                ahead += steps * lines * 64
            finish(mode, sums, min(done, left), bias, out + row * ldo, ldo)
            row += done

    return panel


def _make_panel_coded(kernels: KernelSet, finish: Any) -> Any:
    """The same where panels may be coded: ``w`` is an entry of a matrix's list (``coding.py``), ``room`` this thread's
    scratch for a decoded panel. The first tile decodes and the others find what it left; if there are no others,
    steps take turns in the same lines."""
    dot_rows, dot_rows_first, dot_rows_coded = kernels.dot_rows, kernels.dot_rows_first, kernels.dot_rows_coded
    tallest = kernels.isa.row_tiles[0]

    @kernels.jit
    def panel(
        mode: int, x: int, ldx: int, rows: int, w: int, bias: int, steps: int, out: int, ldo: int, sums: int, room: int
    ) -> None:
        coded = w & CODED
        w -= coded
        row, lines, step_lines = 0, 0, STEP_LINES
        ahead, second = w + steps * PANEL_STEP_BYTES, w + STEP_BYTES
        while row < rows:
            left = rows - row
            at = x + row * ldx
            if row > 0:
                done = dot_rows(
                    left, at, ldx, w, second, steps, PANEL_STEP_BYTES, sums, SCRATCH_ROW_BYTES, ahead, lines
                )
                ahead += steps * lines * 64
            elif coded != 0:
                kept = 1 if rows <= tallest else -1
                done = dot_rows_coded(left, at, ldx, w, room, steps, kept, sums, SCRATCH_ROW_BYTES, 0, 0)
                ahead = w + (32 * steps + 63) // 64 * 64 + steps * coding.STEP_BYTES
                w, second, step_lines = room, room + STEP_BYTES, coding.STEP_BYTES // 64
            else:
                done = dot_rows_first(left, at, ldx, w, second, steps, PANEL_STEP_BYTES, sums, SCRATCH_ROW_BYTES, 0, 0)
            if row == 0 and left > done:
                lines = step_lines // ((left - 1) // done)
            finish(mode, sums, min(done, left), bias, out + row * ldo, ldo)
            row += done

    return panel


def _make_panel_apart(kernels: KernelSet, finish: Any) -> Any:
    """The same where column blocks lie apart: all rows of a group meet one block, which then lies in the first-level
    cache, before they meet the other.

    A tile of up to four rows takes as long as one of four: each of its sums waits for the one before it. So rows are
    shared out evenly: eight are four and four, not six and two.
    """
    dot_rows_first, dot_block, dot_block_first = kernels.dot_rows_first, kernels.dot_block, kernels.dot_block_first
    tallest, most_wide = kernels.isa.row_tiles[0], kernels.isa.most_wide_rows
    group_rows = GROUP_TILES * tallest

    @kernels.jit
    def panel(
        mode: int, x: int, ldx: int, rows: int, w: int, bias: int, steps: int, out: int, ldo: int, sums: int, room: int
    ) -> None:
        block_bytes = steps * STEP_BYTES
        if rows <= most_wide:
            row = 0
            while row < rows:
                at = x + row * ldx
                row += dot_rows_first(
                    rows - row, at, ldx, w, w + block_bytes, steps, STEP_BYTES, sums + row * SCRATCH_ROW_BYTES,
                    SCRATCH_ROW_BYTES, 0, 0,
                )  # fmt: skip
            finish(mode, sums, rows, bias, out, ldo)
            return
        others = (rows + tallest - 1) // tallest - 1
        lines = STEP_BYTES // 64 // max(others, 1)
        num_groups = (rows + group_rows - 1) // group_rows
        first = 0
        for group in range(num_groups):
            count = (rows - first + num_groups - group - 1) // (num_groups - group)
            for block in range(2):
                at_block = w + block * block_bytes
                ahead = at_block + 2 * block_bytes  # the next panel's
                row = 0
                while row < count:
                    num_tiles = (count - row + tallest - 1) // tallest
                    height = (count - row + num_tiles - 1) // num_tiles
                    at, into = x + (first + row) * ldx, sums + row * SCRATCH_ROW_BYTES + block * 64
                    if first + row == 0:
                        dot_block_first(height, at, ldx, at_block, 0, steps, STEP_BYTES, into, SCRATCH_ROW_BYTES, 0, 0)
                    else:
                        dot_block(
                            height, at, ldx, at_block, 0, steps, STEP_BYTES, into, SCRATCH_ROW_BYTES, ahead, lines
                        )
                        ahead += steps * lines * 64
                    row += height
            finish(mode, sums, count, bias, out + first * ldo, ldo)
            first += count

    return panel


def make_linear(kernels: KernelSet) -> Any:
    """``linear(mode, tid, nt, counters, x, ldx, num_rows, block, w, bias, num_panels, steps, out, ldo, sums, room,
    peaks)``.

    ``mode``: an index into ``epilogue.MODES``; ``sums``, ``room``: this thread's scratch; strides in bytes. Where
    ``peaks`` is not 0, each row gets, so many bytes behind its outputs, the largest of every panel's 32.
    """
    gated_out = 16 * kernels.isa.activation_bytes
    store, add, silu, gelu = (kernels.epilogues[name] for name in MODES)
    row_peaks = kernels.row_peaks

    @kernels.jit
    def finish(mode: int, sums: int, rows: int, bias: int, out: int, ldo: int) -> None:
        if mode == STORE:
            store(sums, rows, bias, out, ldo)
        elif mode == ADD:
            add(sums, rows, bias, out, ldo)
        elif mode == SILU:
            silu(sums, rows, bias, out, ldo)
        else:
            gelu(sums, rows, bias, out, ldo)

    codes = kernels.isa.codes_weights
    if codes:
        panel = _make_panel_coded(kernels, finish)
    else:
        panel = _make_panel_apart(kernels, finish) if kernels.isa.blocks_apart else _make_panel(kernels, finish)

    @kernels.jit
    def panel_at(w: int, index: int, num_panels: int, steps: int) -> Any:
        if codes:
            return carray(i64_pointer(w), (num_panels,))[index]
        return w + index * steps * PANEL_STEP_BYTES

    @kernels.jit
    def linear(
        mode: int, tid: int, nt: int, counters: int, x: int, ldx: int, num_rows: int, block: int, w: int, bias: int,
        num_panels: int, steps: int, out: int, ldo: int, sums: int, room: int,
        peaks: int,
    ) -> None:  # fmt: skip
        num_blocks = (num_rows + block - 1) // block
        panel_out = gated_out if mode >= SILU else 128  # 16 activations or 32 float32
        victim = 0
        while True:
            item, victim = next_item(counters, tid, nt, num_panels * num_blocks, victim)
            if item < 0:
                break
            first = item // num_panels * block
            index = item % num_panels
            panel_bias = bias + index * 128 if bias != 0 else 0
            rows, at = min(block, num_rows - first), out + first * ldo
            panel(
                mode, x + first * ldx, ldx, rows, panel_at(w, index, num_panels, steps), panel_bias, steps,
                at + index * panel_out, ldo, sums, room,
            )  # fmt: skip
            if peaks != 0:
                row_peaks(at + index * panel_out, rows, ldo, at + peaks + 4 * index)

    return linear

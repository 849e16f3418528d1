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

from worker_proc.kernels.cpu.epilogue import MODES, SCRATCH_ROW_BYTES
from worker_proc.kernels.cpu.kernels import KernelSet
from worker_proc.kernels.cpu.team import next_item
from worker_proc.kernels.cpu.tiles import STEP_BYTES

PANEL_STEP_BYTES = 2 * STEP_BYTES
STEP_LINES = PANEL_STEP_BYTES // 64
STORE, ADD, SILU, GELU = range(len(MODES))
ACTIVATION_BYTES = 1 << 20
"""Activations of a row block: half of a 2 MiB second-level cache."""


def row_block(inner: int, activation_bytes: int) -> int:
    """Rows of a block for ``inner`` inputs: a multiple of 32 between 32 and 512."""
    return max(32, min(512, ACTIVATION_BYTES // (activation_bytes * inner) // 32 * 32))


def make_linear(kernels: KernelSet) -> Any:
    """``linear(mode, tid, nt, counters, x, ldx, num_rows, block, w, bias, num_panels, steps, out, ldo, sums)``.

    ``mode``: an index into ``epilogue.MODES``; ``sums``: this thread's scratch; strides in bytes.
    """
    dot_rows, dot_rows_first = kernels.dot_rows, kernels.dot_rows_first
    gated_out = 16 * kernels.isa.activation_bytes
    apart = kernels.isa.blocks_apart
    block_step = STEP_BYTES if apart else PANEL_STEP_BYTES
    store, add, silu, gelu = (kernels.epilogues[name] for name in MODES)

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

    @kernels.jit
    def panel(
        mode: int, x: int, ldx: int, rows: int, w: int, bias: int, steps: int, out: int, ldo: int, sums: int
    ) -> None:
        row, ahead, lines = 0, w + steps * PANEL_STEP_BYTES, 0
        second = w + (steps * STEP_BYTES if apart else STEP_BYTES)  # the other column block
        while row < rows:
            left = rows - row
            at = x + row * ldx
            if row == 0:
                done = dot_rows_first(left, at, ldx, w, second, steps, block_step, sums, SCRATCH_ROW_BYTES, 0, 0)
                if left > done:
                    lines = STEP_LINES // ((left - 1) // done)
            else:
                done = dot_rows(left, at, ldx, w, second, steps, block_step, sums, SCRATCH_ROW_BYTES, ahead, lines)
                ahead += steps * lines * 64
            finish(mode, sums, min(done, left), bias, out + row * ldo, ldo)
            row += done

    @kernels.jit
    def linear(
        mode: int, tid: int, nt: int, counters: int, x: int, ldx: int, num_rows: int, block: int, w: int, bias: int,
        num_panels: int, steps: int, out: int, ldo: int, sums: int,
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
            panel(
                mode, x + first * ldx, ldx, min(block, num_rows - first), w + index * steps * PANEL_STEP_BYTES,
                panel_bias, steps, out + first * ldo + index * panel_out, ldo, sums,
            )  # fmt: skip

    return linear

"""bf16 weights in 12 bits each, without loss.

A step of decoding waits for weights to come from memory, so fewer bytes of them are less time. The upper byte of a bf16
is its sign and 7 of the 8 bits of its exponent, and neighbouring weights have few different ones: the 512 weights of
a column block's step (``tiles.py``) hardly ever more than 16. So a block keeps a table of them, and for each weight its
number in that table beside the lower byte as it is. Tiles get back the very bits; no logit changes.

DFloat11 (Zhang et al. 2025) codes exponents by their frequency, in 3 bits, for GPUs. A code of one length
costs a bit more, and vector instructions undo it: one shuffle looks up 64 numbers in a table of 16.

A coded panel of S steps
    tables    [S][2][16]    the upper bytes of each step's two blocks
    blocks    [S][2][4]     groups of four pairs of inputs, 128 weights, three cache lines:
        lower bytes    [2][64]    of the first two pairs, of the other two
        numbers        [64]       in the low half those of the first line, in the high half of the second

Two pairs of inputs (32 weights each, P and Q) alternate in a line by eights, P0-7 Q0-7 P8-15 and so on: the
instructions that interleave the bytes of two registers then give one pair's weights, and the other's.

A panel with a block of more upper bytes stays as it is. So a matrix is a list of addresses of its panels, one behind
the other in memory; :data:`CODED` is added to those that are coded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from worker_proc.kernels.cpu import compile_cache

CODED = 1
"""Added to the address of a panel, which is a multiple of 64."""
TABLE_BYTES = 16
GROUPS = 4
GROUP_BYTES = 192
BLOCK_BYTES = GROUPS * GROUP_BYTES
STEP_BYTES = 2 * BLOCK_BYTES
PLAIN_STEP_BYTES = 2048


def tables_bytes(steps: int) -> int:
    """Bytes of a coded panel before its blocks."""
    return (2 * TABLE_BYTES * steps + 63) // 64 * 64


def panel_bytes(steps: int) -> int:
    """Bytes of a coded panel."""
    return tables_bytes(steps) + STEP_BYTES * steps


def _encode_panel(plain: Any, coded: Any, steps: int) -> bool:
    """uint16 [1024 S] to uint8 [panel_bytes(S)]; False, and nothing of use in ``coded``, where it cannot be coded."""
    seen, numbers = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    blocks = (32 * steps + 63) // 64 * 64
    for block in range(2 * steps):
        first = 512 * block
        for i in range(first, first + 512):
            seen[plain[i] >> 8] = 1
        count = 0
        for upper in range(256):
            if seen[upper]:
                if count == 16:
                    return False
                coded[16 * block + count] = upper
                numbers[upper] = count
                count += 1
                seen[upper] = 0
        for group in range(4):
            at = blocks + 768 * block + 192 * group
            for pair in range(4):
                source, line = first + 128 * group + 32 * pair, at + 64 * (pair // 2)
                for i in range(32):
                    weight, place = plain[source + i], 16 * (i // 8) + 8 * (pair % 2) + i % 8
                    coded[line + place] = weight & 255
                    number = numbers[weight >> 8]
                    if pair < 2:
                        coded[at + 128 + place] = number
                    else:
                        coded[at + 128 + place] |= number << 4
    return True


def make_encoder() -> Any:
    """``encode(plain, coded, steps) -> bool``, :func:`_encode_panel` loaded or compiled."""
    encode = njit(nogil=True)(_encode_panel)
    compile_cache.attach(encode, "encode_panel", "any")
    encode.compile((types.Array(types.uint16, 1, "C"), types.Array(types.uint8, 1, "C"), types.int64))
    return encode

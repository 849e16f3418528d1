"""Weights into panels, once at start-up.

A panel is 32 output columns: for each step of 32 inputs two column blocks of 1 KiB,
``[16 pairs][16 columns][2]`` bf16 (see ``tiles.py``). They alternate where tiles take both at once; where the
taller tiles take first the one and then the other, one block with all its steps precedes the other. Either way a
panel is read front to back, which is what the memory system likes most: an EPYC Milan reads 16 to 18 GB/s so, and
10 to 12 when every other KiB is left for later.

All panels lie in one arena of 2 MiB pages: a decode step touches every weight, and with 4 KiB pages
it would also miss the address cache for every 4 KiB.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_proc.kernels.cpu import coding
from worker_proc.kernels.cpu.arch import Bf16

HUGE_PAGE = 1 << 21
PANELS_AT_ONCE = 16
"""Panels in the form that is to be coded: so many lie in the second-level cache."""


def huge_buffer(num_bytes: int, what: str) -> NDArray[np.uint8]:
    """Zeroed memory aligned to 2 MiB, on huge pages where the system grants them.

    Raises MemoryError naming ``what`` and the size. The memory is returned when the array dies.
    """
    try:
        region = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot map {num_bytes / 2**20:.0f} MiB for {what}: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages; slower, not wrong
            pass
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + num_bytes]


def padded(weight: Bf16, rows: int, columns: int) -> Bf16:
    """The matrix with zeros up to [rows, columns]."""
    if weight.shape == (rows, columns):
        return weight
    out = np.zeros((rows, columns), weight.dtype)
    out[: weight.shape[0], : weight.shape[1]] = weight
    return out


def pack_panels(weight: Bf16, out: NDArray[np.uint8] | None = None, *, blocks_apart: bool = False) -> Bf16:
    """[N, K] bf16 (N, K multiples of 32) to flat panels, as bf16 bits; in ``out`` (2 N K bytes) if given.

    Pairs of inputs move as single 32-bit words, six times faster than 16-bit elements would.
    """
    n, k = weight.shape
    pairs = np.ascontiguousarray(weight).view(np.int32).reshape(n // 32, 2, 16, k // 32, 16)
    words = np.empty(n * k // 2, np.int32) if out is None else out.view(np.int32)
    if blocks_apart:
        words.reshape(n // 32, 2, k // 32, 16, 16)[...] = pairs.transpose(0, 1, 3, 4, 2)
    else:
        words.reshape(n // 32, k // 32, 2, 16, 16)[...] = pairs.transpose(0, 3, 1, 4, 2)
    return words.view(np.uint16)


def pack_on(
    pool: Executor, num_threads: int, weight: Bf16, out: NDArray[np.uint8], *, blocks_apart: bool = False
) -> None:
    """:func:`pack_panels` by ``num_threads`` threads of ``pool``, a range of panels each; returns when done."""
    panels, columns = weight.shape[0] // 32, weight.shape[1]
    bounds = [panels * i // num_threads * 32 for i in range(num_threads + 1)]
    jobs = [
        pool.submit(pack_panels, weight[a:b], out[2 * columns * a : 2 * columns * b], blocks_apart=blocks_apart)
        for a, b in pairwise(bounds)
    ]
    for job in jobs:
        job.result()


def pack_coded(
    pool: Executor, num_threads: int, weight: Bf16, arena: Arena, encode: Callable[..., bool]
) -> NDArray[np.int64]:
    """[N, K] bf16 to panels in 12 bits where these do (``coding.py``), cut from the arena one after the other.

    ``encode``: :func:`coding.make_encoder`'s. Returns the panels' addresses [N / 32], ``CODED`` added where they are.
    """
    num_panels, steps = weight.shape[0] // 32, weight.shape[1] // 32
    coded = np.ones(num_panels, bool)
    while True:
        sizes = np.where(coded, coding.panel_bytes(steps), coding.PLAIN_STEP_BYTES * steps)
        ends = np.cumsum(sizes)
        place = arena.rest(int(ends[-1]))
        parts = [place[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

        def pack(panels: range, parts: list[NDArray[np.uint8]] = parts) -> bool:
            fits = True
            for first in panels[::PANELS_AT_ONCE]:
                some = range(first, min(first + PANELS_AT_ONCE, panels.stop))
                plain = pack_panels(weight[32 * some.start : 32 * some.stop]).reshape(len(some), -1)
                for panel, bits in zip(some, plain, strict=True):
                    if not coded[panel]:
                        parts[panel][:] = bits.view(np.uint8)
                    elif not encode(bits, parts[panel], steps):
                        coded[panel] = fits = False
            return fits

        bounds = [num_panels * i // num_threads for i in range(num_threads + 1)]
        jobs = [pool.submit(pack, range(a, b)) for a, b in pairwise(bounds)]
        fits = [job.result() for job in jobs]
        if all(fits):
            arena.take(int(ends[-1]))
            addresses: NDArray[np.int64] = place.ctypes.data + ends - sizes + coded * coding.CODED
            return addresses


def interleave_gate_up(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """[I, ...] twice to [2I, ...]: 16 gate rows, 16 up rows, and so on, so that a panel has both."""
    size = gate.shape[0]
    parts = [values.reshape(size // 16, 16, *values.shape[1:]) for values in (gate, up)]
    return np.stack(parts, 1).reshape(2 * size, *gate.shape[1:])


def pad_heads(weight: NDArray[Any], num_heads: int, head_dim: int, multiple: int = 32) -> NDArray[Any]:
    """[heads * head_dim, ...] with each head padded to a multiple of 32 rows (or another)."""
    head_pad = -(-head_dim // multiple) * multiple
    if head_pad == head_dim:
        return weight
    out = np.zeros((num_heads, head_pad, *weight.shape[1:]), weight.dtype)
    out[:, :head_dim] = weight.reshape(num_heads, head_dim, *weight.shape[1:])
    return out.reshape(num_heads * head_pad, *weight.shape[1:])


def pad_head_columns(weight: NDArray[Any], num_heads: int, head_dim: int) -> NDArray[Any]:
    """[N, heads * head_dim] with each head's columns padded to a multiple of 32."""
    if head_dim % 32 == 0:
        return weight
    return pad_heads(weight.T, num_heads, head_dim).T


def pad_halves(weight: NDArray[Any], num_heads: int, head_dim: int) -> NDArray[Any]:
    """As :func:`pad_heads`, for queries and keys: each half of a head is padded to a multiple of 16.

    The rotary embedding pairs column i with i + head_dim / 2; so both are whole vectors. Queries and
    keys are permuted alike, which leaves their products as they are.
    """
    return pad_heads(weight, 2 * num_heads, head_dim // 2, 16)


class Arena:
    """One buffer from which arrays are cut in order, 64-byte aligned."""

    def __init__(self, num_bytes: int, what: str) -> None:
        self._buffer = huge_buffer(num_bytes, what)
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._used

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next ``num_bytes`` bytes, zero unless something was written to what ``rest`` gave."""
        taken = self.rest(num_bytes)
        self._used = -(-(self._used + num_bytes) // 64) * 64
        return taken

    def rest(self, num_bytes: int) -> NDArray[np.uint8]:
        """What ``take`` would give, without taking it."""
        start, end = self._used, self._used + num_bytes
        if end > self._buffer.size:
            raise MemoryError(f"the weight arena of {self._buffer.size} bytes is too small for {end}")
        return self._buffer[start:end]

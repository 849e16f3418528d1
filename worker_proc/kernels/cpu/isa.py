"""Which vector instructions the kernels use on this machine.

The kernels are written once over 16-lane float32 vectors; LLVM splits them where registers are
narrower (two on AVX2, four on NEON). What differs between machines is only how a dot product of
bf16 pairs is made, and how many rows a register tile holds; an :class:`Isa` says both.

Which is faster, ``vdpbf16ps`` or widening to float32, is a matter of the core, not of the feature: AMD's cores
begin one ``vdpbf16ps`` of 512 bits each cycle, twice the multiply-adds of their FMA units; Intel's begin one
every second cycle, half of what their two FMA units do (Emerald Rapids, per core: 86 against 174 GFLOP/s).
The choice goes by the core's name, not by a measurement: a worker that is started again must add in the same order.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import dataclass

ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
X86_64_ARCH_PRCTL = 158


PASSING, L2 = 0, 2
"""LLVM's localities: ``prefetchnta``, ``prefetcht1``."""


@dataclass(frozen=True, slots=True)
class Isa:
    """One way of generating the kernels."""

    name: str
    dot: str
    """How bf16 weights are multiplied: ``amx`` (tiles) and ``vdpbf16ps`` with bf16 activations, ``fma`` (weights are
    widened) with float32 ones."""
    row_tiles: tuple[int, ...]
    """Rows of the register tiles, descending, the last 1. With AMX: (32, 16), the last padded."""
    native_bf16_store: bool
    """The machine rounds float32 to bf16 in one instruction."""
    splits_powers: bool
    """It has AVX-512's instructions that split a number at its integer part, scale by powers of two, and guess
    reciprocals."""
    most_wide_rows: int = 32
    """Most rows whose tile holds both column blocks at once; a taller one takes first one block, then the other,
    so that its sums and one block's widened weights fit into the registers (``tiles.py``)."""
    blocks_apart: bool = False
    """A panel's column blocks lie one after the other, each whole, so that a tile which takes one, then the other,
    reads memory from front to back; else they alternate (``packing.py``)."""

    codes_weights: bool = False
    """Weights are kept in 12 bits each (``coding.py``). Needs AVX-512."""
    prefetch_bytes: int = 16384
    """How far ahead the first rows that meet a panel ask for weights: eight steps of both column blocks."""
    prefetch_into: int = L2
    """:data:`L2`, or :data:`PASSING`: the first-level cache alone, so that the weights, more than all caches hold, do
    not push out what the other processes will need again."""

    asks_for_pages: bool = False
    """Attention's tiles ask for the next K and V line by line while they multiply."""

    @property
    def tile_tokens(self) -> int:
        """Tokens of a full tile. With AMX 16: a tile of 32 multiplies as much as two of 16, and both are padded."""
        return self.row_tiles[-1 if self.dot == "amx" else 0]

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of the rows that tiles multiply. float32 ones need no widening for each panel that
        they meet, and lose nothing to rounding."""
        return 4 if self.dot == "fma" else 2


AMX = Isa("amx_bf16", "amx", (32, 16), True, True)
AVX512_BF16 = Isa(
    "avx512_bf16", "vdpbf16ps", (12, 8, 4, 3, 2, 1), True, True, prefetch_bytes=12288, prefetch_into=PASSING,
    asks_for_pages=True, codes_weights=True,
)  # fmt: skip
"""For AMD's cores. Where weights pass by the caches of a Zen 5, the other processes take a fifth less processor
time for a token (docs/cpu.md)."""
AVX512_BF16_FMA = Isa("avx512_bf16_fma", "fma", (12, 8, 4, 3, 2, 1), True, True)
"""bf16 is stored by the machine's instruction and multiplied as float32."""
AVX512 = Isa("avx512", "fma", (12, 8, 4, 3, 2, 1), False, True)
AVX2 = Isa("avx2", "fma", (6, 4, 3, 2, 1), False, False, most_wide_rows=2, blocks_apart=True)
NEON = Isa("neon", "fma", (6, 4, 2, 1), False, False, most_wide_rows=2, blocks_apart=True)

ALL = (AMX, AVX512_BF16, AVX512_BF16_FMA, AVX512, AVX2, NEON)


def candidates(features: Mapping[str, bool], machine: str, cpu: str) -> list[Isa]:
    """The sets a CPU with these LLVM feature names can run, fastest first; ``cpu`` is LLVM's name of its core."""

    def has(*names: str) -> bool:
        return all(features.get(name, False) for name in names)

    if machine in ("aarch64", "arm64"):
        return [NEON] if has("neon") else []
    found = []
    avx512 = has("avx512f", "avx512bw", "avx512vl", "avx512dq")
    if avx512 and has("avx512bf16", "amx-tile", "amx-bf16"):
        found.append(AMX)
    if avx512 and has("avx512bf16"):
        found += [AVX512_BF16, AVX512_BF16_FMA] if cpu.startswith("znver") else [AVX512_BF16_FMA, AVX512_BF16]
    if avx512:
        found.append(AVX512)
    if has("avx2", "fma"):
        found.append(AVX2)
    return found


def request_amx() -> bool:
    """Ask Linux for the tile registers, for this process and threads made later.

    Linux hands them out on request only, because they make every context 8 KiB larger. Asking
    again is harmless. False when the kernel refuses (too old, or not permitted).
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(X86_64_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def detect(allowed: tuple[str, ...] = ()) -> Isa | str:
    """The fastest set this machine runs, or the reason why there is none.

    ``allowed`` restricts the choice to these names (tests compare the sets with each other).
    """
    from llvmlite import binding

    if platform.system() != "Linux":
        return f"the CPU fast path needs Linux (futex); this is {platform.system()}"
    found = candidates(binding.get_host_cpu_features(), platform.machine(), binding.get_host_cpu_name())
    if allowed:
        found = [isa for isa in found if isa.name in allowed]
    for isa in found:
        if isa.dot != "amx" or request_amx():
            return isa
    wanted = f" among {', '.join(allowed)}" if allowed else ""
    return f"no vector instruction set{wanted} for the CPU fast path on this {platform.machine()} processor"

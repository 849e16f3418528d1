"""In which number format the model is loaded: ``--dtype``, and what ``auto`` means on which machine."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker_proc.generic.quantized import quantization_of


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype to load, and the one to load instead where the CPU's fast path does not take the model."""

    dtype: torch.dtype
    generic: torch.dtype

    @property
    def is_for_fast_path(self) -> bool:
        """Another path would calculate in another dtype: torch is slow in bfloat16 on such a machine."""
        return self.dtype != self.generic


def choose_precision(wanted: str, device: torch.device, fast_path: bool) -> Precision:
    """``wanted``: --dtype. ``auto`` is bfloat16 where the device calculates in it, else float32.

    The fast path of a CPU has weights in bfloat16 in any case, and widens them itself where the CPU cannot
    multiply them: half the bytes to read for each token. ``fast_path``: it may take this model.
    """
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return Precision(dtype, dtype)
    has_bf16 = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_bf16()
    generic = torch.bfloat16 if has_bf16 else torch.float32
    return Precision(torch.bfloat16 if fast_path else generic, generic)


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """The CPU multiplies bfloat16 in hardware (AVX512_BF16, AMX, Armv8.6, Apple M2 and later)."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def fast_path_may_take(hf_config: Any) -> bool:
    """Whether the CPU's fast path runs on this machine and describes this type of model; not yet whether it fits."""
    try:
        from worker_proc.kernels.cpu import arch, isa
    except ImportError:
        return False
    plain = not quantization_of(hf_config)
    return plain and arch.is_described(hf_config.model_type) and not isinstance(isa.detect(), str)

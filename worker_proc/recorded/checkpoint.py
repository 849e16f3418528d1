"""Tensors of a safetensors checkpoint as bfloat16 bits, by NumPy alone.

A safetensors file is eight bytes with the length of a JSON header, the header (for each tensor its dtype,
shape and place), and the bytes of all tensors. Files are mapped, so a tensor is read when it is used.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_proc.kernels.cpu.arch import Bf16

_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_MAX_HEADER = 100 << 20
"""The format's own limit."""


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads the weights from; empty where they are not safetensors."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


class Checkpoint:
    """The tensors of some files by name. Raises ValueError for a file that is not one, OSError if it cannot be read."""

    def __init__(self, files: list[Path]) -> None:
        self._places: dict[str, tuple[NDArray[np.uint8], str, list[int]]] = {}
        for path in files:
            data = np.memmap(path, np.uint8, "r")
            size = int(data[:8].view("<u8")[0]) if data.size >= 8 else _MAX_HEADER + 1
            if size > min(_MAX_HEADER, data.size - 8):
                raise ValueError(f"{path} is not a safetensors file")
            header: dict[str, Any] = json.loads(data[8 : 8 + size].tobytes())
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                self._places[name] = data[8 + size + begin : 8 + size + end], entry["dtype"], entry["shape"]

    def bf16(self, name: str) -> Bf16:
        """A tensor rounded to bfloat16, to nearest, ties to even, as torch does it.

        Raises KeyError for a name that is not there, ValueError for a dtype other than BF16, F16 and F32.
        """
        data, dtype, shape = self._places[name]
        if dtype not in _DTYPES or data.nbytes != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ValueError(f"tensor {name} of {dtype}, {data.nbytes} bytes for shape {shape}")
        values = data.view(_DTYPES[dtype]).reshape(shape)
        return values if dtype == "BF16" else rounded(values.astype(np.float32))


def rounded(values: NDArray[np.float32]) -> Bf16:
    """float32 to bfloat16 bits, to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

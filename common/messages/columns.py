"""Columns of a step: arrays of numbers as little-endian bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_i32(values: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Encode integers as little-endian int32 bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_i32(data: bytes) -> NDArray[np.int32]:
    """Decode :func:`pack_i32`; a read-only int32 array that borrows ``data``."""
    return np.frombuffer(data, dtype="<i4")


def pack_ints(values: Sequence[int]) -> bytes:
    """As :func:`pack_i32`, of a list: for a few numbers it takes less than the way through an array."""
    return struct.pack(f"<{len(values)}i", *values) if values else b""


def unpack_ints(data: bytes) -> tuple[int, ...]:
    """Decode :func:`pack_i32` to Python's integers."""
    return struct.unpack(f"<{len(data) // 4}i", data)


def pack_f32(values: Sequence[float] | NDArray[np.floating[Any]]) -> bytes:
    """Encode floats as little-endian float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_f32(data: bytes) -> NDArray[np.float32]:
    """Decode :func:`pack_f32`; a read-only float32 array that borrows ``data``."""
    return np.frombuffer(data, dtype="<f4")

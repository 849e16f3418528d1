"""The kernels' powers and sigmoids, in every dialect this machine runs."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
from llvmlite import binding
from numba import njit, types
from numba.extending import intrinsic

from worker_proc.kernels.cpu import epilogue
from worker_proc.kernels.cpu.isa import ALL, Isa, candidates
from worker_proc.kernels.cpu.vector_ir import V16F, VectorEmitter


def runs_here(isa: Isa) -> bool:
    """A CPU that has the instructions, as for these functions tiles need no permission."""
    found = candidates(binding.get_host_cpu_features(), platform.machine(), binding.get_host_cpu_name())
    return isa in found


HERE = [isa for isa in ALL if runs_here(isa)]


def elementwise(isa: Isa, method: str) -> Any:
    """``fn(x)`` applies a method of VectorEmitter to a float32 array of a multiple of 16."""

    @intrinsic
    def one(tc: Any, source: Any, target: Any) -> Any:
        def emit(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            e = VectorEmitter(b, isa)
            e.store(getattr(e, method)(e.load(args[0], V16F)), args[1])
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    @njit
    def loop(source: int, target: int, n: int) -> None:
        for i in range(0, n * 4, 64):
            one(source + i, target + i)

    def fn(x: Any) -> Any:
        out = np.zeros_like(x)
        loop(x.ctypes.data, out.ctypes.data, x.size)
        return out

    return fn


@pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)
def test_powers_are_close_and_that_of_zero_is_one(isa: Isa) -> None:
    exp2 = elementwise(isa, "exp2")
    x = np.linspace(-125, 125, 1 << 16, dtype=np.float32)
    assert np.abs(exp2(x) / np.exp2(x.astype(np.float64)) - 1).max() < 3e-7
    whole = np.arange(-16, 16, dtype=np.float32)
    assert np.array_equal(exp2(whole), np.exp2(whole))
    assert exp2(np.full(16, -1e30, np.float32)).max() <= 2.0**-126


@pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)
def test_sigmoids_are_close_and_stay_finite_at_both_ends(isa: Isa) -> None:
    sigmoid = elementwise(isa, "sigmoid")
    x = np.linspace(-10, 10, 1 << 14, dtype=np.float32)
    assert np.abs(sigmoid(x) * (1 + np.exp(-x.astype(np.float64))) - 1).max() < 2e-6
    ends = sigmoid(np.array([-1e30, -1000, 1000, 1e30] * 4, np.float32))
    assert np.array_equal(ends[2:4], [1, 1]) and 0 <= ends[:2].max() < 1e-35


@pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)
def test_a_row_that_sees_nothing_has_powers_of_zero(isa: Isa) -> None:
    powers = epilogue.make_score_powers(isa)

    @njit
    def run(scores: int, p: int, state: int) -> None:
        powers(scores, 2, np.float32(0.18), p, state)

    scores = np.full(32, epilogue.MASKED, np.float32)
    one = 0x3F80 if isa.activation_bytes == 2 else 1.0  # bf16 bits, or float32
    p = np.ones(32, np.uint16 if isa.activation_bytes == 2 else np.float32)
    state = np.array([epilogue.MASKED, 5], np.float32)
    run(scores.ctypes.data, p.ctypes.data, state.ctypes.data)
    assert not p.any() and state[1] == 0
    scores[3], state[0] = 0.5, 0.5
    run(scores.ctypes.data, p.ctypes.data, state.ctypes.data)
    assert p[3] == one and not np.delete(p, 3).any() and state[1] == 1

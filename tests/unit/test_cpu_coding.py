"""Weights in 12 bits: what is decoded is what was coded, bit by bit, and what cannot be coded is used as it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from tests.unit.cpu_fast_support import VOCAB, make_runner, tiny_model, whole
from worker_proc.kernels.cpu import coding, isa, kernels, packing

CODING = [one for one in isa.ALL if one.codes_weights and not isinstance(isa.detect((one.name,)), str)]
needs_coding = pytest.mark.skipif(not CODING, reason="no instruction set of this machine codes weights")

ENCODE = coding.make_encoder()


def random_panel(rng: np.random.Generator, steps: int, num_uppers: int) -> np.ndarray[Any, Any]:
    """uint16 [1024 steps], with so many different upper bytes in each block."""
    out = np.empty((2 * steps, 512), np.uint16)
    for block in out:
        uppers = rng.choice(256, num_uppers, replace=False)
        block[:] = rng.choice(uppers, 512).astype(np.uint16) << 8
        block[:num_uppers] = uppers.astype(np.uint16) << 8
        block |= rng.integers(0, 256, 512).astype(np.uint16)
    return out.reshape(-1)


@needs_coding
@pytest.mark.parametrize("chosen", CODING, ids=lambda one: str(one.name))
def test_a_coded_panel_gives_the_bits_and_the_sums_of_the_plain_one(chosen: isa.Isa) -> None:
    built = kernels.build(chosen)
    dot, dot_coded = built.dot_rows, built.dot_rows_coded

    @njit
    def run(n: int, x: int, ldx: int, w: int, steps: int, out: int) -> int:
        return dot(n, x, ldx, w, w + 1024, steps, 2048, out, 128, w, 0)

    @njit
    def run_coded(n: int, x: int, ldx: int, w: int, room: int, turns: int, steps: int, out: int) -> int:
        return dot_coded(n, x, ldx, w, room, steps, turns, out, 128, 4096, 0)

    rng = np.random.default_rng(0)
    for steps in (1, 2, 5):
        # Of any bytes, NaN and infinities too; then of numbers, whose sums are compared.
        for plain in (random_panel(rng, steps, 16), _normal(rng, steps)):
            space = packing.huge_buffer(1 << 20, "test")
            coded = space[: coding.panel_bytes(steps)]
            assert ENCODE(plain, coded, steps)
            room = space[1 << 19 : (1 << 19) + 2048 * (steps + 1)]
            x = torch.from_numpy(rng.normal(size=(32, 32 * steps)).astype(np.float32)).to(torch.bfloat16)
            for rows in range(1, 14):
                sums = [np.zeros((16, 32), np.float32) for _ in range(3)]
                run(rows, x.data_ptr(), 64 * steps, plain.ctypes.data, steps, sums[0].ctypes.data)
                for turns, out in ((1, sums[1]), (-1, sums[2])):
                    done = run_coded(
                        rows, x.data_ptr(), 64 * steps, coded.ctypes.data, room.ctypes.data, turns, steps,
                        out.ctypes.data,
                    )  # fmt: skip
                    assert np.array_equal(out[:done].view(np.int32), sums[0][:done].view(np.int32))
            assert np.array_equal(room[: 2048 * steps].view(np.uint16), plain)


def _normal(rng: np.random.Generator, steps: int) -> np.ndarray[Any, Any]:
    weights = torch.from_numpy(rng.normal(0, 0.02, 1024 * steps).astype(np.float32)).to(torch.bfloat16)
    return weights.view(torch.int16).numpy().view(np.uint16).copy()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 40))
def test_seventeen_upper_bytes_are_too_many(seed: int, num_uppers: int) -> None:
    plain = random_panel(np.random.default_rng(seed), 3, num_uppers)
    assert ENCODE(plain, np.zeros(coding.panel_bytes(3), np.uint8), 3) == (num_uppers <= 16)


def test_a_panel_that_cannot_be_coded_stays_plain_between_the_others() -> None:
    rng = np.random.default_rng(0)
    weight = np.stack([_normal(rng, 2).reshape(16, 128)[:, :64] for _ in range(10)]).reshape(160, 64)
    weight[70, :20] = np.arange(20, dtype=np.uint16) << 8
    arena = packing.Arena(1 << 20, "test")
    with ThreadPoolExecutor(2) as pool:
        addresses = packing.pack_coded(pool, 2, weight, arena, ENCODE)
    kinds = (addresses & coding.CODED).tolist()
    assert kinds == [1, 1, 0, 1, 1]
    places = (addresses - kinds - addresses[0] + 1).tolist()
    size = coding.panel_bytes(2)
    assert places == [0, size, 2 * size, 2 * size + 4096, 3 * size + 4096]
    assert arena.used == 4 * size + 4096
    start = places[2]
    assert np.array_equal(arena._buffer[start : start + 4096].view(np.uint16), packing.pack_panels(weight[64:96]))


@needs_coding
@pytest.mark.parametrize("name", ["llama", "llama-tied-llama3-rope"])
def test_a_model_whose_panels_are_of_both_kinds_gives_the_logits_of_transformers(name: str) -> None:
    model = tiny_model(name)
    wide = torch.tensor(0.5) ** torch.arange(2, 42)  # 20 different upper bytes
    with torch.no_grad():
        for weight in (model.lm_head.weight, model.model.layers[1].mlp.down_proj.weight):
            weight[5, :40] = wide
    runner = make_runner(model)
    if runner.isa.codes_weights:
        panels = np.concatenate([each for each in runner._image._keep if each.dtype == np.int64])
        assert set((panels & coding.CODED).tolist()) == {0, 1}
    ids = [5, 7, *range(40), 5, VOCAB - 1]
    got = whole(runner, ids)
    runner.close()
    expected = model.float()(torch.tensor([ids])).logits[0].detach().numpy()
    assert np.sqrt(np.mean((got - expected) ** 2)) < 0.02 * expected.std()  # bf16's rounding

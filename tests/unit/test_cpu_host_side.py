"""What the calling thread does around a step of the CPU fast path: batches are checked, the likeliest ids found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from common.messages import SamplingParams
from tests.unit.cpu_fast_support import MODELS, VOCAB, make_runner, pack, tiny_model
from worker_proc.kernels.cpu import isa, kernels
from worker_proc.kernels.cpu.host_side import HostSide
from worker_proc.runner import PackedBatch
from worker_proc.sampling.cpu import CpuSampler
from worker_proc.sampling.request import SampleRequest

pytestmark = pytest.mark.skipif(isinstance(isa.detect(), str), reason="no instruction set for the fast path")

HOST = HostSide()


def find_largest(logits: np.ndarray[Any, Any], padding: float = 0.0) -> tuple[list[int], list[float]]:
    """Of all rows of float32 [R, V], as the step leaves them: padded, with the largest of each 32 behind."""
    size = logits.shape[1]
    padded = np.full((len(logits), -(-size // 32) * 32), padding, np.float32)
    padded[:, :size] = logits
    space = np.concatenate([padded, padded.reshape(len(logits), -1, 32).max(2)], axis=1)
    tokens, largest = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
    HOST.find_largest(space, np.arange(len(logits), dtype=np.int32), size, padded.shape[1], tokens, largest)
    return tokens.tolist(), largest.tolist()


FEW_VALUES = st.sampled_from([-np.inf, -2.0, -1.0, 0.0, 1.0, np.inf, np.nan])


@given(st.integers(1, 100).flatmap(lambda size: st.lists(FEW_VALUES, min_size=size, max_size=size)))
def test_the_likeliest_id_is_the_one_that_numpy_finds(values: list[float]) -> None:
    row = np.array([values], np.float32)
    (token,), (largest,) = find_largest(row, padding=3.0)
    if np.isnan(row).any():
        assert np.isnan(largest) and np.isnan(values[token])
    else:
        assert token == row[0].argmax()
        assert largest == row[0].max()


def test_of_equal_logits_the_lowest_id_is_taken_and_padding_never() -> None:
    logits = np.full((3, 70), -5.0, np.float32)
    logits[1, [40, 69]] = -1.0
    logits[2, 69] = -1.0
    assert find_largest(logits) == ([0, 40, 69], [-5.0, -1.0, -1.0])


@pytest.mark.parametrize("name", [each.name for each in isa.ALL])
def test_the_peak_of_a_panel_is_nan_where_any_logit_is(name: str) -> None:
    chosen = isa.detect((name,))
    if isinstance(chosen, str):
        pytest.skip(chosen)
    row_peaks = kernels.build(chosen).row_peaks

    @njit
    def run(values: int, rows: int, ldv: int, peaks: int) -> None:
        row_peaks(values, rows, ldv, peaks)

    rng = np.random.default_rng(0)
    space = rng.normal(size=(34, 48)).astype(np.float32)
    for lane in range(32):
        space[lane, lane] = np.nan
    space[32, 7], space[33, :32] = np.inf, -np.inf
    run(space.ctypes.data, 34, 48 * 4, space.ctypes.data + 40 * 4)
    assert np.array_equal(space[:, 40], space[:, :32].max(1), equal_nan=True)


@pytest.mark.parametrize("name", [name for name in MODELS if name in ("llama", "gemma3")])
def test_a_step_notes_what_its_likeliest_ids_are(name: str) -> None:
    assert VOCAB % 32, "or nothing is padded"
    runner = make_runner(tiny_model(name), threads=2)
    rng = np.random.default_rng(0)
    for count in (1, 40, 13):
        logits = runner.forward(pack([(rng.integers(0, VOCAB, count).tolist(), 0, [1, 2, 3])]))
        rows = rng.permutation(count).astype(np.int32)
        tokens, largest = runner.argmax(rows)
        assert np.array_equal(tokens, logits[rows].argmax(1))
        assert np.array_equal(largest, logits[rows].max(1))
    runner.close()


def test_only_rows_that_want_the_likeliest_id_ask_for_it() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    logits[4, 3] = np.nan
    asked = []

    def argmax(rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        asked.append(rows.tolist())
        return logits[rows].argmax(1).astype(np.int32), logits[rows].max(1)

    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=3)
    biased = SamplingParams(temperature=0.0, logit_bias={7: 100.0})
    ids, mask = np.array([1, 2], np.int32), np.array([0b1100, 0], np.int32)
    plain = SampleRequest(0, greedy, 0, ids, 1)
    requests = [
        replace(plain, logit_row=5), replace(plain, logit_row=1, params=drawn), replace(plain, logit_row=4),
        replace(plain, logit_row=0, params=biased), replace(plain, logit_row=2, mask=mask), replace(plain, logit_row=3),
    ]  # fmt: skip
    tokens, bad = CpuSampler(1, argmax).sample(logits, requests)
    assert asked == [[5, 4, 3]]
    expected, also_bad = CpuSampler(1).sample(logits, requests)
    assert np.array_equal(tokens, expected)
    assert bad.tolist() == also_bad.tolist() == [False, False, True, False, False, False]


def good_batch() -> dict[str, np.ndarray[Any, Any]]:
    batch = pack([([5, 6, 7], 2, [0]), (list(range(20)), 0, [3, 1])])
    return {field: getattr(batch, field) for field in batch.__slots__}


def check(batch: PackedBatch) -> int:
    arrays = (batch.ids, batch.positions, batch.query_start, batch.context_lens, batch.page_table, batch.logit_rows)
    return int(HOST.check_batch(*arrays, 50, 40, 4, 16))


def test_a_batch_that_fits_gives_its_highest_page() -> None:
    assert check(PackedBatch(**good_batch())) == 3


@pytest.mark.parametrize(
    ("field", "place", "value"),
    [
        ("ids", 3, -1), ("ids", 3, 50), ("positions", 0, 40), ("positions", 5, -1), ("positions", 20, 7),
        ("query_start", 0, 1), ("query_start", 1, 0), ("query_start", 1, 30), ("query_start", 2, 20),
        ("context_lens", 0, 4), ("context_lens", 1, 33), ("page_table", (0, 1), 4), ("page_table", (1, 0), -1),
        ("logit_rows", 0, 21), ("logit_rows", 0, -1),
    ],
)  # fmt: skip
def test_one_number_that_does_not_fit_is_found(field: str, place: Any, value: int) -> None:
    arrays = {name: values.copy() for name, values in good_batch().items()}
    assert arrays[field][place] != value
    arrays[field][place] = value
    assert check(PackedBatch(**arrays)) == -1


@pytest.mark.parametrize("field", ["positions", "query_start", "context_lens", "page_table"])
def test_an_array_that_is_too_short_is_found(field: str) -> None:
    arrays = good_batch()
    arrays[field] = np.ascontiguousarray(arrays[field][:-1])
    assert check(PackedBatch(**arrays)) == -1

"""A row's logits on the CPU fast path are the same to the last bit however it was computed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.cpu_fast_support import NUM_PAGES, VOCAB, make_runner, pack, tiny_model, whole
from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
from worker_proc.kernels.cpu.isa import detect

pytestmark = pytest.mark.skipif(isinstance(detect(), str), reason="no instruction set for the fast path")

LENGTHS = (1, 2, 15, 16, 17, 31, 40, 128, 129, 200, 270)
Row = tuple[int, int]


@cache
def runner(model: str, threads: int) -> CpuFastRunner:
    """Runners live to the end of the test process; their threads are asleep."""
    return make_runner(tiny_model(model), threads=threads)


def sequence(index: int, length: int) -> list[int]:
    """The ids of sequence ``index``; those above 0 share the first 144 ids of sequence 0."""
    own = np.random.default_rng(index).integers(0, VOCAB, length)
    shared = np.random.default_rng(0).integers(0, VOCAB, length)
    return np.where(np.arange(length) < 144, shared, own).tolist()


@cache
def expected(model: str, index: int, length: int) -> Any:
    """Logits of every position: alone, at once, on one thread, on cold pages in order."""
    return whole(runner(model, 1), sequence(index, length))


def run_schedule(target: CpuFastRunner, rows: list[Row], steps: list[list[int]], seed: int, share: bool) -> Any:
    """Compute the sequences over several steps; step k gives row r up to ``steps[k][r]`` new tokens.

    With ``share`` the pages of the first 128 tokens are those of row 0, once it has computed them.
    """
    free = np.random.default_rng(seed).permutation(NUM_PAGES).tolist()
    ids = [sequence(index, length) for index, length in rows]
    pages = [[free.pop() for _ in range(-(-length // 16))] for _, length in rows]
    done = [0] * len(rows)
    if share and rows[0][1] > 144:
        target.forward(pack([(ids[0][:144], 0, pages[0])], False))
        for r, (_, length) in enumerate(rows):
            if length > 144:
                done[r] = 128 if r else 144
                pages[r][:8] = pages[0][:8]
    out: list[dict[int, Any]] = [{} for _ in rows]
    for step in [*steps, *([[270] * len(rows)])]:
        work = [(r, min(step[r], len(ids[r]) - done[r])) for r in range(len(rows))]
        chosen = [(r, n) for r, n in work if n > 0]
        if not chosen:
            continue
        logits = target.forward(pack([(ids[r][: done[r] + n], done[r], pages[r]) for r, n in chosen]))
        at = 0
        for r, n in chosen:
            for k in range(n):
                out[r][done[r] + k] = logits[at + k].copy()
            at, done[r] = at + n, done[r] + n
    return out


def check(model: str, threads: int, rows: list[Row], steps: list[list[int]], seed: int, share: bool) -> None:
    """Every computed position equals the expected one, bit for bit."""
    found = run_schedule(runner(model, threads), rows, steps, seed, share)
    for (index, length), positions in zip(rows, found, strict=True):
        wanted = expected(model, index, length)
        for position, logits in positions.items():
            assert np.array_equal(logits, wanted[position]), (index, length, position)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Row], list[list[int]]]:
    """Up to four sequences of up to 270 ids, and steps of chunks that start anywhere."""
    count = draw(st.integers(1, 4))
    rows = [(draw(st.integers(0, 2)), draw(st.sampled_from(LENGTHS))) for _ in range(count)]
    chunk = st.sampled_from((0, 1, 1, 2, 5, 16, 33, 100))
    return rows, draw(st.lists(st.lists(chunk, min_size=count, max_size=count), max_size=5))


@pytest.mark.parametrize("model", ["llama", "gemma3", "mistral-window"])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schedules(), st.sampled_from((1, 2, 3)), st.integers(0, 99), st.booleans())
def test_logits_do_not_depend_on_batch_chunks_threads_or_pages(
    model: str, schedule: tuple[list[Row], list[list[int]]], threads: int, seed: int, share: bool
) -> None:
    check(model, threads, *schedule, seed, share)


def test_rows_that_share_a_prefix_decode_as_if_alone() -> None:
    rows = [(i % 3, 200 + 10 * i) for i in range(6)]
    check("llama", 2, rows, [[56 + 10 * i for i in range(6)], *[[1] * 6] * 8], 5, True)


def test_more_rows_than_partial_results_have_room_for() -> None:
    small = runner("llama", 3)
    step = small._workspace.steps[0]
    room = int(step["partial_rows"])
    step["partial_rows"] = 3
    try:
        check("llama", 3, [(0, 270), (1, 200), (2, 129), (0, 40)], [[120, 130, 100, 20], *[[1] * 4] * 5], 7, False)
    finally:
        step["partial_rows"] = room

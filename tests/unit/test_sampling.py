"""Sampling on both samplers: filters, penalties, masks, log-probabilities, draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.messages import SamplingParams
from worker_proc.device_io import make_io
from worker_proc.sampling import kernels
from worker_proc.sampling.cpu import CpuSampler
from worker_proc.sampling.request import LogprobRequest, SampleRequest
from worker_proc.sampling.rng import uniforms
from worker_proc.sampling.torch_sampler import TorchSampler

F32 = NDArray[np.float32]
VOCAB = 700
NO_IDS = np.empty(0, np.int32)


class OnTorch:
    """TorchSampler behind NumPy logits, so that one test runs on both samplers."""

    def __init__(self) -> None:
        self._sampler = TorchSampler()

    def sample(self, logits: F32, requests: list[SampleRequest]) -> Any:
        return self._sampler.sample(torch.from_numpy(logits), requests)

    def logprobs(self, logits: F32, requests: list[LogprobRequest]) -> Any:
        return self._sampler.logprobs(torch.from_numpy(logits), requests)


class OnTriton:
    """GpuSampler behind NumPy logits, under Triton's interpreter or on a GPU. ``block``: less than the vocabulary."""

    def __init__(self) -> None:
        pytest.importorskip("triton")
        from worker_proc.sampling.gpu import GpuSampler

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._sampler = GpuSampler(make_io(self._device), block=256)

    def sample(self, logits: F32, requests: list[SampleRequest]) -> Any:
        return self._sampler.sample(torch.from_numpy(logits).to(self._device), requests)

    def logprobs(self, logits: F32, requests: list[LogprobRequest]) -> Any:
        return self._sampler.logprobs(torch.from_numpy(logits).to(self._device), requests)


@pytest.fixture(
    params=[lambda: CpuSampler(1), lambda: CpuSampler(2), OnTorch, OnTriton],
    ids=["cpu", "cpu-2-threads", "torch", "triton"],
)
def sampler(request: pytest.FixtureRequest) -> Any:
    return request.param()


def random_logits(rows: int, seed: int = 0, scale: float = 3.0, vocab: int = VOCAB) -> F32:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def request_for(row: int, index: int = 0, **params: Any) -> SampleRequest:
    return SampleRequest(row, SamplingParams(**params), index, NO_IDS, 0)


def allowed_ids(row: F32, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters spelled out with sorts, as their papers define them."""
    x = (row.astype(np.float64) - row.max()) / temperature
    order = np.lexsort((np.arange(x.size), -x))
    p = np.exp(x[order])
    if top_k:
        order, p = order[:top_k], p[:top_k]
    before = np.cumsum(p) - p
    kept = before < top_p * p.sum() if top_p < 1 else np.ones(p.size, bool)
    return {int(i) for i, q in zip(order[kept], p[kept], strict=True) if q >= min_p}


# --------------------------------------------------------------------------- draws


def test_uniform_is_a_function_of_seed_and_index_alone() -> None:
    seeds = np.array([0, 1, 1, 2**63 - 1], np.uint64)
    indices = np.array([0, 0, 1, 5], np.uint64)
    together = uniforms(seeds, indices)
    alone = [uniforms(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert all(0.0 < u < 1.0 for u in alone)
    # Pinned: a recorded seed gives the same text in every release.
    assert [round(float(u), 12) for u in together] == [0.652448486374, 0.368189515652, 0.943564230865, 0.585435248914]


def test_uniforms_of_neighbouring_seeds_and_indices_look_independent() -> None:
    grid = uniforms(np.repeat(np.arange(64, dtype=np.uint64), 64), np.tile(np.arange(64, dtype=np.uint64), 64))
    counts = np.histogram(grid, bins=32, range=(0, 1))[0]
    assert ((counts - 128) ** 2 / 128).sum() < 65  # chi-square, 31 degrees of freedom, p = 0.0003
    square = grid.reshape(64, 64) - 0.5
    assert abs((square[1:] * square[:-1]).mean()) < 0.006
    assert abs((square[:, 1:] * square[:, :-1]).mean()) < 0.006


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    """Chi-square over 6,000 draws of one distribution with fixed seeds."""
    row = random_logits(1, seed=3, scale=1.5, vocab=60)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    allowed = sorted(allowed_ids(row[0], full["temperature"], full["top_k"], full["top_p"], full["min_p"]))
    p = np.exp((row[0, allowed].astype(np.float64) - row.max()) / full["temperature"])
    p /= p.sum()
    n = 6000
    for one in (CpuSampler(1), OnTorch()):
        tokens, bad = one.sample(row, [request_for(0, index=i, seed=99, **params) for i in range(n)])
        assert not bad.any()
        counts = np.bincount(tokens, minlength=60)
        assert counts.sum() == counts[allowed].sum(), "only ids that the filters leave"
        expected = p * n
        big = expected >= 5
        chi = ((counts[allowed][big] - expected[big]) ** 2 / expected[big]).sum()
        dof = int(big.sum()) - 1
        assert chi < dof + 4.0 * np.sqrt(2 * dof) + 4


def test_same_draw_on_cpu_and_torch() -> None:
    logits = random_logits(40, seed=5)
    requests = [request_for(r, index=r, seed=r * 7, temperature=0.9, top_p=0.9, top_k=50) for r in range(40)]
    want = CpuSampler(1).sample(logits, requests)[0].tolist()
    assert want == OnTorch().sample(logits, requests)[0].tolist()
    few = slice(0, 6)  # the interpreter is slow
    assert want[few] == OnTriton().sample(logits, requests[few])[0].tolist()


def test_result_does_not_depend_on_the_batch(sampler: Any) -> None:
    logits = random_logits(9, seed=6)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.7}, {"top_k": 5}, {"top_k": 1}, {"min_p": 0.2}]
    requests = [request_for(r, index=r, seed=r, **kinds[r % len(kinds)]) for r in range(9)]
    together = sampler.sample(logits, requests)[0].tolist()
    assert together == [int(sampler.sample(logits, [request])[0][0]) for request in requests]
    assert together[::-1] == sampler.sample(logits, requests[::-1])[0].tolist()


# --------------------------------------------------------------------------- filters


@pytest.mark.parametrize("scale", [0.001, 0.5, 5.0, 100.0])
def test_cut_finds_exactly_the_prefix_that_sorting_finds(scale: float) -> None:
    rng = np.random.default_rng(8)
    members = np.empty(3000, np.int32)
    for ties in (False, True):
        x = rng.standard_normal(3000) * scale
        x = (np.round(x, 1) if ties else x).astype(np.float32)
        x -= x.max()
        w = np.exp(x)
        order = np.lexsort((np.arange(x.size), -x))
        total = float(w.astype(np.float64).sum())
        for k in (1, 2, 50, 700, 2999):
            value, token, mass = kernels.find_cut(x, w, k, np.inf, members)
            assert (token, value) == (order[k - 1], x[order[k - 1]])
            assert mass == pytest.approx(w[order[:k]].astype(np.float64).sum())
        for p in (0.01, 0.5, 0.9, 0.999):
            _, token, mass = kernels.find_cut(x, w, 1 << 62, p * total, members)
            rank = int(np.flatnonzero(order == token)[0])
            before = float(w[order[:rank]].astype(np.float64).sum())
            assert before < p * total * (1 + 1e-9) and mass >= p * total * (1 - 1e-9)


def test_greedy_takes_the_first_maximum(sampler: Any) -> None:
    logits = random_logits(3)
    logits[1, [5, 9]] = 50.0
    tokens, bad = sampler.sample(logits, [request_for(r, temperature=0.0) for r in range(3)])
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert tokens[1] == 5
    assert not bad.any()


def test_tiny_temperature_is_greedy_and_finite(sampler: Any) -> None:
    logits = random_logits(4)
    requests = [request_for(r, temperature=1e-6, seed=r, top_p=0.9) for r in range(4)]
    assert sampler.sample(logits, requests)[0].tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "params", [{"temperature": 5e-324}, {"temperature": 1e-300, "top_k": 3, "top_p": 5e-324, "min_p": 1.0}]
)
def test_the_least_floats_are_greedy(sampler: Any, params: dict[str, Any]) -> None:
    logits = random_logits(1)
    tokens, bad = sampler.sample(logits, [request_for(0, **params)])
    assert tokens[0] == np.asarray(logits)[0].argmax() and not bad[0]


@pytest.mark.parametrize("penalty", [1e-300, 0.0])
def test_a_penalty_that_divides_by_zero_fails_its_row_alone(sampler: Any, penalty: float) -> None:
    logits = random_logits(2)
    broken = request_for(0, repetition_penalty=penalty)
    broken.ids = np.arange(VOCAB, dtype=np.int32)
    tokens, bad = sampler.sample(logits, [broken, request_for(1, temperature=0.0)])
    assert bad.tolist() == [True, False]
    assert tokens[1] == np.asarray(logits)[1].argmax()


def test_top_p_keeps_at_least_the_likeliest(sampler: Any) -> None:
    logits = random_logits(4)
    requests = [request_for(r, top_p=1e-9, seed=r) for r in range(4)]
    assert sampler.sample(logits, requests)[0].tolist() == logits.argmax(axis=1).tolist()


# --------------------------------------------------------------------------- adjustments


def test_penalties_bias_and_banned_ends_change_the_choice(sampler: Any) -> None:
    base = np.zeros((1, VOCAB), np.float32)
    base[0, [10, 20, 30]] = [5.0, 4.5, 4.0]
    ids = np.array([10, 20, 10, 10], np.int32)  # prompt: 10 20; output: 10 10

    def pick(**params: Any) -> int:
        ends = frozenset(params.pop("ends", ()))
        request = SampleRequest(0, SamplingParams(temperature=0.0, **params), 2, ids, 2, ends)
        return int(sampler.sample(base, [request])[0][0])

    assert pick() == 10
    assert pick(presence_penalty=0.4) == 10
    assert pick(presence_penalty=0.6) == 20, "20 is in the prompt only: no presence penalty"
    assert pick(frequency_penalty=0.3) == 20, "0.3 for each of two occurrences"
    assert pick(repetition_penalty=1.5) == 30, "prompt ids count too"
    assert pick(logit_bias={30: 2.0}) == 30
    assert pick(logit_bias={10: -100.0}) == 20
    assert pick(min_tokens=3, ends=[10]) == 20
    assert pick(min_tokens=2, ends=[10]) == 10


def test_repetition_penalty_pushes_negative_logits_down(sampler: Any) -> None:
    base = np.full((1, VOCAB), -9.0, np.float32)
    base[0, [3, 4]] = [-1.0, -1.5]
    request = SampleRequest(0, SamplingParams(temperature=0.0, repetition_penalty=2.0), 0, np.array([3], np.int32), 1)
    assert sampler.sample(base, [request])[0].tolist() == [4]


def test_mask_is_obeyed_and_an_empty_one_fails_the_row_alone(sampler: Any) -> None:
    logits = random_logits(3, seed=2)
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    for token in (7, 31, 63, 698):
        mask[token // 32] |= np.array(1 << (token % 32), np.uint32).view(np.int32)
    draws = set()
    for index in range(40):
        requests = [request_for(r, index=index, temperature=4.0) for r in range(3)]
        requests[0].mask, requests[1].mask = mask, np.zeros_like(mask)
        tokens, bad = sampler.sample(logits, requests)
        draws.add(int(tokens[0]))
        assert bad.tolist() == [False, True, False]
    assert draws == {7, 31, 63, 698}


@pytest.mark.parametrize("size", [31, 700, 4096, 5000])
def test_the_greedy_choice_under_a_mask_is_the_plain_one(size: int) -> None:
    rng = np.random.default_rng(size)
    words = -(-size // 32)
    for trial in range(200):
        row = np.round(rng.standard_normal(size) * rng.choice([0.5, 4.0])).astype(np.float32)  # many ties
        for value in (np.nan, np.inf, -np.inf) if trial % 4 == 0 else ():
            row[rng.integers(size, size=2)] = value
        bits = rng.random(words * 32) < rng.choice([0.002, 0.3, 0.999])
        bits[: 32 * rng.integers(words)] |= trial % 3 == 0
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        mask = mask[: rng.integers(1, words + 1)] if trial % 5 == 0 else mask
        token, peak = kernels.argmax_allowed(row, mask)
        plain = row.copy()
        kernels.apply_mask(plain, mask)
        assert peak == plain.max() or (np.isnan(peak) and np.isnan(plain.max()))
        if np.isfinite(peak):
            assert token == plain.argmax()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}])
def test_bad_logits_are_reported_for_their_row_alone(sampler: Any, value: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    clean, _ = sampler.sample(logits, [request_for(r, seed=r, **params) for r in range(3)])
    logits[1, 300] = value
    tokens, bad = sampler.sample(logits, [request_for(r, seed=r, **params) for r in range(3)])
    assert bad.tolist() == [False, True, False]
    assert tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()


# --------------------------------------------------------------------------- log-probabilities


def test_logprobs_are_of_the_raw_distribution_with_ties_by_id(sampler: Any) -> None:
    logits = random_logits(3, seed=4)
    logits[2, [8, 3, 5]] = 20.0
    values, tops = sampler.logprobs(
        logits, [LogprobRequest(0, 11, 0), LogprobRequest(1, 12, 4), LogprobRequest(2, 3, 3)]
    )
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(values, exact[[0, 1, 2], [11, 12, 3]], atol=2e-5)
    assert [top.ids.size for top in tops] == [0, 4, 3]
    assert tops[1].ids.tolist() == np.argsort(-exact[1])[:4].tolist()
    np.testing.assert_allclose(tops[1].logprobs, exact[1, tops[1].ids], atol=2e-5)
    assert tops[2].ids.tolist() == [3, 5, 8]

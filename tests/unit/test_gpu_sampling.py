"""The Triton sampler beside torch's: every combination of filters, ties at the cut, one copy to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.messages import SamplingParams
from tests.unit.gpu_support import DEVICE
from worker_proc.device_io import Download, make_io
from worker_proc.sampling.request import LogprobRequest, SampleRequest
from worker_proc.sampling.torch_sampler import TorchSampler

VOCAB = 333


def sampler(block: int = 128) -> Any:
    from worker_proc.sampling.gpu import GpuSampler

    return GpuSampler(make_io(DEVICE), block)


def request(row: int, index: int = 0, **params: Any) -> SampleRequest:
    mask, ids = params.pop("mask", None), params.pop("ids", np.empty(0, np.int32))
    ends = frozenset(params.pop("ends", ()))
    return SampleRequest(row, SamplingParams(**params), index, ids, ids.size // 2, ends, mask)


def logits_of(rows: int, seed: int, decimals: int | None = None) -> Tensor:
    x = np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 2
    return torch.from_numpy((x if decimals is None else np.round(x, decimals)).astype(np.float32)).to(DEVICE)


@pytest.mark.parametrize("decimals", [None, 0], ids=["distinct", "many equal"])
def test_every_filter_draws_what_torch_draws(decimals: int | None) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.3}, {"top_k": 7}, {"top_k": VOCAB - 1}, {"top_p": 0.6}, {"top_p": 0.9999},
        {"min_p": 0.05}, {"top_k": 40, "top_p": 0.7}, {"top_k": 3, "top_p": 0.99, "min_p": 0.2, "temperature": 2.0},
    ]  # fmt: skip
    logits = logits_of(len(kinds), 1, decimals)
    for index in range(2):
        requests = [request(r, index, seed=r, **kind) for r, kind in enumerate(kinds)]
        got, bad = sampler(block=256).sample(logits, requests)
        assert got.tolist() == TorchSampler().sample(logits, requests)[0].tolist()
        assert not bad.any()


def test_equal_entries_at_a_cut_stay_by_id() -> None:
    logits = torch.full((2, VOCAB), -3.0, device=DEVICE)
    logits[:, [300, 5, 200, 130]] = 1.0
    whole = sampler(block=512)
    by_count = set(whole.sample(logits, [request(0, i, top_k=2) for i in range(8)])[0].tolist())
    assert by_count == {5, 130}
    # Four of weight 1 and 329 of weight e**-4: 0.29 of all are 0.29 * (4 + 6.03) = 2.91 of the four.
    by_mass = set(whole.sample(logits, [request(0, i, top_p=0.29) for i in range(14)])[0].tolist())
    assert by_mass == {5, 130, 200}


def test_adjustments_together_equal_torchs() -> None:
    rng = np.random.default_rng(4)
    logits = logits_of(5, 2)
    mask = rng.integers(-(2**31), 2**31, size=-(-VOCAB // 32), dtype=np.int64).astype(np.int32)
    ids = rng.integers(0, VOCAB, 60).astype(np.int32)
    requests = [
        request(4, 3, seed=1, mask=mask, ids=ids, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.4),
        request(0, 0, seed=2, logit_bias={3: 4.0, 77: -2.0}, min_tokens=2, ends=[3, 9, VOCAB + 5]),
        request(1, 0, seed=3, mask=mask),
        request(2, 9, seed=4, temperature=0.0, ids=ids[:10], repetition_penalty=0.5, logit_bias={8: 50.0}),
        request(3, 2, seed=5, top_p=0.5, ids=ids[:3], frequency_penalty=-1.0),
    ]
    got, bad = sampler().sample(logits, requests)
    want, _ = TorchSampler().sample(logits, requests)
    assert got.tolist() == want.tolist() and not bad.any()


class CountingIo:
    """A ``DeviceIo`` that counts copies to the host."""

    def __init__(self) -> None:
        self.device, self.downloads = DEVICE, 0
        self._io = make_io(DEVICE)

    def upload(self, array: Any) -> Tensor:
        return self._io.upload(array)

    def download(self, tensor: Tensor) -> Download:
        self.downloads += 1
        return self._io.download(tensor)


def test_ids_and_their_logprobs_come_back_in_one_copy() -> None:
    from worker_proc.sampling.gpu import GpuSampler

    io = CountingIo()
    gpu, logits = GpuSampler(io, 128), logits_of(4, 6)
    requests = [
        request(3, 0, temperature=0.0, logprobs=2), request(1, 0, seed=9), request(0, 0, seed=3, logprobs=0),
        request(2, 1, seed=4, logprobs=5),
    ]  # fmt: skip
    drawn = gpu.begin(logits, requests)
    tokens, _ = drawn.wait()
    places = [place for place, request in enumerate(requests) if request.params.logprobs is not None]
    wanted = [
        LogprobRequest(requests[place].logit_row, int(tokens[place]), requests[place].params.logprobs or 0)
        for place in places
    ]
    assert io.downloads == 1
    want_values, want_tops = TorchSampler().logprobs(logits, wanted)
    for place, value, top in zip(places, want_values, want_tops, strict=True):
        got_value, got = drawn.report(place)
        np.testing.assert_allclose(got_value, value, atol=2e-5)
        assert got.ids.tolist() == top.ids.tolist()
        np.testing.assert_allclose(got.logprobs, top.logprobs, atol=2e-5)
    # Others (a prompt's) have a copy of their own.
    values, tops = gpu.begin_logprobs(logits, wanted).wait()
    np.testing.assert_allclose(values, want_values, atol=2e-5)
    assert [top.ids.tolist() for top in tops] == [top.ids.tolist() for top in want_tops]
    assert io.downloads == 2
    assert gpu.begin_logprobs(logits[:0], []).wait()[1] == [], "who waits for it waits for what came before"
    assert io.downloads == 3

"""Sampling on CPU: NumPy and Numba, never torch.

A torch operation here would wake torch's OpenMP threads, which then spin on the cores that the
next forward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_proc.sampling import kernels
from worker_proc.sampling.request import F32, I32, LogprobRequest, SampleRequest, TopTokens
from worker_proc.sampling.rng import draws_of

Argmax = Callable[[I32], tuple[I32, F32]]
"""See ``ArgmaxRunner.argmax``."""


class _Scratch:
    """One thread's work arrays for a vocabulary of ``size``."""

    def __init__(self, size: int) -> None:
        self.work = np.empty(size, np.float32)
        self.weights = np.empty(size, np.float32)
        self.bits = np.empty(size, np.int32)
        self.members = np.empty(size, np.int32)
        self.counts = np.zeros(size, np.int32)
        self.sums = np.empty(-(-size // kernels.BLOCK), np.float64)


class CpuSampler:
    """The ``Sampler`` for logits in NumPy arrays.

    ``threads``: how many rows are worked on at once. ``argmax``: of rows of the logits that ``sample`` is given, where
    who computed them knows it (``ArgmaxRunner``).
    """

    def __init__(self, threads: int = 1, argmax: Argmax | None = None) -> None:
        self._threads = max(1, threads)
        self._argmax = argmax
        self._scratch: list[_Scratch] = []
        self._pool = ThreadPoolExecutor(self._threads - 1, "sample") if self._threads > 1 else None

    def warm_up(self, vocab_size: int) -> None:
        """Compile (or load from Numba's cache) every kernel, so that no request waits for it."""
        from common.messages import SamplingParams

        params = SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.01, repetition_penalty=1.1)
        ids, mask = np.array([1, 0], np.int32), np.full(-(-vocab_size // 32), -1, np.int32)
        logits = np.linspace(0, 1, vocab_size, dtype=np.float32)[None]
        for each in (params, SamplingParams(temperature=0.0)):
            self.sample(logits, [SampleRequest(0, each, 0, ids, 1, mask=mask)])
        self.logprobs(logits, [LogprobRequest(0, 0, 1)])

    def sample(self, logits: Any, requests: Sequence[SampleRequest]) -> tuple[I32, NDArray[np.bool_]]:
        """See ``Sampler``. A row's id depends on its own logits and request alone."""
        tokens = np.zeros(len(requests), np.int32)
        peaks = np.zeros(len(requests), np.float32)
        rows = [request.logit_row for request in requests]
        plain, others = [], []
        for r, request in enumerate(requests):
            if not request.is_argmax:
                others.append(r)
            elif request.mask is not None:
                tokens[r], peaks[r] = kernels.argmax_allowed(logits[rows[r]], request.mask)
            elif self._argmax is not None:
                plain.append(r)
            else:
                row = logits[rows[r]]
                tokens[r] = row.argmax()  # NumPy's argmax stops at the first NaN, so the peak shows it
                peaks[r] = row[tokens[r]]
        if plain and self._argmax is not None:
            tokens[plain], peaks[plain] = self._argmax(np.array([rows[r] for r in plain], np.int32))
        if others:
            draws = draws_of([requests[r] for r in others])

            def work(j: int, scratch: _Scratch) -> None:
                r = others[j]
                tokens[r], peaks[r] = _sample_row(logits[rows[r]], requests[r], float(draws[j]), scratch)

            self._spread(len(others), work, logits.shape[1])
        return tokens, ~np.isfinite(peaks)

    def logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> tuple[F32, list[TopTokens]]:
        """See ``Sampler``."""
        values = np.zeros(len(requests), np.float32)
        tops: list[TopTokens] = [TopTokens(np.empty(0, np.int32), np.empty(0, np.float32))] * len(requests)

        def work(r: int, scratch: _Scratch) -> None:
            request = requests[r]
            row = logits[request.logit_row]
            normaliser = kernels.log_normaliser(row, row.max(), scratch.weights, scratch.bits)
            values[r] = row[request.token] - normaliser
            ids = np.empty(min(request.k, row.size), np.int32)
            if ids.size:
                kernels.find_top(row, ids)
            tops[r] = TopTokens(ids, (row[ids] - normaliser).astype(np.float32))

        self._spread(len(requests), work, logits.shape[1] if requests else 0)
        return values, tops

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _spread(self, count: int, work: Callable[[int, _Scratch], None], size: int) -> None:
        """Run ``work(j, scratch)`` for j in range(count), a stride of rows per thread."""
        if self._scratch and self._scratch[0].work.size != size:
            self._scratch.clear()
        shares = min(self._threads, count)
        while len(self._scratch) < shares:
            self._scratch.append(_Scratch(size))

        def share(t: int) -> None:
            for j in range(t, count, shares):
                work(j, self._scratch[t])

        futures = [self._pool.submit(share, t) for t in range(1, shares)] if self._pool is not None else []
        if count:
            share(0)
        for future in futures:
            future.result()


def _sample_row(row: F32, request: SampleRequest, u: float, scratch: _Scratch) -> tuple[int, float]:
    """(id, peak logit after all adjustments) of one row; the peak is not finite if no id can be drawn."""
    params, work = request.params, scratch.work
    np.copyto(work, row)
    if request.has_penalties:
        kernels.penalise(
            work, request.ids, request.prompt_len, np.float32(params.presence_penalty),
            np.float32(params.frequency_penalty), np.float32(params.repetition_penalty), scratch.counts,
        )  # fmt: skip
    for token, bias in params.logit_bias.items():
        work[token] += np.float32(bias)
    if request.bans_ends:
        work[[token for token in request.end_ids if token < work.size]] = -np.inf
    if request.mask is not None:
        kernels.apply_mask(work, request.mask)
    peak = float(work.max())  # NaN if any logit is
    if request.is_greedy or not np.isfinite(peak):
        return int(work.argmax()), peak
    token = kernels.draw(
        work, np.float32(peak), params.temperature, params.top_k, params.top_p, params.min_p, u,
        scratch.weights, scratch.bits, scratch.members, scratch.sums,
    )  # fmt: skip
    return int(token), peak

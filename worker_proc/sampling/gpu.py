"""Sampling in our Triton kernels: the same rules and draws as on CPU, and one copy to the host per step.

The ids, their log-probabilities and the likeliest ids come back in one buffer. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_proc.device_io import DeviceIo, Download
from worker_proc.kernels.cuda import sample_adjust as adjusting
from worker_proc.kernels.cuda.logprobs import logprobs
from worker_proc.kernels.cuda.sample_draw import draw
from worker_proc.sampling.request import F32, I32, LogprobRequest, SampleRequest, TopTokens
from worker_proc.sampling.rng import draws_of

BLOCK = 4096


class GpuSampler:
    """The ``Sampler`` and ``AheadSampler`` for logits in tensors [N, vocab] on a GPU (or a CPU, under Triton's
    interpreter).

    ``block``: ids that a program looks at at once.
    """

    def __init__(self, io: DeviceIo, block: int = BLOCK) -> None:
        self._io = io
        self._block = block

    def sample(self, logits: Any, requests: Sequence[SampleRequest]) -> tuple[I32, NDArray[np.bool_]]:
        """See ``Sampler``."""
        return self.begin(logits, requests).wait()

    def begin(self, logits: Any, requests: Sequence[SampleRequest]) -> _Drawn:
        """See ``AheadSampler``: ids and log-probabilities come back in one copy."""
        with torch.inference_mode():
            parameters = self._io.upload(_parameters(requests))
            counts, masks = self._counts(requests, logits.shape[1]), self._masks(requests)
            work, has_nan = adjusting.adjust(logits, parameters, counts, masks, self._block)
            entries = _entries(requests, logits.shape[1])
            if entries.size:
                rows, tokens, values = self._io.upload(entries)
                adjusting.change_entries(work, rows, tokens, values.view(torch.float32))
            wanting = {r: k for r, request in enumerate(requests) if (k := request.params.logprobs) is not None}
            most = min(max(wanting.values(), default=0), logits.shape[1])
            out = torch.zeros((len(requests), 3 + 2 * most if wanting else 2), dtype=torch.int32, device=logits.device)
            draw(work, parameters, has_nan, out, self._block)
            if wanting:
                asked = [(requests[r].logit_row, r, min(k, most)) for r, k in wanting.items()]
                reports = torch.empty((len(wanting), 1 + 2 * most), dtype=torch.int32, device=logits.device)
                logprobs(logits, self._io.upload(np.array(asked, np.int32)), out, reports, most, self._block)
                out[: len(wanting), 2:] = reports
            return _Drawn(out, self._io.download(out), wanting, most)

    def logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> tuple[F32, list[TopTokens]]:
        """See ``Sampler``."""
        return self.begin_logprobs(logits, requests).wait()

    def begin_logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> _Reports:
        """See ``AheadSampler``."""
        size = logits.shape[1]
        most = min(max((request.k for request in requests), default=0), size)
        asked = [(request.logit_row, r, min(request.k, most)) for r, request in enumerate(requests)]
        with torch.inference_mode():
            out = torch.zeros((len(requests), 1 + 2 * most), dtype=torch.int32, device=logits.device)
            if requests:
                tokens = self._io.upload(np.array([request.token for request in requests], np.int32))
                logprobs(logits, self._io.upload(np.array(asked, np.int32)), tokens, out, most, self._block)
            return _Reports(self._io.download(out), [request.k for request in requests], most)

    def _counts(self, requests: Sequence[SampleRequest], vocab_size: int) -> Tensor | None:
        penalised = [request for request in requests if request.has_penalties]
        if not penalised:
            return None
        tokens = np.concatenate([request.ids for request in penalised])
        places = [2 * r + (np.arange(q.ids.size) >= q.prompt_len) for r, q in enumerate(penalised)]
        both = self._io.upload(np.stack([tokens, np.concatenate(places)]).astype(np.int32))
        return adjusting.count_ids(both[0], both[1], len(penalised), vocab_size)

    def _masks(self, requests: Sequence[SampleRequest]) -> Tensor | None:
        masks = [request.mask for request in requests if request.mask is not None]
        return self._io.upload(np.stack(masks)) if masks else None


class _Drawn:
    """See ``Drawn``. ``out`` [R, ...]: id, row is unusable, and the reports of those in ``wanting`` (request -> k) in
    its first rows."""

    def __init__(self, out: Tensor, download: Download, wanting: dict[int, int], most: int) -> None:
        self._out, self._download, self._wanting, self._most = out, download, wanting, most
        self._rows = {r: row for row, r in enumerate(wanting)}
        self._host: I32 = np.empty((0, 2), np.int32)

    @property
    def ids(self) -> Tensor:
        """See ``Drawn``."""
        return self._out[:, 0]

    def ready(self) -> bool:
        """See ``Drawn``."""
        return self._download.ready()

    def wait(self) -> tuple[I32, NDArray[np.bool_]]:
        """See ``Drawn``."""
        self._host = self._download.wait()
        return np.ascontiguousarray(self._host[:, 0]), self._host[:, 1].astype(bool)

    def report(self, place: int) -> tuple[np.float32, TopTokens]:
        """See ``Drawn``."""
        return _report(self._host[self._rows[place], 2:], self._wanting[place], self._most)


class _Reports:
    """See ``Reports``."""

    def __init__(self, download: Download, ks: list[int], most: int) -> None:
        self._download, self._ks, self._most = download, ks, most

    def ready(self) -> bool:
        """See ``Reports``."""
        return self._download.ready()

    def wait(self) -> tuple[F32, list[TopTokens]]:
        """See ``Reports``."""
        host = self._download.wait()
        found = [_report(row, k, self._most) for row, k in zip(host, self._ks, strict=True)]
        return np.array([value for value, _ in found], np.float32), [top for _, top in found]


def _parameters(requests: Sequence[SampleRequest]) -> NDArray[np.float64]:
    """float64 [R, NUM_PARAMETERS], the columns of ``sample_adjust``."""
    columns = np.zeros((len(requests), int(adjusting.NUM_PARAMETERS)), np.float64)
    draws = draws_of(requests)
    num_counts = num_masks = 0
    for r, request in enumerate(requests):
        params = request.params
        random = not request.is_greedy
        columns[r] = (
            request.logit_row, 1.0 / params.temperature if random else 1.0, params.top_k, params.top_p,
            np.log(params.min_p) if params.min_p > 0.0 else -np.inf, draws[r], not random,
            num_counts if request.has_penalties else -1, num_masks if request.mask is not None else -1,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        num_counts += request.has_penalties
        num_masks += request.mask is not None
    return columns


def _entries(requests: Sequence[SampleRequest], size: int) -> I32:
    """int32 [3, E]: row, id, and what is added to its logit as float32 bits; -inf for banned ids."""
    found: dict[tuple[int, int], float] = {}
    for r, request in enumerate(requests):
        found.update({(r, token): bias for token, bias in request.params.logit_bias.items()})
        if request.bans_ends:
            found.update({(r, token): -np.inf for token in request.end_ids if token < size})
    places = np.array(list(found), np.int32).reshape(-1, 2).T
    return np.concatenate([places, np.array(list(found.values()), np.float32).view(np.int32)[None]])


def _report(row: I32, k: int, most: int) -> tuple[np.float32, TopTokens]:
    """One request's row of ``kernels.cuda.logprobs``."""
    k = min(k, most)
    values = row.view(np.float32)
    return values[0], TopTokens(row[1 : 1 + k].copy(), values[1 + most : 1 + most + k].copy())

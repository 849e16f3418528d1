"""Sampling where the logits are torch tensors (CUDA): the same rules and the same draws as on CPU.

Everything is vectorised over the rows. One copy to the device carries the parameters, one back the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_proc.sampling.request import F32, I32, LogprobRequest, SampleRequest, TopTokens
from worker_proc.sampling.rng import draws_of


class TorchSampler:
    """The ``Sampler`` for logits in tensors [N, vocab], any device."""

    def sample(self, logits: Any, requests: Sequence[SampleRequest]) -> tuple[I32, NDArray[np.bool_]]:
        """See ``Sampler``."""
        with torch.inference_mode():
            rows = _index([request.logit_row for request in requests], logits.device)
            work = logits[rows].float()
            has_nan = torch.isnan(work).any(dim=1)
            if any(not request.is_plain for request in requests):
                _adjust(work, requests)
            peaks, tokens = work.max(dim=1)
            random = [r for r, request in enumerate(requests) if not request.is_greedy]
            if random:
                chosen = _index(random, logits.device)
                subset = [requests[r] for r in random]
                tokens[chosen] = _draw(work[chosen], peaks[chosen], subset)
            bad = has_nan | ~torch.isfinite(peaks)
            both = torch.stack([tokens, bad.long()]).cpu().numpy()
        return both[0].astype(np.int32), both[1].astype(bool)

    def logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> tuple[F32, list[TopTokens]]:
        """See ``Sampler``."""
        with torch.inference_mode():
            work = logits[_index([request.logit_row for request in requests], logits.device)].float()
            normaliser = torch.logsumexp(work.double(), dim=1)
            tokens = _index([request.token for request in requests], logits.device)
            values = (work.gather(1, tokens[:, None])[:, 0].double() - normaliser).float().cpu().numpy()
            widest = min(max((request.k for request in requests), default=0), work.shape[1])
            # Stable: equal logits keep the order of their ids, as on CPU.
            top, ids = torch.sort(work, dim=1, descending=True, stable=True)
            top_values = (top[:, :widest].double() - normaliser[:, None]).float().cpu().numpy()
            top_ids = ids[:, :widest].int().cpu().numpy()
        tops = [TopTokens(top_ids[r, : q.k], top_values[r, : q.k]) for r, q in enumerate(requests)]
        return values, tops


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """[R, 1]."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _adjust(work: Tensor, requests: Sequence[SampleRequest]) -> None:
    """Penalties, logit_bias, banned end ids and grammar masks, in place on ``work`` [R, V]."""
    size = work.shape[1]
    penalised = [r for r, request in enumerate(requests) if request.has_penalties]
    if penalised:
        rows = _index(penalised, work.device)
        work[rows] = _penalise(work[rows], [requests[r] for r in penalised])
    biased = [(r, t, b) for r, q in enumerate(requests) for t, b in q.params.logit_bias.items()]
    if biased:
        at = (_index([r for r, _, _ in biased], work.device), _index([t for _, t, _ in biased], work.device))
        work.index_put_(at, torch.tensor([b for _, _, b in biased], device=work.device), accumulate=True)
    banned = [(r, t) for r, q in enumerate(requests) if q.bans_ends for t in q.end_ids if t < size]
    if banned:
        work[_index([r for r, _ in banned], work.device), _index([t for _, t in banned], work.device)] = -torch.inf
    masked = [(r, q.mask) for r, q in enumerate(requests) if q.mask is not None]
    if masked:
        words = torch.from_numpy(np.stack([mask for _, mask in masked])).to(work.device)
        bits = torch.arange(32, device=work.device, dtype=torch.int32)
        allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :size]
        rows = _index([r for r, _ in masked], work.device)
        work[rows] = work[rows].masked_fill(~allowed, -torch.inf)


def _penalise(work: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """See ``kernels.penalise``."""
    device = work.device
    counts, seen = torch.zeros_like(work), torch.zeros_like(work, dtype=torch.bool)
    for r, request in enumerate(requests):
        ids = torch.from_numpy(request.ids.astype(np.int64)).to(device)
        seen[r, ids] = True
        outputs = ids[request.prompt_len :]
        counts[r].index_add_(0, outputs, torch.ones_like(outputs, dtype=counts.dtype))
    repetition = _column([q.params.repetition_penalty for q in requests], device)
    work = torch.where(seen, torch.where(work > 0, work / repetition, work * repetition), work)
    presence = _column([q.params.presence_penalty for q in requests], device)
    frequency = _column([q.params.frequency_penalty for q in requests], device)
    return work - torch.where(counts > 0, presence + frequency * counts, 0.0)


def _draw(work: Tensor, peaks: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """int64 [R]: one id per row by inverse CDF in order of ids, over what the filters leave."""
    device, size = work.device, work.shape[1]
    inverse = _column([float(np.float32(1.0 / q.params.temperature)) for q in requests], device)
    scaled = (work - peaks[:, None]) * inverse
    weights = torch.exp(scaled).double()
    weights = torch.where(torch.isneginf(scaled), 0.0, weights)
    if any(0 < q.params.top_k < size or q.params.top_p < 1.0 for q in requests):
        order = torch.sort(scaled, dim=1, descending=True, stable=True).indices
        ordered = weights.gather(1, order)
        top_k = [q.params.top_k if q.params.top_k > 0 else size for q in requests]
        rank = torch.arange(size, device=device)[None]
        ordered = torch.where(rank < _column(top_k, device, torch.long), ordered, 0.0)
        mass = ordered.cumsum(dim=1)
        top_p = _column([q.params.top_p for q in requests], device, torch.float64)
        # An entry stays if what is before it does not yet hold the wanted mass.
        keep = (mass - ordered < top_p * mass[:, -1:]) | (top_p >= 1.0)
        weights = torch.zeros_like(weights).scatter_(1, order, torch.where(keep, ordered, 0.0))
    if any(q.params.min_p > 0.0 for q in requests):
        floor = [float(np.log(q.params.min_p)) if q.params.min_p > 0.0 else -np.inf for q in requests]
        weights = torch.where(scaled >= _column(floor, device), weights, 0.0)
    mass = weights.cumsum(dim=1)
    u = torch.from_numpy(draws_of(requests)).to(device)[:, None]
    tokens = torch.searchsorted(mass, u * mass[:, -1:], right=True)[:, 0]
    last = size - 1 - (weights.flip(1) > 0).int().argmax(dim=1)  # u ran past the end by rounding
    return torch.minimum(tokens, last)

"""What the sampler is told about a row, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.messages import SamplingParams
from worker_proc.grammar_protocol import Bitmask

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

LEAST_TEMPERATURE = 1e-5
"""Below it float32 cannot hold the scaled logits, and the likeliest id has all the mass: greedy."""


def penalises(params: SamplingParams) -> bool:
    """Any penalty is on: a draw depends on the ids before it."""
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


@dataclass(slots=True)
class SampleRequest:
    """One id to be drawn.

    The order of operations: penalties, logit_bias, ids banned by min_tokens, grammar mask; then,
    unless greedy, temperature, top_k, top_p over what top_k left, min_p relative to the likeliest.
    """

    logit_row: int
    """Row of the step's logits."""
    params: SamplingParams
    index: int
    """Output index of the id to be drawn."""
    ids: I32
    """Prompt and output ids so far (penalties)."""
    prompt_len: int
    end_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop ids: banned before ``min_tokens``."""
    mask: Bitmask | None = None

    @property
    def is_greedy(self) -> bool:
        """No random draw."""
        return self.params.temperature < LEAST_TEMPERATURE or self.params.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Any penalty is on."""
        return penalises(self.params)

    @property
    def bans_ends(self) -> bool:
        """End ids must not be drawn yet."""
        return self.index < self.params.min_tokens and bool(self.end_ids)

    @property
    def is_plain(self) -> bool:
        """The id is the argmax of the raw logits."""
        return self.mask is None and self.is_argmax

    @property
    def is_argmax(self) -> bool:
        """The id is the argmax of the raw logits, among those that the mask allows."""
        params = self.params
        return (
            (params.temperature < LEAST_TEMPERATURE or params.top_k == 1)
            and not penalises(params)
            and not params.logit_bias
            and not (self.index < params.min_tokens and self.end_ids)
        )


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest ids of one distribution, likeliest first (ties: lowest id first)."""

    ids: I32
    logprobs: F32


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The log-probability of ``token`` and of the ``k`` likeliest ids in the raw distribution of a logits row."""

    logit_row: int
    token: int
    k: int


class Drawn(Protocol):
    """Ids that are being drawn."""

    @property
    def ids(self) -> Any:
        """Tensor [R] on the device: what the next step's forward pass may take before the host has it."""
        ...

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> tuple[I32, NDArray[np.bool_]]:
        """As ``Sampler.sample``. Once."""
        ...

    def report(self, place: int) -> tuple[np.float32, TopTokens]:
        """The log-probability of request ``place``'s id and its likeliest ids, where the request wants them
        (``SamplingParams.logprobs``) and the row was usable. After ``wait``."""
        ...


class Reports(Protocol):
    """Log-probabilities that are being worked out."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> tuple[F32, list[TopTokens]]:
        """As ``Sampler.logprobs``."""
        ...


class Sampler(Protocol):
    """Draws ids from logits [N, vocab]; one per device kind."""

    def sample(self, logits: Any, requests: Sequence[SampleRequest]) -> tuple[I32, NDArray[np.bool_]]:
        """Ids [R], and a bool [R] that marks rows whose logits are not usable (NaN, +inf, everything forbidden)."""
        ...

    def logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> tuple[F32, list[TopTokens]]:
        """Log-probabilities [R] of the tokens, and for each request its k likeliest."""
        ...


class AheadSampler(Protocol):
    """One that is told what to do and waited for later."""

    def begin(self, logits: Any, requests: Sequence[SampleRequest]) -> Drawn:
        """Launch what ``Sampler.sample`` does, with the log-probabilities that the requests want. Arrays of the
        requests may change afterwards, and so may ``logits`` by what is launched later."""
        ...

    def begin_logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> Reports:
        """Launch what ``Sampler.logprobs`` does. Without requests it is ready when ``logits`` are."""
        ...

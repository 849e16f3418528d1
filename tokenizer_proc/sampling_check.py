"""Sampling parameters as the engine can take them, whoever sent them.

Gateways check what clients send, in the clients' words. A gateway on another host may be of another version, or not
be ours at all: a value that would stop the worker, or fill its memory, is refused here with a 400.
"""

from __future__ import annotations

import math

from common.errors import RequestError
from common.messages import SamplingParams

_LEAST_FACTOR = 1e-30
_LARGEST = 1e30
"""What float32, in which logits are adjusted, holds with room to multiply."""
_MOST_SEED = 2**63 - 1

_RANGES: dict[str, tuple[float, float]] = {
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0.0, _LARGEST),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "seed": (0, _MOST_SEED),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
    "repetition_penalty": (_LEAST_FACTOR, _LARGEST),
}
"""Inclusive. Wider than what a protocol allows."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises ``RequestError`` (400) for a number that is not finite or not in its range."""
    for name, (low, high) in _RANGES.items():
        _check(name, getattr(sampling, name), low, high)
    for token, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            words = f"'logit_bias' of token {token} is {bias}; it must be a finite number"
            raise RequestError(words, param="logit_bias")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None:
            _check(name, value, 0, vocab_size)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is in no range
        raise RequestError(f"'{name}' is {value}; it must be between {low:g} and {high:g}", param=name)

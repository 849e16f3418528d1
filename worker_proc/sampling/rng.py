"""Counter-based random numbers: a draw is a function of (seed, output index) and of nothing else.

So a request draws the same numbers whoever shares its batch, and goes on as it would have after a
preemption or in another process. The mixing is SplitMix64's finaliser (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worker_proc.sampling.request import SampleRequest

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One float64 in (0, 1) per (seed, index) pair, with 53 random bits."""
    with np.errstate(over="ignore"):
        # The seed is mixed first: neighbouring seeds must not give shifted copies of one stream.
        z = _mix(_mix(seeds.astype(np.uint64) + _GOLDEN) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draws_of(requests: Sequence[SampleRequest]) -> NDArray[np.float64]:
    """The uniform number of each request."""
    seeds = np.array([request.params.seed for request in requests], np.uint64)
    indices = np.array([request.index for request in requests], np.uint64)
    return uniforms(seeds, indices)

"""How long a step takes: a line in what the step has to do, from flags or fitted to a trace.

    seconds = a + b x prefill tokens + c x decode rows + d x context tokens

``a`` is what a step costs however little is in it (on a small batch: reading the weights), ``b`` the
arithmetic of one more prompt token, ``c`` of one more decoding row, ``d`` reading one cached position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from tools.simulate.worker import StepLoad

F64 = NDArray[np.float64]
MIN_STEPS = 20
OUTLIER = 3.0

@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds."""

    a: float
    b: float
    c: float
    d: float

    def seconds(self, load: StepLoad) -> float:
        """Duration of one step."""
        return (
            self.a + self.b * load.prefill_tokens + self.c * load.decode_rows + self.d * load.context_tokens
        )

    def __str__(self) -> str:
        return (
            f"{self.a * 1e3:.4g} ms + {self.b * 1e6:.4g} us/prefill token + {self.c * 1e6:.4g} us/decode row"
            f" + {self.d * 1e9:.4g} ns/context token"
        )


def fit(loads: Sequence[StepLoad], seconds: Sequence[float]) -> tuple[CostModel, float]:
    """Least squares without negative coefficients; returns the model and its R squared on the steps used.

    Weighted by 1 / duration, so that many short decode steps and few long prefill steps fit equally well in
    proportion. Steps off by more than ``OUTLIER`` times (a start-up, a machine that did something else) are
    left out and the rest is fitted again. Raises ConfigError with fewer than 20 steps.
    """
    if len(loads) < MIN_STEPS:
        raise ConfigError(f"a cost model needs at least {MIN_STEPS} steps to fit, the trace has {len(loads)}")
    x = np.array([(1, s.prefill_tokens, s.decode_rows, s.context_tokens) for s in loads], dtype=np.float64)
    y = np.asarray(seconds, dtype=np.float64)
    keep = y > 0
    coefficients = np.zeros(4)
    for _ in range(4):
        coefficients = _solve(x[keep], y[keep])
        predicted = x @ coefficients
        keep = (y > 0) & (y < OUTLIER * predicted) & (predicted < OUTLIER * y)
        if np.count_nonzero(keep) < MIN_STEPS:
            raise ConfigError("the steps of the trace follow no linear cost: their durations vary too much")
    x, y = x[keep], y[keep]
    residual, spread = ((x @ coefficients - y) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    a, b, c, d = coefficients.tolist()
    return CostModel(a, b, c, d), float(1 - residual / spread) if spread else 1.0


def _solve(x: F64, y: F64) -> F64:
    """The best of the 15 sets of coefficients that come out without a negative one."""
    best, least = np.zeros(4), np.inf
    weighted, ones = x / y[:, None], np.ones(len(y))
    for size in range(1, 5):
        for chosen in combinations(range(4), size):
            solved, *_ = np.linalg.lstsq(weighted[:, chosen], ones, rcond=None)
            error = float(((weighted[:, chosen] @ solved - ones) ** 2).sum())
            if (solved >= 0).all() and error < least * (1 - 1e-12):
                best, least = np.zeros(4), error
                best[list(chosen)] = solved
    return best

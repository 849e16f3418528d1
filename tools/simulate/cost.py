"""How long a step takes: a line in what the step has to do, from flags or fitted to a trace.

    seconds = a + b x prefill tokens + c x decode rows + d x context tokens

``a`` is what a step costs however little is in it (on a small batch: reading the weights), ``b`` the
arithmetic of one more prompt token, ``c`` of one more decoding row, ``d`` reading one cached position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import ConfigError
from tools.simulate.worker import StepLoad


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
    """Least squares with no negative coefficient; returns the model and its R squared.

    Steps that took more than ten times the median are left out (a start-up, a machine that slept).
    Raises ConfigError with fewer than 20 steps. Weighted by 1 / duration, so that many short decode
    steps and few long prefill steps fit equally well in proportion.
    """
    if len(loads) < 20:
        raise ConfigError(f"a cost model needs at least 20 steps to fit, the trace has {len(loads)}")
    x = np.array([(1, s.prefill_tokens, s.decode_rows, s.context_tokens) for s in loads], dtype=np.float64)
    y = np.asarray(seconds, dtype=np.float64)
    light = x[:, 1] == 0
    usual = y < 10 * (np.median(y[light]) if light.any() else np.median(y))
    keep = (y > 0) & (usual | ~light)
    x, y = x[keep], y[keep]
    weight = 1.0 / y
    active = [0, 1, 2, 3]
    coefficients = np.zeros(4)
    while active:
        solved, *_ = np.linalg.lstsq(x[:, active] * weight[:, None], y * weight, rcond=None)
        if (solved >= 0).all():
            coefficients[active] = solved
            break
        active.pop(int(solved.argmin()))
    residual = ((x @ coefficients - y) ** 2).sum()
    spread = ((y - y.mean()) ** 2).sum()
    a, b, c, d = coefficients.tolist()
    return CostModel(a, b, c, d), float(1 - residual / spread) if spread else 1.0

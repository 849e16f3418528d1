"""What a step costs, as measured, and the size of prefill chunks that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_CHUNK = 512
MIN_CHUNK = 32
MAX_CHUNK = 8192
TARGET_RATIO = 3.0
"""A step with a prefill chunk may take this many times a step of decoding alone. Below the 4 that is
promised for the p99 of ITL, because single steps vary."""
_SMOOTHING = 0.1


@dataclass
class StepCost:
    """Moving averages of what the worker reports."""

    decode_s: float = 0.0
    """A step without prefill; 0 while none was seen."""
    per_prefill_token_s: float = 0.0
    """What one more prefill token adds to a step; 0 while unknown."""

    def observe(self, duration_s: float, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """Learn from one step. The first steps, slow from warming up, fade within some tens of steps."""
        if duration_s <= 0:
            return
        if num_prefill_tokens == 0:
            if num_decode_rows:
                self.decode_s = _average(self.decode_s, duration_s)
            return
        if num_prefill_tokens < MIN_CHUNK:
            return  # the fixed cost would drown what the tokens add
        fixed_s = self.decode_s if num_decode_rows else 0.0
        added = max(duration_s - fixed_s, 0.05 * duration_s)
        self.per_prefill_token_s = _average(self.per_prefill_token_s, added / num_prefill_tokens)


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (min(new, 8 * old) - old)


def choose_chunk(configured: int, cost: StepCost, *, decoding: bool, page_size: int) -> int:
    """Most prefill tokens of the next step.

    ``configured`` > 0 is obeyed. Otherwise: while nobody decodes there is no ITL to protect, and the
    default serves; beside decoding rows, as many as keep the step within ``TARGET_RATIO`` of a step
    without them, in whole pages.
    """
    if configured > 0:
        return configured
    if not decoding or cost.decode_s == 0 or cost.per_prefill_token_s == 0:
        return DEFAULT_CHUNK
    fitting = int((TARGET_RATIO - 1) * cost.decode_s / cost.per_prefill_token_s)
    return min(max(fitting // page_size * page_size, MIN_CHUNK), MAX_CHUNK)

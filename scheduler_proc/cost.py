"""What a step costs, as measured, and the size of prefill chunks that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_CHUNK = 512
FIRST_CHUNK = 64
"""Beside decoding rows, while nothing is known of the machine: one step of this size tells."""
MIN_CHUNK = 32
MAX_CHUNK = 8192
LONGEST_STEP_S = 0.4
"""Even if nobody decodes: two such steps are in flight before who arrives is served, or who leaves has its pages
back, and that is to take less than a second."""
TARGET_RATIO = 3.0
"""A step with a prefill chunk may take this many times a step of decoding alone. Below the 4 that is
promised for the p99 of ITL, because single steps vary."""
LAST_PIECE = 4 / 3
"""The end of a prompt may exceed the budget beside decoding rows by this factor: left for another step, it would
pay for that whole step to save the others a third of a chunk. (Three times, stretched so, is 3.7 times.)"""
_SMOOTHING = 0.2
_UP, _DOWN = 1.1, 0.5
"""How far from the average a value may count. Steps are sometimes slow for reasons of their own (warming up, a
busy machine) and never fast by chance, so an average is kept near what is usual: it rises slowly and falls fast."""


@dataclass
class StepCost:
    """Moving averages of what the worker reports."""

    decode_s: dict[int, float] = field(default_factory=dict)
    """Seconds of decoding alone, by the bit length of the number of rows (1, 2-3, 4-7, ...)."""
    per_prefill_token_s: float = 0.0
    """What one more prefill token adds to a step; 0 while unknown."""

    def observe(self, duration_s: float, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """Learn from one step: of one kind directly, of a mixed one by taking away the part that is known."""
        if duration_s <= 0:
            return
        size = num_decode_rows.bit_length()
        if num_prefill_tokens == 0:
            if num_decode_rows:
                self.decode_s[size] = _average(self.decode_s.get(size, 0.0), duration_s)
        elif num_prefill_tokens < MIN_CHUNK:
            pass  # the fixed cost of a step would drown what so few tokens add
        elif num_decode_rows == 0 or size in self.decode_s:
            added = max(duration_s - self.decode_s.get(size, 0.0), 0.05 * duration_s)
            self.per_prefill_token_s = _average(self.per_prefill_token_s, added / num_prefill_tokens)
        elif self.per_prefill_token_s:
            # A small difference of two large numbers: alone it once put decoding at a tenth of what it takes,
            # and every chunk beside it at the smallest size. Fewer rows seen alone are a bound from below.
            decode_s = duration_s - self.per_prefill_token_s * num_prefill_tokens
            self.decode_s[size] = max(decode_s, 0.1 * duration_s, self.decoding(num_decode_rows))

    def decoding(self, num_decode_rows: int) -> float:
        """Seconds that so many rows take without prefill; 0 while nothing like it was seen.

        Where this number of rows was not seen, the nearest smaller one that was (a careful guess), or the
        nearest larger. More rows never take less than fewer did.
        """
        size = num_decode_rows.bit_length()
        fewer = [seconds for n, seconds in self.decode_s.items() if n <= size]
        if fewer:
            return max(fewer)
        return self.decode_s[min(self.decode_s)] if self.decode_s else 0.0


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (min(max(new, _DOWN * old), _UP * old) - old)


def choose_chunk(configured: int, cost: StepCost, num_decode_rows: int, page_size: int) -> tuple[int, int]:
    """(budget, most): prefill tokens of the next step, and how many more a prompt may take that ends with them.

    ``configured`` > 0 is obeyed. Otherwise the budget is as many, in whole pages, as keep the step within
    ``LONGEST_STEP_S``, and, where there are decoding rows, within ``TARGET_RATIO`` of a step without prefill.
    """
    if configured > 0:
        return configured, configured
    per_token_s, decode_s = cost.per_prefill_token_s, cost.decoding(num_decode_rows)
    if per_token_s == 0:
        budget = FIRST_CHUNK if num_decode_rows else DEFAULT_CHUNK
        return budget, budget
    seconds = LONGEST_STEP_S - decode_s
    if num_decode_rows and decode_s:
        seconds = min(seconds, (TARGET_RATIO - 1) * decode_s)
    fitting = int(max(seconds, 0.0) / per_token_s)
    budget = min(max(fitting // page_size * page_size, MIN_CHUNK), MAX_CHUNK)
    return budget, int(budget * LAST_PIECE) if num_decode_rows else budget

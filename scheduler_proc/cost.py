"""What a step costs, as measured, and the prefill that follows from it: how many tokens, of which prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

DEFAULT_CHUNK = 512
FIRST_CHUNK = 64
"""Beside decoding rows, while nothing is known of the machine: one step of this size tells."""
MIN_CHUNK = 32
MAX_CHUNK = 8192
LONGEST_STEP_S = 0.4
"""Even if nobody decodes: two such steps are in flight before who arrives is served, or who leaves has its pages
back, and that is to take less than a second."""
TARGET_RATIO = 2.5
"""A step with a prefill chunk may take this many times a step of decoding alone. Well below the 4 that are promised
for the p99 of ITL: single steps vary, and where a step takes 8 ms and all cores, what the other processes do comes on
top. With 3.0 that machine gave 5; prompt tokens per second are as many with 1.9 as with 3.0 (docs/benchmarks.md, D)."""
LAST_PIECE = 4 / 3
"""The end of a prompt may exceed the budget beside decoding rows by this factor: left for another step, it would
pay for that whole step to save the others a third of a chunk. (2.5 times, stretched so, is 3 times.)"""
DEEP = 1024
"""Positions: of what a token at this context costs more or less than expected, half is taken for attention."""
_SMOOTHING = 0.2
_UP, _DOWN = 1.1, 0.5
"""How far from the average a value may count. Steps are sometimes slow for reasons of their own (warming up, a
busy machine) and never fast by chance, so an average is kept near what is usual: it rises slowly and falls fast."""


@dataclass
class TokenCost:
    """What one more prefill token adds to a step: a part that every token costs, and attention to those before it.

    A moving average along a line: an error moves the estimate for the context it was made at just as it would move
    a plain average, and is laid to the two parts in proportion to what each contributes there (normalised least
    mean squares, Widrow and Hoff 1960). Shallow prompts therefore teach next to nothing of attention, and
    noise no more than its share.
    """

    base_s: float = 0.0
    """Of a token without context; 0 while unknown."""
    per_position_s: float = 0.0
    """More for each position before it; never negative."""

    def at(self, context: float) -> float:
        """Seconds of one token after ``context`` others; 0 while unknown."""
        return self.base_s + self.per_position_s * context

    def learn(self, seconds: float, context: float) -> None:
        """One token took this long, in the mean over a step's, whose mean context was this."""
        if self.base_s == 0:
            self.base_s = seconds
            return
        error_s = _average(self.at(context), seconds) - self.at(context)
        depth = context / DEEP
        share = 1 / (1 + depth * depth)
        # The limit keeps it positive: 0 would mean unknown. What it cuts off, the next steps make up for.
        self.base_s = max(self.base_s + share * error_s, (1 - _SMOOTHING) * self.base_s)
        self.per_position_s = max(self.per_position_s + share * depth * error_s / DEEP, 0.0)

    def fitting(self, seconds: float, start: int) -> int:
        """How many tokens of a prompt, the first at position ``start``, take no longer than ``seconds``."""
        first_s = self.at(start)
        # n x first_s + per_position_s x n^2 / 2 = seconds, solved for n so that per_position_s may be 0
        return int(2 * seconds / (first_s + sqrt(first_s * first_s + 2 * self.per_position_s * seconds)))


@dataclass
class StepCost:
    """Moving averages of what the worker reports."""

    decode_s: dict[int, float] = field(default_factory=dict)
    """Seconds of decoding alone, by the bit length of the number of rows (1, 2-3, 4-7, ...). Not by their contexts:
    those grow slowly and the average follows. In simulations a part for them helped here and hurt there."""
    prefill_token: TokenCost = field(default_factory=TokenCost)

    def observe(
        self, duration_s: float, num_prefill_tokens: int, num_decode_rows: int, context: float = 0.0,
        tile_tokens: int = 1,
    ) -> None:  # fmt: skip
        """Learn from one step: of one kind directly, of a mixed one by taking away the part that is known.

        ``context``: mean over the prefill tokens of how many positions were before them. ``tile_tokens``: as announced.
        """
        if duration_s <= 0:
            return
        size = num_decode_rows.bit_length()
        if num_prefill_tokens == 0:
            if num_decode_rows:
                self.decode_s[size] = _average(self.decode_s.get(size, 0.0), duration_s)
        elif num_prefill_tokens < smallest_chunk(num_decode_rows, tile_tokens):
            pass  # the fixed cost of a step would drown what so few tokens add
        elif num_decode_rows == 0 or size in self.decode_s:
            added = max(duration_s - self.decode_s.get(size, 0.0), 0.05 * duration_s)
            self.prefill_token.learn(added / num_prefill_tokens, context)
        elif self.prefill_token.base_s:
            # A small difference of two large numbers: alone it once put decoding at a tenth of what it takes,
            # and every chunk beside it at the smallest size. Fewer rows seen alone are a bound from below.
            decode_s = duration_s - self.prefill_token.at(context) * num_prefill_tokens
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


def _filling(num_tokens: int, num_beside: int, tile_tokens: int) -> int:
    """The most of ``num_tokens`` that fill tiles together with ``num_beside`` others; may be negative."""
    return (num_tokens + num_beside) // tile_tokens * tile_tokens - num_beside


def _nearly(num_tokens: int, num_beside: int, tile_tokens: int) -> int:
    """The same to the nearest tile: one that is more than half full takes as long as a full one."""
    return _filling(num_tokens + tile_tokens // 2, num_beside, tile_tokens)


def smallest_chunk(num_decode_rows: int, tile_tokens: int) -> int:
    """``MIN_CHUNK``, to the nearest tile of the step."""
    return max(_nearly(MIN_CHUNK, num_decode_rows, tile_tokens), MIN_CHUNK // 2)


def choose_chunk(
    configured: int, cost: StepCost, num_decode_rows: int, page_size: int, start: int = 0, tile_tokens: int = 1
) -> tuple[int, int]:
    """(budget, most): prefill tokens of the next step, and how many more a prompt may take that ends with them.

    ``configured`` > 0 is obeyed. Otherwise the budget is as many as keep the step within ``LONGEST_STEP_S``, and,
    where there are decoding rows, within ``TARGET_RATIO`` of a step without prefill, if they are a prompt's from
    position ``start`` on: in whole pages, or, if the worker's tiles are known, so that the step's tokens fill them.
    """
    if configured > 0:
        return configured, configured
    smallest = smallest_chunk(num_decode_rows, tile_tokens)
    if cost.prefill_token.base_s == 0:
        first = FIRST_CHUNK if num_decode_rows else DEFAULT_CHUNK
        budget = max(_filling(first, num_decode_rows, tile_tokens), smallest)
        return budget, budget
    decode_s = cost.decoding(num_decode_rows)
    seconds = LONGEST_STEP_S - decode_s
    if num_decode_rows and decode_s:
        seconds = min(seconds, (TARGET_RATIO - 1) * decode_s)
    seconds = max(seconds, 0.0)
    fitting = min(cost.prefill_token.fitting(seconds, start), MAX_CHUNK)
    if tile_tokens > 1:
        budget = max(_filling(fitting, num_decode_rows, tile_tokens), smallest)
    else:
        budget = max(fitting // page_size * page_size, smallest)
    if not num_decode_rows:
        return budget, budget
    # Not LAST_PIECE of a budget that is the smallest there is and may take longer than it should already.
    stretched = cost.prefill_token.fitting(LAST_PIECE * seconds, start)
    return budget, max(min(stretched, int(budget * LAST_PIECE)), budget)


@dataclass
class Budget:
    """The prefill of one step, dealt out to prompts in turn. The deeper a prompt, the fewer tokens its share is."""

    configured: int
    cost: StepCost
    num_decode_rows: int
    page_size: int
    tile_tokens: int = 1
    left: float = 1.0
    """Share of the step's prefill that is still to be had."""
    taken: int = 0
    """Tokens of those prompts that end in this step."""

    @property
    def spent(self) -> bool:
        """Nothing is left, but for rounding."""
        return self.left < 1e-9

    def take(self, start: int, num_left: int) -> int:
        """How many of the ``num_left`` ids of a prompt from position ``start`` on are in this step."""
        if self.spent:
            return 0
        size, most = choose_chunk(
            self.configured, self.cost, self.num_decode_rows, self.page_size, start, self.tile_tokens
        )
        fitting = max(int(size * self.left + 1e-6), 1)
        if num_left <= fitting + most - size:
            self.left -= num_left / size
            self.taken += num_left
            return num_left
        self.left = 0.0  # not what rounding left of it: nobody comes after one that did not get all
        if self.configured > 0:
            return fitting
        filling = _nearly(fitting, self.num_decode_rows + self.taken, self.tile_tokens)
        return min(filling, num_left) if filling > 0 else fitting

"""What a step takes by its number of tokens, measured once at start.

A step of few tokens waits for the weights, and some more tokens cost next to nothing; a step of many multiplies, and
each costs its share. Where one becomes the other is the machine's and the model's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from worker_proc.runner import ModelRunner, PackedBatch

NUM_TOKENS = (1, 4, 8, 12, 13, 16, 17, 24, 25, 32, 36, 37, 48, 49, 64)
"""Measured. Products are computed in tiles of up to 6, 12 or 16 rows, and another tile is a stair. Steps of more tokens
cost as much per further token as from 48 to the last."""
REPEATS = 2
ENOUGH_S = 0.5
"""After so long each size is measured once: the steps are long then, and vary less."""


class StepTimes:
    """Seconds of a step, linear between the sizes that were measured."""

    def __init__(self, seconds: Sequence[float], num_tokens: Sequence[int] = NUM_TOKENS) -> None:
        """``seconds``: [n] of steps of ``num_tokens`` [n >= 2, ascending]. A step never counts as slower than one of
        more tokens: a measurement is too high when something else had a core, and never too low."""
        sizes = np.arange(num_tokens[-1] + 1)
        rising = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]
        self._seconds: list[float] = np.interp(sizes, num_tokens, rising).tolist()
        before = max((n for n in num_tokens[:-1] if n <= 0.75 * num_tokens[-1]), default=num_tokens[-2])
        self._slope = (self._seconds[-1] - self._seconds[before]) / (num_tokens[-1] - before)
        last = int(sizes[-1])
        self._least: list[float] = [
            min(self._slope, *((self.at(more) - self.at(size)) / (more - size) for more in range(size + 1, last + 1)))
            if size < last
            else self._slope
            for size in range(last + 1)
        ]

    def at(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        last = len(self._seconds) - 1
        if num_tokens <= last:
            return self._seconds[num_tokens]
        return self._seconds[last] + self._slope * (num_tokens - last)


    def least_slope(self, num_tokens: int) -> float:
        """Least seconds of one more token, over all numbers that may be added."""
        return self._least[min(num_tokens, len(self._least) - 1)]


def measure(runner: ModelRunner, max_tokens: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of a step of each of ``NUM_TOKENS``, least of some; all logits are wanted, as of drafts.

    ``max_tokens``: what the pool and the model's positions allow; larger steps are not measured and taken to cost
    what their tokens do. Overwrites the pool's first pages.
    """
    out: list[float] = []
    began = clock()
    for num_tokens in NUM_TOKENS:
        if num_tokens > max_tokens:
            out.append(out[-1] * num_tokens / NUM_TOKENS[len(out) - 1])
            continue
        batch = _one_sequence(num_tokens, runner.page_size)
        times: list[float] = []
        while not times or (len(times) < REPEATS and clock() - began < ENOUGH_S):
            before = clock()
            runner.forward(batch).argmax(1)  # drawing reads them
            times.append(clock() - before)
        out.append(min(times))
    return out


def _one_sequence(num_tokens: int, page_size: int) -> PackedBatch:
    places = np.arange(num_tokens, dtype=np.int32)
    return PackedBatch(
        ids=places % 7,
        positions=places,
        query_start=np.array([0, num_tokens], np.int32),
        context_lens=np.array([num_tokens], np.int32),
        page_table=np.arange(-(-num_tokens // page_size), dtype=np.int32)[None],
        logit_rows=places,
    )

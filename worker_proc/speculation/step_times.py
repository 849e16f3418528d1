"""What a step takes by its number of tokens, measured once at start.

A step of few tokens waits for the weights, and some more tokens cost next to nothing; a step of many multiplies, and
each costs its share. Where one becomes the other is the machine's and the model's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from worker_proc.runner import ModelRunner, PackedBatch

_SMOOTHING = 0.1
_MOST = 4.0
"""A step counts as at most so many times as long as its forward pass alone was: a longer one was held up."""
DRAFT_COST = 1.25
"""Times what it adds to a forward pass alone: it is looked up, drawn and told of, and takes from the cores what other
processes would have had while the step waited for memory."""
NUM_TOKENS = (1, 4, 8, 12, 13, 16, 17, 24, 25, 32, 36, 37, 48, 49, 64)
"""Measured. Products are computed in tiles of up to 6, 12 or 16 rows, and another tile is a stair. Steps of more tokens
cost as much per further token as from 48 to the last."""
COARSE = (1, 8, 24, 64)
"""Those that are measured even of a model whose steps are long; the others then lie on the lines between them."""
REPEATS = 4
ENOUGH_S = 0.5
"""After so long nothing else is measured."""


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

    def between(self, least: int, most: int) -> list[float]:
        """``at`` of each number from ``least`` to ``most``."""
        if most < len(self._seconds):
            return self._seconds[least : most + 1]
        return [self.at(number) for number in range(least, most + 1)]

    def least_slope(self, num_tokens: int) -> float:
        """Least seconds of one more token, over all numbers that may be added."""
        return self._least[min(num_tokens, len(self._least) - 1)]


class ServedTimes:
    """The same in service: with long contexts, drawing, and other processes on the cores.

    A step's seconds = those of its tokens without drafts + ``beside_s``, a moving average + what its drafts add.
    """

    def __init__(self, alone: StepTimes, beside_s: float = 0.0, draft_cost: float = DRAFT_COST) -> None:
        self.alone = alone
        self.beside_s = beside_s
        self._draft_cost = draft_cost

    def at(self, num_tokens: int, num_drafts: int = 0) -> float:
        """Seconds of a step of ``num_tokens``, and of drafts besides."""
        return self.with_drafts(num_tokens, num_drafts)[-1]

    def with_drafts(self, num_tokens: int, most: int) -> list[float]:
        """Seconds of a step of ``num_tokens`` with 0, 1, ... ``most`` drafts besides."""
        alone = self.alone.between(num_tokens, num_tokens + most)
        first, cost = alone[0], self._draft_cost
        base = first + self.beside_s
        return [base + cost * (seconds - first) for seconds in alone]

    def least_of_draft(self, num_tokens: int) -> float:
        """Seconds of one draft beside ``num_tokens``, at least."""
        return self._draft_cost * self.alone.least_slope(num_tokens)

    def learn(self, seconds: float, num_tokens: int, num_drafts: int) -> None:
        """A step of decoding took so long."""
        most = _MOST * self.alone.at(num_tokens + num_drafts)
        error_s = min(seconds, most) - self.at(num_tokens, num_drafts)
        self.beside_s = max(self.beside_s + _SMOOTHING * error_s, 0.0)


def measure(
    runner: ModelRunner,
    max_tokens: int,
    num_threads: int,
    clock: Callable[[], float] = time.process_time,
    wall: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of a step of each of ``NUM_TOKENS``, least of some rounds; all logits are wanted, as of drafts.

    ``max_tokens``: what the pool and the model's positions allow; larger steps are not measured and taken to cost
    what their tokens do. ``clock``: the processor's time for the ``num_threads`` of the step together, since many a
    server starts on a machine that is busy starting others. Overwrites the pool's first pages.
    """
    fitting = [n for n in NUM_TOKENS if n <= max_tokens]
    coarse_first = sorted(fitting, key=lambda n: n not in COARSE and n != fitting[-1])
    argmax = getattr(runner, "argmax", None)

    def draw(logits: Any, batch: PackedBatch) -> None:
        logits.argmax(1) if argmax is None else argmax(batch.logit_rows)

    least: dict[int, float] = {}
    began = wall()
    for turn in range(REPEATS):
        for num_tokens in coarse_first:
            needed = turn == 0 and (num_tokens in COARSE or num_tokens == fitting[-1])
            if not needed and wall() - began > ENOUGH_S:
                break
            batch = _one_sequence(num_tokens, runner.page_size)
            before = clock()
            draw(runner.forward(batch), batch)
            least[num_tokens] = min(least.get(num_tokens, float("inf")), (clock() - before) / num_threads)
    sizes = sorted(least)
    found = np.interp(fitting, sizes, [least[n] for n in sizes]).tolist()
    return found + [found[-1] * n / fitting[-1] for n in NUM_TOKENS[len(fitting) :]]


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

"""Speculation: rows that decode compute, beside their last id, ids that are likely to come next.

The forward pass gives the logits after each of them, and the next id is drawn from each as if it were the only one.
Those drawn are the request's next ids, up to the first that is not the draft computed after it; K and V of the drafts
beyond it are overwritten. So drafts decide how many steps an answer takes and never what it says: greedy, or with
the random number that belongs to an output's place. Bit for bit that holds where a row's logits do not depend on
what shares the step (``ModelRunner.batch_invariant``), and only there this is on by default.

How many drafts a step takes follows from what it yields in a second. Chances of the drafts come from ``Acceptance``,
seconds from ``StepTimes``; drafts are added, the likeliest first, as long as the ids to be expected grow faster than
the time. One request on a machine that waits for its weights gets all it may have; of many requests only the drafts
that are nearly certain are worth their arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker_proc.packing import Row
from worker_proc.speculation.acceptance import Acceptance
from worker_proc.speculation.lookup import PromptLookup
from worker_proc.speculation.step_times import StepTimes

LEAST_CHANCE = 0.05
"""Drafts less likely than this are not looked at, even if they cost nothing."""
COST = 1.2
"""A draft counts as this many times what it adds to a step's forward pass: it is looked up, drawn and told of, too."""
_SMOOTHING = 0.1
_MOST_BESIDE = 3.0
"""Times what the tokens take: a step that took longer was held up, or every draft is cheap as it is."""


class Speculator:
    """Gives drafts to the rows of a step and learns from what was drawn.

    ``max_drafts``: most of a row. ``context_length``: positions that the model has.
    """

    def __init__(self, max_drafts: int, context_length: int, times: StepTimes) -> None:
        self.max_drafts = max_drafts
        self._context_length = context_length
        self._times = times
        self._acceptance = Acceptance(max_drafts)
        self._beside_s = 0.0
        """What steps take beside the time of their tokens: attention to long contexts, drawing."""

    def add(self, rows: Sequence[Row], page_size: int) -> None:
        """Lengthen rows by drafts, where that pays. ``rows``: all of a step that compute something."""
        num_tokens = sum([row.length for row in rows])
        num_rows = sum([row.samples for row in rows])
        least = max(self._least_chance(num_tokens, num_rows), LEAST_CHANCE)
        chances = self._acceptance.chances
        found: list[tuple[float, Row]] = []
        for row in rows:
            room = self._room(row, page_size)
            if room < 1:
                continue
            lookup = self._lookup(row)
            place, match = lookup.longest()
            if not match:
                continue
            likely = chances[match - 1][0] >= least
            row.match, row.proposal = match, lookup.after(place, room if likely else 1)
            if likely:
                run = self._acceptance.run(match, room)
                found += [(chance, row) for chance in run if chance >= least]
        if not found:
            return
        found.sort(key=lambda each: -each[0])  # a row's own are in order: each is less likely than the one before
        likeliest = [chance for chance, _ in found]
        for _, row in found[: num_worthwhile(likeliest, num_tokens, num_rows, self._times, self._beside_s)]:
            row.num_drafts += 1
            row.length += 1

    def learn(self, row: Row, drawn: Sequence[int]) -> None:
        """These ids came where ``row`` was in the step; not all of what was drawn if a request ended in between."""
        if row.match:
            self._acceptance.learn(row.match, row.proposal, drawn)

    def took(self, rows: Sequence[Row], seconds: float) -> None:
        """A step of these rows took so long. Those with prompts are not counted: they are of all sizes."""
        num_tokens = sum([row.length for row in rows])
        if rows and num_tokens == len(rows) + sum([row.num_drafts for row in rows]):
            expected_s = self._times.at(num_tokens)
            beside_s = min(max(seconds - expected_s, 0.0), _MOST_BESIDE * expected_s)
            self._beside_s += _SMOOTHING * (beside_s - self._beside_s)

    def _least_chance(self, num_tokens: int, num_rows: int) -> float:
        """What a draft must have, to yield as much in its time as the rows do in theirs."""
        return COST * self._times.least_slope(num_tokens) * num_rows / (self._times.at(num_rows) + self._beside_s)

    def _room(self, row: Row, page_size: int) -> int:
        """Drafts a row may have. None with a grammar or a penalty: what may come then depends on the ids before.

        If all are right, one id more is drawn, and a row that is on its way finds a page for it.
        """
        slot = row.slot
        if not row.samples or row.length != 1 or slot.grammar is not None or slot.penalised:
            return 0
        known = slot.num_known
        most = min(slot.capacity(page_size), self._context_length)
        if slot.sampling.max_tokens is not None:
            most = min(most, slot.prompt_len + slot.sampling.max_tokens)
        return min(self.max_drafts, most - known - 1)

    @staticmethod
    def _lookup(row: Row) -> PromptLookup:
        """The request's ids, those that are new since it was asked for last included."""
        slot = row.slot
        if slot.lookup is None:
            slot.lookup = PromptLookup()
        slot.lookup.extend(slot.ids.view()[len(slot.lookup.ids) :].tolist())
        return slot.lookup


def num_worthwhile(
    chances: Sequence[float], num_tokens: int, num_rows: int, times: StepTimes, beside_s: float = 0.0
) -> int:
    """How many drafts a step is to have: the number with the most expected yield per second.

    ``chances``: [n] descending. ``num_tokens`` and ``num_rows``: of the step without drafts; what it computes beside
    one token of each row that samples (prompts) is counted as the ids that decoding would yield in that time.
    ``beside_s``: seconds of the step that do not depend on its tokens.
    """
    at_first = times.at(num_tokens)
    seconds = at_first + beside_s
    expected = num_rows * seconds / (times.at(num_rows) + beside_s)
    best, best_rate = 0, expected / seconds
    for number, chance in enumerate(chances, start=1):
        expected += chance
        rate = expected / (seconds + COST * (times.at(num_tokens + number) - at_first))
        if rate > best_rate:
            best, best_rate = number, rate
    return best

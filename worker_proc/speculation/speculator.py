"""Speculation: rows that decode compute, beside their last id, ids that are likely to come next.

The forward pass gives the logits after each of them, and the next id is drawn from each as if it were the only one.
Those drawn are the request's next ids, up to the first that is not the draft computed after it; K and V of the drafts
beyond it are overwritten. So drafts decide how many steps an answer takes and never what it says: greedy, or with
the random number that belongs to an output's place. Bit for bit that holds where a row's logits do not depend on
what shares the step (``ModelRunner.batch_invariant``), and only there this is on by default.

How many drafts a step takes follows from what it yields in a second. Chances of the drafts come from ``Acceptance``,
seconds from ``ServedTimes``; drafts are added, the likeliest first, as long as the ids to be expected grow faster than
the time. One request on a machine that waits for its weights gets all it may have; of many requests only the drafts
that are nearly certain are worth their arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker_proc.packing import Row
from worker_proc.speculation.acceptance import Acceptance
from worker_proc.speculation.lookup import PromptLookup
from worker_proc.speculation.step_times import ServedTimes, StepTimes

LEAST_CHANCE = 0.05
"""Drafts less likely than this are not looked at, even if they cost nothing."""
STEP_COST = 0.05
"""Times a step of decoding that one with drafts takes longer whatever their number: looking them up, and rows of
several ids in all processes that they pass. Gains below that are not worth the work."""


class Speculator:
    """Gives drafts to the rows of a step and learns from what was drawn.

    ``max_drafts``: most of a row. ``context_length``: positions that the model has.
    """

    def __init__(self, max_drafts: int, context_length: int, times: StepTimes) -> None:
        self.max_drafts = max_drafts
        self._context_length = context_length
        self._times = ServedTimes(times)
        self._acceptance = Acceptance(max_drafts)

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
            self.propose(row, room)
            if row.match and chances[row.match - 1][0] >= least:
                run = self._acceptance.run(row.match, room)
                found += [(chance, row) for chance in run if chance >= least]
        if not found:
            return
        found.sort(key=lambda each: -each[0])  # a row's own are in order: each is less likely than the one before
        likeliest = [chance for chance, _ in found]
        for _, row in found[: num_worthwhile(likeliest, num_tokens, num_rows, self._times)]:
            row.num_drafts += 1
            row.length += 1

    def learn(self, row: Row, drawn: Sequence[int]) -> None:
        """These ids came where ``row`` was in the step; not all of what was drawn if a request ended in between."""
        if row.match:
            self._acceptance.learn(row.match, row.proposal, drawn)

    def took(self, rows: Sequence[Row], seconds: float) -> None:
        """A step of these rows took so long. Those with prompts are not counted: they are of all sizes."""
        num_drafts = sum([row.num_drafts for row in rows])
        if rows and sum([row.length for row in rows]) == len(rows) + num_drafts:
            self._times.learn(seconds, len(rows), num_drafts)

    def _least_chance(self, num_tokens: int, num_rows: int) -> float:
        """What a draft must have, to yield as much in its time as the rows do in theirs."""
        return self._times.least_of_draft(num_tokens) * num_rows / self._times.at(num_rows)

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
    def propose(row: Row, count: int) -> None:
        """Look up ``count`` ids that may come after those that the row's request has by now."""
        slot = row.slot
        lookup = slot.lookup
        if lookup is None:
            lookup = slot.lookup = PromptLookup()
        lookup.extend(slot.ids.view()[len(lookup.ids) :].tolist())
        place, row.match = lookup.longest()
        if row.match:
            row.proposal = lookup.after(place, count)


def num_worthwhile(chances: Sequence[float], num_tokens: int, num_rows: int, times: ServedTimes) -> int:
    """How many drafts a step is to have: the number with the most expected yield per second.

    ``chances``: [n] descending. ``num_tokens`` and ``num_rows``: of the step without drafts; what it computes beside
    one token of each row that samples (prompts) is counted as the ids that decoding would yield in that time.
    """
    rows_s = times.at(num_rows)
    step_s, *with_drafts = times.with_drafts(num_tokens, len(chances))
    expected = num_rows * step_s / rows_s
    best, best_rate = 0, expected / step_s
    extra_s = STEP_COST * rows_s
    for number, (chance, seconds) in enumerate(zip(chances, with_drafts, strict=True), start=1):
        expected += chance
        rate = expected / (seconds + extra_s)
        if rate > best_rate:
            best, best_rate = number, rate
    return best

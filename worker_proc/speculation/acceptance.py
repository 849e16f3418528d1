"""How likely a draft is the id that is drawn, learned from what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from worker_proc.speculation.lookup import MAX_MATCH

PRIOR = (0.2, 0.5, 0.65, 0.75, 0.85, 0.9, 0.9, 0.9)
"""Chance of a draft before which 1, 2, ... ids agree. Of greedy answers of SmolLM2-135M to short prompts; other models
and texts soon give their own."""
PRIOR_WEIGHT = 16.0
"""Drafts that have to be seen before they count as much as ``PRIOR``."""
MEMORY = 512.0
"""Drafts that are remembered: older ones fade."""


class Acceptance:
    """The share of drafts that were drawn, by how many ids agreed before the first, and by their place after it.

    A proposal need not be computed to teach: the ids that are drawn show whether it would have been right.
    ``max_drafts``: most in a row.
    """

    def __init__(self, max_drafts: int) -> None:
        # One more id agrees before the second draft if the first was right. Still it is less likely than the first
        # draft after so many: of long agreements most are of texts that go round in circles.
        self.chances = [
            [PRIOR[min(match + place, MAX_MATCH - 1)] for place in range(max_drafts)] for match in range(MAX_MATCH)
        ]
        """[MAX_MATCH, max_drafts]: row m - 1 is for m ids that agree, column n for the draft after n right ones."""
        self._seen = [[PRIOR_WEIGHT] * max_drafts for _ in self.chances]
        self._right = [[chance * PRIOR_WEIGHT for chance in row] for row in self.chances]

    def run(self, match: int, count: int) -> list[float]:
        """Chance of each of ``count`` drafts in a row, that all before it are right and it is too."""
        return list(accumulate(self.chances[match - 1][:count], mul))

    def learn(self, match: int, proposal: Sequence[int], drawn: Sequence[int]) -> None:
        """After ``match`` ids that agreed, these were proposed and those came."""
        chances, seen, right = self.chances[match - 1], self._seen[match - 1], self._right[match - 1]
        for place, (draft, token) in enumerate(zip(proposal, drawn, strict=False)):
            seen[place] = seen[place] * (1 - 1 / MEMORY) + 1
            right[place] = right[place] * (1 - 1 / MEMORY) + (draft == token)
            chances[place] = right[place] / seen[place]
            if draft != token:
                return

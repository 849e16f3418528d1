"""Drafts from the request's own ids: where its last ids stood before, it may go on as it did then.

Prompt lookup decoding (Saxena 2023), which vLLM and SGLang call n-gram speculation. No second model and no weights:
answers quote their prompts, code repeats its names, a history of turns repeats everything.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_MATCH = 8
"""A longer agreement says no more, and is not looked for."""
MAX_PLACES = 8
"""Earlier places of the last two ids that are looked at, the latest first."""


class PromptLookup:
    """A request's ids, and for each pair of them where it stood before. Adding an id and looking are O(1)."""

    __slots__ = ("_earlier", "_last_one", "_last_pair", "_one_before", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._last_pair: dict[tuple[int, int], int] = {}
        """Pair of ids -> place of the second one, where the pair stands last."""
        self._earlier: list[int] = []
        """Per place: where the pair that ends there stood before; -1 for nowhere."""
        self._last_one: dict[int, int] = {}
        self._one_before = -1
        """Where the last id stood before."""

    def extend(self, ids: Iterable[int]) -> None:
        """The request has more ids."""
        pairs, ones, earlier, known = self._last_pair, self._last_one, self._earlier, self.ids
        before = known[-1] if known else -1
        for place, token in enumerate(ids, start=len(known)):
            pair = (before, token)
            earlier.append(pairs.get(pair, -1))
            pairs[pair] = place
            self._one_before = ones.get(token, -1)
            ones[token] = place
            known.append(token)
            before = token

    def after(self, place: int, count: int) -> list[int]:
        """The ``count`` >= 1 ids that came after ``place``; after the last one, what repeating itself would give."""
        known = self.ids
        drafts = known[place + 1 : place + 1 + count]
        period = len(known) - 1 - place
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def longest(self) -> tuple[int, int]:
        """Where the longest run of ids that is also the last one ended before, and its length up to ``MAX_MATCH``.

        (-1, 0) where the last id is new. Of several places as good the latest.
        """
        known = self.ids
        last = len(known) - 1
        if last < 1:
            return -1, 0
        best, best_match = (self._one_before, 1) if self._one_before >= 0 else (-1, 0)
        place = self._earlier[last]
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            match = 2
            while match < MAX_MATCH and match <= place and known[place - match] == known[last - match]:
                match += 1
            if match > best_match:
                best, best_match = place, match
                if match == MAX_MATCH:
                    break
            place = self._earlier[place]
        return best, best_match

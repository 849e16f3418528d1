"""Finds stop strings in text that arrives in pieces.

Each stop string is followed by the automaton of Knuth, Morris and Pratt (1977), so a character costs the same
however often beginnings of stop strings occur, and how a text is cut into pieces makes no
difference. The stop string that is complete first wins; of several complete at the same character,
the longest (it began first).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A complete stop string; it ends behind character ``end`` of the piece it was found in."""

    stop: str
    end: int


def _failures(stop: str) -> list[int]:
    """For each prefix of ``stop``: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        length += stop[at] == stop[length]
        table[at] = length
    return table


class StopMatcher:
    """The state of one request. ``held`` characters at the end of the text may begin a stop string."""

    __slots__ = ("_failures", "_first", "_states", "_stops", "held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._failures = [_failures(stop) for stop in self._stops]
        self._first = re.compile("[" + re.escape("".join(stop[0] for stop in self._stops)) + "]")
        self._states = [0] * len(self._stops)
        self.held = 0

    def feed(self, text: str) -> StopMatch | None:
        """The next piece. After a match the matcher is not used any more."""
        at = 0
        while at < len(text):
            if not self.held:
                begin = self._first.search(text, at)
                if begin is None:
                    return None
                at = begin.start()
            match = self._step(text[at])
            at += 1
            if match is not None:
                return StopMatch(match, at)
        return None

    def _step(self, char: str) -> str | None:
        found: str | None = None
        longest = 0
        for n, stop in enumerate(self._stops):
            state, failures = self._states[n], self._failures[n]
            while state and stop[state] != char:
                state = failures[state - 1]
            if stop[state] == char:
                state += 1
                if state == len(stop):
                    if found is None or len(stop) > len(found):
                        found = stop
                    state = failures[state - 1]
            self._states[n] = state
            longest = max(longest, state)
        self.held = longest
        return found

    def peek(self, text: str) -> StopMatch | None:
        """What ``feed`` would find; the state is left as it is."""
        states, held = self._states.copy(), self.held
        match = self.feed(text)
        self._states, self.held = states, held
        return match

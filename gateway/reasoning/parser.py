"""Splits a model's text into reasoning and content, whatever pieces it arrives in.

    <think>            white space around the reasoning belongs to neither
    The user asks ...
    </think>

    The answer.

The marks, white space next to them, and what may yet turn out to be either are held back; ``flush``
releases what was not. So the joined pieces are the same for every split of the same text.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Split(NamedTuple):
    """New text of each kind; either may be empty."""

    reasoning: str = ""
    content: str = ""


class _Place(Enum):
    BEFORE = 0
    """Nothing but white space so far, and perhaps the beginning of the opening mark."""
    THINKING = 1
    BETWEEN = 2
    """Behind the closing mark; line ends are dropped."""
    CONTENT = 3


class ReasoningParser:
    """One choice of a response; not reusable after ``flush``.

    ``starts_inside``: the prompt ended with the opening mark, so the output begins with reasoning
    (a mark that the model writes nevertheless is dropped). Otherwise there is reasoning only if the
    output begins with the mark; one further on is text.
    """

    def __init__(self, opening: str = "<think>", closing: str = "</think>", *, starts_inside: bool = False) -> None:
        self._opening = opening
        self._closing = closing
        self._starts_inside = starts_inside
        self._place = _Place.BEFORE
        self._held = ""
        self._begun = False
        """Reasoning other than white space has been seen."""
        self._num_chars = 0
        """Characters fed."""
        self._end: int | None = None

    @property
    def in_reasoning(self) -> bool:
        """The next text is reasoning, as far as is known: for counting reasoning tokens."""
        return self._place is _Place.THINKING or (self._place is _Place.BEFORE and self._starts_inside)

    @property
    def span(self) -> tuple[int, int | None] | None:
        """Where the block is in the text, in characters, with its marks; no end while it is open. None: there is none,
        as far as is known."""
        if self._end is not None:
            return 0, self._end
        return (0, None) if self.in_reasoning else None

    def feed(self, text: str) -> Split:
        """The next piece of the model's text; what is certain of it and of what was held."""
        self._num_chars += len(text)
        if self._place is _Place.CONTENT:
            return Split(content=text)
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._place is _Place.BEFORE:
            text = self._before(text)
        if self._place is _Place.THINKING:
            reasoning, text = self._thinking(text)
        if self._place is _Place.BETWEEN:
            text = text.lstrip("\r\n")
            if text:
                self._place = _Place.CONTENT
        return Split(reasoning, text)

    def flush(self) -> Split:
        """The text is over: what was held back and is no mark."""
        held, self._held = self._held, ""
        if not held:
            return Split()
        return Split(reasoning=held) if self.in_reasoning else Split(content=held)

    def _before(self, text: str) -> str:
        """Settle how the output begins; what remains belongs to the next place."""
        bare = text.lstrip()
        if len(bare) < len(self._opening) and self._opening.startswith(bare):
            self._held = text
            return ""
        if bare.startswith(self._opening):
            self._place = _Place.THINKING
            return bare[len(self._opening) :]
        self._place = _Place.THINKING if self._starts_inside else _Place.CONTENT
        return text

    def _thinking(self, text: str) -> tuple[str, str]:
        """(certain reasoning, text behind the closing mark); the rest is held."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        at = text.find(self._closing)
        if at >= 0:
            self._place = _Place.BETWEEN
            rest = text[at + len(self._closing) :]
            self._end = self._num_chars - len(rest)
            return text[:at].rstrip(), rest
        end = len(text) - _overlap(text, self._closing)
        end = len(text[:end].rstrip())
        self._held = text[end:]
        return text[:end], ""


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``mark``."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

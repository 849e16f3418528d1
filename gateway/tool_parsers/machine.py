"""What the families' parsers are written with: a reader that suspends where its text ends.

A parser is one generator, ``_read``, written as if the whole text were there. Where it needs a
character that has not arrived it yields, and ``feed`` goes on there: so no decision depends on how
the text was split. Nothing is taken back once it is an event; an attempt at a call that turns out
to be none becomes text up to where it failed, so the work is linear in the text.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from gateway.tool_parsers.base import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    ToolParser,
)
from gateway.tool_parsers.json_scan import JsonScanner

T = TypeVar("T")
Reader = Generator[None, None, T]
"""A computation that may wait for text."""

MAX_NAME_LEN = 256
_SPACE = " \t\r\n"


class ReaderParser(ToolParser):
    """Base of the families: the text, a cursor in it, and reading primitives."""

    def __init__(
        self, tools: Sequence[dict[str, Any]] = (), *, new_id: Callable[[], str] | None = None
    ) -> None:
        super().__init__(tools, new_id=new_id)
        self._text = ""
        self._at = 0
        self._num_dropped = 0
        """Characters that were in front of ``_text``."""
        self._attempt: int | None = None
        """Start of what becomes text if the attempt at a call fails."""
        self._over = False
        self._events: list[Event] = []
        self._held = ""
        """White space at the beginning or after a call: text if text follows, dropped if a call does."""
        self._quiet = True
        self._program = self._read()
        self._functions = {name: tool["function"] for tool in tools if (name := _function_name(tool))}

    @abstractmethod
    def _read(self) -> Reader[None]:
        """The family's syntax."""

    def feed(self, text: str) -> list[Event]:
        """See the base."""
        self._text += text
        return self._go_on()

    def flush(self) -> list[Event]:
        """See the base."""
        self._over = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._program, None)
        done = self._at if self._attempt is None else self._attempt
        self._text, self._at, self._num_dropped = self._text[done:], self._at - done, self._num_dropped + done
        if self._attempt is not None:
            self._attempt = 0
        if self._over:
            self._emit_text(self._text)
            self._text, self._at = "", 0
            if self._held and self.num_calls == 0:
                self._events.append(TextDelta(self._held))  # all there is
                self._held = ""
        events, self._events = self._events, []
        return events

    # ----------------------------------------------------------------- writing

    def _emit_text(self, text: str) -> None:
        if self._quiet:
            stripped = text.lstrip(_SPACE)
            self._held += text[: len(text) - len(stripped)]
            if not stripped:
                return
            text, self._held, self._quiet = self._held + stripped, "", False
        if text:
            self._events.append(TextDelta(text))

    def _emit_call(self, name: str, call_id: str | None = None) -> int:
        """Begin a call; its index. What the attempt has read is no text any more."""
        self._attempt, self._held, self._quiet = None, "", True
        start = self._start(name)
        if call_id:
            start = ToolCallStart(start.index, call_id, name)
        self._events.append(start)
        return start.index

    def _emit_arguments(self, index: int, text: str) -> None:
        if text:
            self._events.append(ToolArgumentsDelta(index, text))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def _begin_attempt(self, mark: str) -> None:
        """From the mark just read on, text is held back until ``_emit_call`` or ``_give_up``."""
        self._attempt = self._at - len(mark)

    def _give_up(self) -> None:
        """No call: what was read since the mark is text."""
        if self._attempt is not None:
            self._emit_text(self._text[self._attempt : self._at])
            self._attempt = None

    # ----------------------------------------------------------------- reading

    @property
    def _place(self) -> int:
        """The cursor in the whole text, in characters."""
        return self._num_dropped + self._at

    def _more(self) -> Reader[bool]:
        """Wait for more text; False at the end."""
        if self._over:
            return False
        yield
        return True

    def _peek(self) -> Reader[str]:
        """The next character, not read; empty at the end."""
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _skip_space(self) -> Reader[None]:
        while (yield from self._peek()) in tuple(_SPACE):
            self._at += 1

    def _closing(self, *marks: str) -> Reader[str]:
        """After a call: one of ``marks``, white space before it dropped. Space before anything else is text."""
        space = ""
        while (char := (yield from self._peek())) in tuple(_SPACE):
            space += char
            self._at += 1
        found = yield from self._accept(*marks)
        if not found:
            self._emit_text(space)
        return found

    def _accept(self, *marks: str) -> Reader[str]:
        """Read the longest of ``marks`` that comes next; empty when none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, marks))]
            longer = any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks)
            if longer and (yield from self._more()):
                continue
            found = max((mark for mark in marks if rest.startswith(mark)), key=len, default="")
            self._at += len(found)
            return found

    def _until(self, marks: Sequence[str], write: Callable[[str], None]) -> Reader[str]:
        """Pass text to ``write`` up to the first of ``marks``, read that, return it; empty at the end."""
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        while True:
            found = pattern.search(self._text, self._at)
            if found:
                write(self._text[self._at : found.start()])
                self._at = found.end()
                return found.group()
            keep = 0 if self._over else _beginning_of(self._text[self._at :], marks)
            write(self._text[self._at : len(self._text) - keep])
            self._at = len(self._text) - keep
            if not (yield from self._more()):
                return ""

    def _name_until(self, *ends: str) -> Reader[str | None]:
        """A short text up to one of ``ends``, which is read too. None: too long, or the end of the text."""
        while True:
            start = self._at  # waiting moves the text, but not what the cursor points at
            places = [place for end in ends if (place := self._text.find(end, start)) >= 0]
            place = min(places, default=len(self._text))
            if place - start > MAX_NAME_LEN:
                self._at = start + MAX_NAME_LEN
                return None
            if places:
                self._at = place + max(len(end) for end in ends if self._text.startswith(end, place))
                return self._text[start:place]
            if not (yield from self._more()):
                self._at = len(self._text)
                return None

    def _value(self) -> Reader[str | None]:
        """One JSON value as text; None when it is malformed or cut off."""
        pieces: list[str] = []
        scanner = JsonScanner()
        while True:
            piece, self._at = scanner.feed(self._text, self._at)
            pieces.append(piece)
            if scanner.status != "open":
                return "".join(pieces).strip(_SPACE) if scanner.status == "done" else None
            if not (yield from self._more()):
                return None

    def _string(self) -> Reader[str | None]:
        """A JSON string, decoded."""
        if (yield from self._peek()) != '"':
            return None
        text = yield from self._value()
        return None if text is None else str(json.loads(text))

    def _arguments(self, index: int) -> Reader[bool]:
        """Stream a JSON object as the arguments of call ``index``; False when it is malformed or cut off."""
        yield from self._skip_space()
        if (yield from self._peek()) != "{":
            return (yield from self._odd_arguments(index))
        scanner = JsonScanner()
        while True:
            piece, self._at = scanner.feed(self._text, self._at)
            self._emit_arguments(index, piece)
            if scanner.status != "open":
                return scanner.status == "done"
            if not (yield from self._more()):
                return False

    def _odd_arguments(self, index: int) -> Reader[bool]:
        """Arguments that are no object: null is none, and a string is an object encoded once more."""
        text = yield from self._value()
        if text is None:
            return False
        value = json.loads(text)
        self._emit_arguments(index, value if isinstance(value, str) and _is_object(value) else "{}")
        return True

    def knows(self, name: str) -> bool:
        """Whether the request has a function of that name; without tools any will do."""
        return name in self._functions or not self._functions


def _function_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _beginning_of(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which one of ``marks`` begins, shorter than that mark."""
    most = min(len(text), max(map(len, marks)) - 1)
    for size in range(most, 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0

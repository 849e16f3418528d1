"""Calls in Python's syntax: Llama 3.2 (1B, 3B) and Llama 4, after Meta's prompt format.

    [get_weather(city='Paris', days=3), get_time(zone="CET")]

Llama 4 may put ``<|python_start|>`` and ``<|python_end|>`` around the list.
"""

from __future__ import annotations

import json
import re

from gateway.tool_parsers.machine import Reader, ReaderParser
from gateway.tool_parsers.schema_types import python_value

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}
_ENDS = ("<|python_end|>", "<|eom_id|>", "<|eot_id|>", "<|eot|>")


class PythonicParser(ReaderParser):
    """A list of calls at the beginning of a line; any other ``[`` is text."""

    name = "pythonic"
    needs_special_tokens = True

    def _read(self) -> Reader[None]:
        yield from self._skip_space()
        at_line_start = True
        while True:
            mark = (yield from self._accept("[", "<|python_start|>")) if at_line_start else ""
            if not mark:
                mark = yield from self._until(["\n", "<|python_start|>", *_ENDS], self._emit_text)
                if not mark:
                    return
            at_line_start = mark == "\n"
            if mark in ("[", "<|python_start|>"):
                yield from self._attempt_at(mark)
            elif mark == "\n":
                self._emit_text(mark)

    def _attempt_at(self, mark: str) -> Reader[None]:
        self._begin_attempt(mark)
        if mark != "[":
            yield from self._skip_space()
            if not (yield from self._accept("[")):
                self._give_up()
                return
        calls = self.num_calls
        while True:
            yield from self._skip_space()
            name = yield from self._name_until("(", "\n", ",", "]")
            if name is not None and self._text[self._at - 1] != "(":
                self._at -= 1
                break
            name = name.strip() if name else ""
            if not _NAME.fullmatch(name) or not self.knows(name):
                break
            if not (yield from self._call(name)):
                return
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                break
        if self.num_calls == calls:
            self._give_up()
            return
        if (yield from self._closing("]")):
            yield from self._closing("<|python_end|>")

    def _call(self, name: str) -> Reader[bool]:
        """Arguments of one call, its ``(`` read; False when it is malformed or cut off."""
        index = self._emit_call(name)
        first = True
        while True:
            yield from self._skip_space()
            if (yield from self._accept(")")):
                self._emit_arguments(index, "{}" if first else "}")
                return True
            key = yield from self._name_until("=", ")")
            key = key.strip() if key else ""
            if not _NAME.fullmatch(key) or self._text[self._at - 1] == ")":
                return False
            raw = yield from self._expression()
            if raw is None:
                return False
            head = ("{" if first else ", ") + json.dumps(key) + ": "
            self._emit_arguments(index, head + _json_of(raw.strip()))
            first = False
            yield from self._accept(",")

    def _expression(self) -> Reader[str | None]:
        """Text up to the ``,`` or ``)`` that ends a value, which is not read; None when cut off."""
        pieces: list[str] = []
        closers: list[str] = []
        quote = ""
        while char := (yield from self._peek()):
            if quote:
                if char == "\\":
                    pieces.append(char)
                    self._at += 1
                    char = yield from self._peek()
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif char in _PAIRS:
                closers.append(_PAIRS[char])
            elif closers and char == closers[-1]:
                closers.pop()
            elif not closers and char in ",)":
                return "".join(pieces)
            pieces.append(char)
            self._at += 1
        return None


def _json_of(raw: str) -> str:
    """JSON text of a Python literal; of one that is none, its text as a string."""
    if raw in _JSON_WORDS:
        return _JSON_WORDS[raw]
    value = python_value(raw)
    if value is None:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            value = raw
    return json.dumps(value, ensure_ascii=False)

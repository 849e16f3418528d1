"""An incremental reader of one JSON value, and its text made strictly valid on the way.

Two slips that models make are mended, as they have one meaning only: a raw control character in a
string is escaped, and a backslash before a character that needs none is dropped or doubled.
"""

from __future__ import annotations

import re
from typing import Literal

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_VALID_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}

Status = Literal["open", "done", "error"]
_Expect = Literal["value", "value_or_end", "key", "key_or_end", "colon", "comma_or_end", "nothing"]


class JsonScanner:
    """Reads one value. ``status`` is ``open`` until its last character, then ``done``, or ``error``."""

    def __init__(self) -> None:
        self.status: Status = "open"
        self._expect: _Expect = "value"
        self._stack: list[str] = []
        self._in_string = False
        self._escape = ""
        """What of an escape sequence has been read, its backslash included."""
        self._scalar = ""
        self._out: list[str] = []

    @property
    def in_string(self) -> bool:
        """The next character belongs to a string."""
        return self._in_string and self.status == "open"

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """Read ``text[at:]``; (valid JSON text it gave, position of the first character not read)."""
        self._out = []
        while at < len(text) and self.status == "open":
            if self._escape:
                at = self._read_escape(text, at)
            elif self._in_string:
                at = self._read_string(text, at)
            elif self._scalar or _SCALAR.match(text[at]):
                at = self._read_scalar(text, at)
            elif space := _SPACE.match(text, at):
                self._out.append(space.group())
                at = space.end()
            else:
                at = self._read_mark(text, at)
        return "".join(self._out), at

    def _fail(self, at: int) -> int:
        self.status = "error"
        return at

    def _read_string(self, text: str, at: int) -> int:
        if plain := _PLAIN.match(text, at):
            self._out.append(plain.group())
            return plain.end()
        char = text[at]
        if char == "\\":
            self._escape = char
        elif char == '"':
            self._out.append(char)
            self._in_string = False
            if self._expect == "key":
                self._expect = "colon"
            else:
                self._value_is_over()
        else:
            self._out.append(_CONTROL.get(char, f"\\u{ord(char):04x}"))
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        char = text[at]
        if len(self._escape) == 1:
            if char == "u":
                self._escape += char
                return at + 1
            if char in '"\\/bfnrt':
                self._out.append("\\" + char)
            elif char == "'":
                self._out.append(char)
            else:
                self._out.append("\\\\")
                self._escape = ""
                return at  # the character itself is read again, as a plain one
            self._escape = ""
            return at + 1
        if char not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._escape += char
        if len(self._escape) == 6:
            self._out.append(self._escape)
            self._escape = ""
        return at + 1

    def _read_scalar(self, text: str, at: int) -> int:
        if self._expect not in ("value", "value_or_end"):
            return self._fail(at)
        if more := _SCALAR.match(text, at):
            self._scalar += more.group()
            at = more.end()
            if at == len(text) or len(self._scalar) > 400:
                return self._fail(at) if len(self._scalar) > 400 else at
        if not _VALID_SCALAR.fullmatch(self._scalar):
            return self._fail(at)
        self._out.append(self._scalar)
        self._scalar = ""
        self._value_is_over()
        return at

    def _read_mark(self, text: str, at: int) -> int:
        char, expect = text[at], self._expect
        wants_value = expect in ("value", "value_or_end")
        if char == '"' and (wants_value or expect in ("key", "key_or_end")):
            self._in_string = True
            self._expect = "value" if wants_value else "key"
        elif char in "{[" and wants_value:
            self._stack.append(char)
            self._expect = "key_or_end" if char == "{" else "value_or_end"
        elif char == ":" and expect == "colon":
            self._expect = "value"
        elif char == "," and expect == "comma_or_end":
            self._expect = "key" if self._stack[-1] == "{" else "value"
        elif (char == "}" and expect in ("key_or_end", "comma_or_end") and self._stack[-1] == "{") or (
            char == "]" and expect in ("value_or_end", "comma_or_end") and self._stack[-1] == "["
        ):
            self._stack.pop()
            self._out.append(char)
            self._value_is_over()
            return at + 1
        else:
            return self._fail(at)
        self._out.append(char)
        return at + 1

    def _value_is_over(self) -> None:
        if self._stack:
            self._expect = "comma_or_end"
        else:
            self._expect = "nothing"
            self.status = "done"

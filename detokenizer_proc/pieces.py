"""SentencePiece-style tokenizers: pieces with marks for blanks, and tokens that are single bytes."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Any

REPLACEMENT = "\ufffd"

_Rule = Callable[[str, bool], str]
"""(piece, it is the first of the text) -> piece."""


class PieceRules:
    """What a decoder of this family does with pieces, in order."""

    def __init__(self) -> None:
        self.before: list[_Rule] = []
        """On tokens, before byte tokens are put together."""
        self.after: list[_Rule] = []
        """On what comes out of that: pieces and runs of bytes."""
        self.byte_fallback = False
        self.strip_char = " "
        self.strip_len = 0
        """How many ``strip_char`` at most are dropped at the beginning of the whole text."""


def piece_rules(spec: Any) -> PieceRules | None:
    """The rules of a decoder; None when it does something else."""
    if spec is None:
        return None
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    rules, fused = PieceRules(), False
    for part in parts:
        kind = part["type"]
        if kind == "Strip" and fused and not rules.strip_len and not part["stop"]:
            rules.strip_char, rules.strip_len = part["content"], part["start"]
        elif fused:
            return None
        elif kind == "ByteFallback" and not rules.byte_fallback:
            rules.byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and "String" in part["pattern"]:
            (rules.after if rules.byte_fallback else rules.before).append(
                _replace(part["pattern"]["String"], part["content"])
            )
        elif kind == "Metaspace":
            drops = part.get("prepend_scheme", "always") != "never"
            (rules.after if rules.byte_fallback else rules.before).append(_metaspace(part["replacement"], drops))
        else:
            return None
    return rules


def _replace(old: str, new: str) -> _Rule:
    return lambda piece, first: piece.replace(old, new)


def _metaspace(mark: str, drops_first: bool) -> _Rule:
    return lambda piece, first: piece.replace(mark, "" if first and drops_first else " ")


def _byte_value(piece: str) -> int | None:
    """The byte of a token ``<0xE2>``; None for any other."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


class PieceTable(dict[int, str | int | None]):
    """id -> its text behind the first of a request, or the value of a byte token, or None: no token."""

    def __init__(self, token: Callable[[int], str | None], rules: PieceRules) -> None:
        super().__init__()
        self.rules = rules
        self._token = token

    def __missing__(self, token_id: int) -> str | int | None:
        entry = self.entry(token_id, first=False)
        self[token_id] = entry
        return entry

    def entry(self, token_id: int, first: bool) -> str | int | None:
        """As the table's entries, for any place in the text."""
        piece = self._token(token_id)
        if piece is None:
            return None
        for rule in self.rules.before:
            piece = rule(piece, first)
        if self.rules.byte_fallback and (value := _byte_value(piece)) is not None:
            return value
        return self.after(piece, first)

    def after(self, piece: str, first: bool) -> str:
        """The rules that follow the byte tokens."""
        for rule in self.rules.after:
            piece = rule(piece, first)
        return piece

    def alone(self, token_id: int) -> bytes:
        """The bytes of one token behind others."""
        entry = self[token_id]
        return bytes([entry]) if isinstance(entry, int) else (entry or "").encode()


class PieceDecoder:
    """Decoder of the SentencePiece family."""

    __slots__ = ("_first", "_run", "_skipped", "_strip", "_table")

    def __init__(self, table: PieceTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._first = True
        self._strip = table.rules.strip_len
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        """See :class:`IncrementalDecoder`."""
        if token_id in self._skipped:
            return ""
        begins = self._first and not self._run
        entry = self._table.entry(token_id, first=True) if begins else self._table[token_id]
        if entry is None:
            return ""
        if isinstance(entry, int):
            self._run.append(entry)
            return ""
        text = self.flush() if self._run else ""
        self._first = False
        return text + self._lead(entry)

    def _lead(self, text: str) -> str:
        """Drop the blanks that the beginning of the whole text loses."""
        while self._strip and text:
            if text[0] != self._table.rules.strip_char:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text

    @property
    def holding(self) -> bool:
        """A run of byte tokens waits for its end."""
        return bool(self._run)

    @property
    def held_len(self) -> int:
        """Characters of the run; its last bytes may begin another one."""
        if not self._run:
            return 0
        text, _ = utf_8_decode(self._run, "replace", False)
        return len(self._whole(text))

    def pending(self) -> str:
        """The run, if its bytes are whole characters."""
        try:
            return self._whole(self._run.decode())
        except UnicodeDecodeError:
            return ""

    def _whole(self, text: str) -> str:
        """A run's characters as they come out; nothing is settled by it."""
        strip = self._strip
        lead = self._lead(self._table.after(text, self._first))
        self._strip = strip
        return lead

    def flush(self) -> str:
        """The run; if its bytes are not whole characters, U+FFFD for every byte, as the tokenizers library does."""
        if not self._run:
            return ""
        first, self._first = self._first, False
        try:
            elements = [self._run.decode()]
        except UnicodeDecodeError:
            elements = [REPLACEMENT] * len(self._run)
        self._run.clear()
        return "".join(self._lead(self._table.after(e, first and n == 0)) for n, e in enumerate(elements))

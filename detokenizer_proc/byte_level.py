"""Byte-level BPE: the bytes of each token, and their UTF-8 text one id at a time."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Any


def is_byte_level(spec: Any) -> bool:
    if spec is None:
        return False
    if spec["type"] == "Sequence":
        inner = [part["type"] for part in spec["decoders"]]
        return inner in (["ByteLevel"], ["ByteLevel", "Fuse"])
    return bool(spec["type"] == "ByteLevel")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


class ByteTable(dict[int, tuple[str | None, bytes]]):
    """id -> (its text, if its bytes are whole characters; its bytes), filled as ids are met."""

    def __init__(self, token: Callable[[int], str | None]) -> None:
        super().__init__()
        self._token = token
        self._byte_of_char = _byte_of_char()

    def __missing__(self, token_id: int) -> tuple[str | None, bytes]:
        token = self._token(token_id) or ""
        try:
            data = bytes([self._byte_of_char[char] for char in token])
        except KeyError:
            data = token.encode()  # an added token, kept in plain text
        try:
            entry: tuple[str | None, bytes] = (data.decode(), data)
        except UnicodeDecodeError:
            entry = (None, data)
        self[token_id] = entry
        return entry


class ByteLevelDecoder:
    """Decoder of byte-level BPE."""

    __slots__ = ("_skipped", "_table", "_tail")

    def __init__(self, table: ByteTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._tail = b""

    def push(self, token_id: int) -> str:
        """See :class:`IncrementalDecoder`."""
        if token_id in self._skipped:
            return ""
        text, data = self._table[token_id]
        if text is not None and not self._tail:
            return text
        data = self._tail + data
        text, used = utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    @property
    def holding(self) -> bool:
        """The beginning of a character waits for the rest."""
        return bool(self._tail)

    @property
    def held_len(self) -> int:
        """Less than a character is held."""
        return 0

    def pending(self) -> str:
        """A broken character is not text."""
        return ""

    def flush(self) -> str:
        """A character that was never finished, as U+FFFD."""
        text, self._tail = self._tail.decode("utf-8", "replace"), b""
        return text

"""Token ids to text, one id at a time, equal to decoding all of them at once.

A tokenizer.json names its decoder. The two families that language models use are followed exactly,
from a token's own bytes or piece and a little state:

``ByteLevelDecoder``  byte-level BPE (GPT-2 and nearly everything since): tokens are bytes, text is their
                      UTF-8; the beginning of a character waits for the rest.
``PieceDecoder``      SentencePiece style: tokens are pieces with ``▁`` for a blank, the first blank of
                      the text may be dropped, and characters outside the vocabulary come as byte
                      tokens ``<0xE2>``. A run of byte tokens is text as a whole or not at all, so
                      it waits for its end.
``WindowDecoder``     any other decoder: the tokenizer decodes a short window again for each id, as text
                      generation servers have always done; what ends in U+FFFD waits.

Text that was returned is never taken back. Only generated ids are decoded, so nothing of the prompt can
appear.
"""

from __future__ import annotations

import json
from typing import Protocol

from tokenizers import Tokenizer

from detokenizer_proc.byte_level import ByteLevelDecoder, ByteTable, is_byte_level
from detokenizer_proc.pieces import REPLACEMENT, PieceDecoder, PieceTable, piece_rules


class IncrementalDecoder(Protocol):
    """The text of one request. Special tokens are skipped or shown, as the request asked."""

    def push(self, token_id: int) -> str:
        """Text that is certain with this id; often empty, never half a character."""
        ...

    @property
    def holding(self) -> bool:
        """Some of the ids' text is still held back."""
        ...

    @property
    def held_len(self) -> int:
        """Whole characters among what is held back."""
        ...

    def pending(self) -> str:
        """The text held back, if it is whole as it stands; empty when it is not."""
        ...

    def flush(self) -> str:
        """The output is over: what was held back, broken characters as U+FFFD."""
        ...


class Vocabulary:
    """What the decoders need of one tokenizer; shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        spec = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
        self._bytes: ByteTable | None = None
        self._pieces: PieceTable | None = None
        if is_byte_level(spec):
            self._bytes = ByteTable(self.token)
        elif (rules := piece_rules(spec)) is not None:
            self._pieces = PieceTable(self.token, rules)
        self._shown: dict[int, tuple[str, bytes]] = {}

    def token(self, token_id: int) -> str | None:
        """The token's text in the vocabulary; None for an id without a token (padding rows)."""
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        """A fresh decoder for one request."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if self._bytes is not None:
            return ByteLevelDecoder(self._bytes, skipped)
        if self._pieces is not None:
            return PieceDecoder(self._pieces, skipped)
        return WindowDecoder(self._tokenizer, skipped)

    def show(self, token_id: int) -> tuple[str, bytes]:
        """One token on its own, for log-probabilities: (text, its bytes). Special tokens are shown."""
        shown = self._shown.get(token_id)
        if shown is None:
            if self._bytes is not None:
                data = self._bytes[token_id][1]
                shown = data.decode("utf-8", "replace"), data
            elif self._pieces is not None:
                data = self._pieces.alone(token_id)
                shown = data.decode("utf-8", "replace"), data
            else:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
                shown = text, text.encode()
            self._shown[token_id] = shown
        return shown


class WindowDecoder:
    """Decodes the last few ids again for each new one, and takes what the text grew by."""

    _CONTEXT = 6
    """Ids in front of the new ones, so that the decoder sees what they follow."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []
        self._start = 0
        self._read = 0

    def _grown(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read], skip_special_tokens=False)
        now = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=False)
        return now[len(before) :]

    def push(self, token_id: int) -> str:
        """See :class:`IncrementalDecoder`."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._grown()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._read = len(self._ids)
        self._start = max(self._start, self._read - self._CONTEXT)
        return text

    @property
    def holding(self) -> bool:
        """Ids were taken in whose text is not certain."""
        return self._read < len(self._ids)

    @property
    def held_len(self) -> int:
        """What a window's last characters will be is not known before."""
        return 0

    def pending(self) -> str:
        """Text that ends in U+FFFD is not whole."""
        return ""

    def flush(self) -> str:
        """What the last ids give as they stand."""
        text = self._grown() if self.holding else ""
        self._read = len(self._ids)
        return text

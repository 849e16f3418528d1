"""Text to token ids and back, with control tokens told from text that spells them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from common.errors import ConfigError
from tokenizer_proc.control_tokens import ControlTokens, secret_text

_BRIEF = 4000
"""Characters or ids up to which a call is over within a millisecond or so."""


class TextEncoder:
    """A tokenizer.json and, for guarded text, its twin without control tokens.

    Safe to use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, bos_token: str | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = {
            token_id: token for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.control = ControlTokens([token.content for token in self._special.values()])
        self.num_tokens: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bos = bos_token
        self._bos_id: int | None = tokenizer.token_to_id(bos_token) if bos_token else None
        self._adds_bos = self._bos_id is not None and self._leads_with_bos()
        self._keeps_bytes = tokenizer.normalizer is None and type(tokenizer.decoder).__name__ == "ByteLevel"
        self._longest = 0
        self._lock = threading.Lock()
        self._literal: Tokenizer | None = None
        self._aliases: dict[str, str] = {}
        self._alias_ids: dict[int, int] = {}
        self._cut = secret_text()
        self._cut_id: int | None = None

    @classmethod
    def from_folder(cls, folder: Path, bos_token: str | None = None) -> TextEncoder:
        """Load ``folder/tokenizer.json``. Raises ``ConfigError`` when it cannot be used."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(f"{path} cannot be loaded: {error}") from None
        return cls(tokenizer, bos_token)

    def _leads_with_bos(self) -> bool:
        return self._tokenizer.encode("a").ids[:1] == [self._bos_id] != self.encode_rendered("a")[:1]

    def token_id(self, text: str) -> int | None:
        """The id of a token given by its text."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def special_texts(self) -> list[str]:
        """The control tokens' texts."""
        return [token.content for token in self._special.values()]

    def added_ids(self) -> dict[str, int]:
        """The tokens added to the vocabulary, control tokens and others: text -> id."""
        return {token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at the least; 0 where it cannot be told without encoding.

        Byte-level tokenizers keep every byte, so the longest token gives a bound; encoding megabytes only
        to find that they do not fit would take seconds.
        """
        if not self._keeps_bytes:
            return 0
        with self._lock:
            if not self._longest:
                self._longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))
        # An added token's length is in characters, which have at most four bytes.
        return -(-len(text.encode("utf-8", "replace")) // (4 * self._longest))

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A plain completions prompt: control tokens spelled in it are honoured.

        What the tokenizer adds (BOS) is added, unless the text itself begins with BOS: a prompt that
        a client rendered on its own does not get a second one.
        """
        ids = _ids(self._tokenizer, text, add_special_tokens)
        if (
            add_special_tokens
            and self._adds_bos
            and self._bos
            and text.startswith(self._bos)
            and len(ids) > 1
            and ids[0] == ids[1] == self._bos_id
        ):
            del ids[0]
        return ids

    def encode_rendered(self, rendered: str, guarded: bool = False) -> list[int]:
        """A rendered chat: nothing is added, as the template wrote its own BOS.

        ``guarded``: marks of :class:`ControlTokens` are in it; what they guard becomes plain text.
        """
        if not guarded:
            return _ids(self._tokenizer, rendered)
        literal = self._literal_twin()
        text = self.control.with_aliases(rendered, self._aliases)
        ids = _ids(literal, text)
        if not self._special.keys().isdisjoint(ids):
            # Some models (Unigram) hold control tokens as pieces and find them in plain text: part it there.
            text = self.control.with_aliases(rendered, self._aliases, self._cut)
            ids = _ids(literal, text)
        alias_ids, cut_id = self._alias_ids, self._cut_id
        return [alias_ids.get(i, i) for i in ids if i != cut_id]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; ids without a token give nothing."""
        if len(ids) <= _BRIEF:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        texts: list[str] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def to_str(self) -> str:
        """The tokenizer.json as text."""
        text: str = self._tokenizer.to_str()
        return text

    def _literal_twin(self) -> Tokenizer:
        """The tokenizer that reads control tokens as text, made when first needed (it takes a while)."""
        with self._lock:
            if self._literal is None:
                literal = Tokenizer.from_str(self._tokenizer.to_str())
                literal.encode_special_tokens = True
                # The same splitting flags, so that the text around a token is cut as it always is.
                for token_id, token in self._special.items():
                    alias = secret_text()
                    twin = AddedToken(
                        alias,
                        special=False,
                        normalized=False,
                        single_word=False,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                    )
                    literal.add_tokens([twin])
                    self._aliases[token.content] = alias
                    alias_id = literal.token_to_id(alias)
                    assert alias_id is not None  # just added
                    self._alias_ids[alias_id] = token_id
                literal.add_tokens([AddedToken(self._cut, special=False, normalized=False)])
                self._cut_id = literal.token_to_id(self._cut)
                self._literal = literal
            return self._literal


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text. Only the batch calls release the GIL: with ``encode`` a long text stops every thread."""
    if len(text) <= _BRIEF:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids

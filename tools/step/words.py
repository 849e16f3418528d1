"""Text to ids and back, for the screen."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError
from tools.simulate.worker import EOS, FIRST_ID

_WORDS = (  # noqa: SIM905 (a list of these would fill a page)
    "the a of and to in is it that was for on are as with they at be this from have or by one had not but all were "
    "when we there can which said if do will each about up out them then many some so these would into has more two "
    "see time make than first been who now people over did down only way find water long little very after words "
    "river mountain city planet bread music winter garden ocean letter king forest engine paper cloud bridge lamp "
    "stone bird window road market sister story silver island morning evening shadow harbor village signal copper "
    "runs sleeps turns falls opens grows waits sings moves carries holds keeps finds gives reads writes learns asks "
    "answers bright quiet old young green heavy simple narrow distant gentle sudden warm cold broken hidden early late"
).split()


class Words(Protocol):
    """What the screen needs of a tokenizer."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, at least one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, for people: ends are shown."""
        ...


class PlainWords:
    """One id per common English word, for the fake worker; unknown words take a word's id."""

    vocab_size = FIRST_ID + len(_WORDS)
    eos_token_ids: tuple[int, ...] = (EOS,)

    def encode(self, text: str) -> list[int]:
        """One id per word."""
        index = {word: i for i, word in enumerate(_WORDS)}
        words = text.lower().split() or [_WORDS[0]]
        return [FIRST_ID + index.get(word, zlib.crc32(word.encode()) % len(_WORDS)) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """The words, with spaces."""
        return " ".join("<end>" if i == EOS else _WORDS[i - FIRST_ID] for i in ids)


class ModelWords:
    """A model folder's own tokenizer. Raises ConfigError when it has none."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"--model {folder}: no tokenizer.json there")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.eos_token_ids = _eos_ids(folder)

    def encode(self, text: str) -> list[int]:
        """Ids with the tokenizer's own special tokens."""
        ids: list[int] = self._tokenizer.encode(text or " ").ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (value,)
    return ()

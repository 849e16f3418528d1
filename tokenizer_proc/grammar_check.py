"""Trial compilation of grammars, so that a bad one is refused before its request is accepted.

Compiling happens in a helper thread (llguidance releases the GIL) under the limits on size and work
that the worker uses (``common.grammar_compile``), and the loop waits for at most ``GRAMMAR_TIMEOUT_S``. Verdicts are
cached by content, bounded.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from llguidance import LLTokenizer

from common.errors import RequestError
from common.grammar_compile import compile_matcher, special_tokens_of
from common.grammar_text import to_llguidance
from common.messages import Grammar
from common.schema_place import with_place
from tokenizer_proc.encoder import TextEncoder

GRAMMAR_TIMEOUT_S = 10.0
"""A grammar that takes longer to compile is refused."""
MAX_GRAMMAR_BYTES = 1 << 20
_CACHE_SIZE = 1024

_PARAM = {"json_schema": "response_format", "json_object": "response_format"}


class GrammarChecker:
    """Says whether grammars compile for this tokenizer. Safe to use from several threads."""

    def __init__(self, encoder: TextEncoder, eos_token_ids: tuple[int, ...]) -> None:
        self._encoder = encoder
        self._eos = list(eos_token_ids)
        self._special: dict[str, int] = {}
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def known(self, grammar: Grammar) -> bool:
        """The verdict is cached: ``check`` answers at once."""
        with self._lock:
            return _digest(grammar) in self._verdicts

    def check(self, grammar: Grammar) -> None:
        """Compile on trial.

        Raises:
            RequestError: 400 with llguidance's words.
        """
        key = _digest(grammar)
        with self._lock:
            words = self._verdicts.get(key)
            if words is not None:
                self._verdicts.move_to_end(key)
        if words is None:
            words = self._compile(grammar)
            with self._lock:
                self._verdicts[key] = words
                while len(self._verdicts) > _CACHE_SIZE:
                    self._verdicts.popitem(last=False)
        if words:
            raise grammar_error(grammar, words)

    def _compile(self, grammar: Grammar) -> str:
        """What is wrong with the grammar; empty: nothing."""
        size = len(grammar.text.encode("utf-8", "replace"))
        if size > MAX_GRAMMAR_BYTES:
            return f"it has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}"
        try:
            tokenizer = self._llguidance()
            compile_matcher(to_llguidance(grammar, self._special), tokenizer)
        except (ValueError, RequestError) as error:
            return with_place(grammar, str(error)) or "it cannot be read"
        except RecursionError:
            return "it is nested too deeply"
        return ""

    def _llguidance(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._encoder.to_str(), eos_token=self._eos or None)
                # As the worker names them, so that both compile the same text.
                self._special = special_tokens_of(self._encoder.added_ids(), self._tokenizer, self._eos)
            return self._tokenizer


def grammar_error(grammar: Grammar, words: str) -> RequestError:
    """The 400 for a grammar that cannot be used."""
    param = _PARAM.get(grammar.kind, grammar.kind)
    return RequestError(f"the {grammar.kind} grammar was refused: {words.strip()}", param=param, code="invalid_grammar")


def _digest(grammar: Grammar) -> bytes:
    content = "\0".join((grammar.kind, grammar.lazy_trigger, grammar.text))
    return hashlib.sha256(content.encode("utf-8", "replace")).digest()

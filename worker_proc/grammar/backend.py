"""Grammars compiled by llguidance, cached by content, for one tokenizer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from llguidance import LLTokenizer

from common.errors import RequestError
from common.grammar_compile import added_tokens_of, compile_matcher, special_tokens_of
from common.grammar_text import to_llguidance, tool_triggers
from common.messages import Grammar
from worker_proc.grammar.session import CompiledGrammar, LLGuidanceSession

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_CHARS = 16 << 20
"""Of the grammars' texts together: a bound on memory that many large schemas reach first."""

_MAX_TRIGGERS = 64

_Key = tuple[str, str, str]


class LLGuidanceBackend:
    """Compiles grammars (``worker_proc.grammar_protocol.GrammarBackend``).

    ``tokenizer_json``: path of the model's tokenizer.json. ``vocab_size``: columns of the logits; ids
    the tokenizer does not know (padding) are never allowed. ``compile`` may be
    called from any thread; llguidance releases the GIL meanwhile.
    """

    def __init__(
        self,
        tokenizer_json: str | Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        max_cached: int = MAX_CACHED_GRAMMARS,
    ) -> None:
        path = Path(tokenizer_json)
        self._eos = tuple(eos_token_ids)
        text = path.read_text(encoding="utf-8")
        ends = list(self._eos) or None
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        except ValueError:
            # More tokens than the model has columns; a session cuts its masks to the model's.
            self._tokenizer = LLTokenizer(text, eos_token=ends)
        self._special = special_tokens_of(added_tokens_of(path), self._tokenizer, self._eos)
        self._max_cached = max_cached
        self._cache: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._cached_chars = 0
        self._crossing: dict[bytes, bool] = {}
        """Trigger -> whether a token crosses its end: a pass over the vocabulary, and few triggers."""
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> LLGuidanceSession:
        """A session at the beginning of the output. Raises ``ValueError`` with words for the client."""
        key = (grammar.kind, grammar.lazy_trigger, grammar.text)
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
        if compiled is None:
            try:
                compiled = self._compile(grammar)
            except RequestError as error:
                raise ValueError(error.info.message) from None
            self._remember(key, compiled)
        return LLGuidanceSession(compiled)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        matcher = compile_matcher(to_llguidance(grammar, self._special), self._tokenizer)
        triggers = tool_triggers(grammar)
        trigger = grammar.lazy_trigger
        token = self._special.get(trigger, -1)
        return CompiledGrammar(
            matcher=matcher,
            tokenizer=self._tokenizer,
            eos_token_ids=frozenset(self._eos),
            lazy_trigger=trigger.encode(),
            lazy_token=token,
            crosses_trigger=bool(trigger) and token < 0 and self._some_token_crosses(trigger.encode()),
            call_triggers=None if triggers is None else tuple(each.encode() for each in triggers),
        )

    def _some_token_crosses(self, trigger: bytes) -> bool:
        with self._lock:
            known = self._crossing.get(trigger)
        if known is None:
            decode = self._tokenizer.decode_bytes
            known = any(trigger in decode([token])[:-1] for token in range(self._tokenizer.vocab_size))
            with self._lock:
                if len(self._crossing) >= _MAX_TRIGGERS:
                    self._crossing.clear()
                self._crossing[trigger] = known
        return known

    def _remember(self, key: _Key, compiled: CompiledGrammar) -> None:
        with self._lock:
            if key not in self._cache:
                self._cached_chars += len(key[2])
            self._cache[key] = compiled
            while len(self._cache) > 1 and (
                len(self._cache) > self._max_cached or self._cached_chars > MAX_CACHED_CHARS
            ):
                oldest, _ = self._cache.popitem(last=False)
                self._cached_chars -= len(oldest[2])

"""Grammars compiled by llguidance, cached by content, for one tokenizer."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLTokenizer
from numpy.typing import NDArray

from common.errors import RequestError
from common.grammar_compile import compile_matcher, special_tokens_of
from common.grammar_text import to_llguidance, tool_triggers
from common.messages import Grammar
from worker_proc.grammar.session import CompiledGrammar, LLGuidanceSession

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_CHARS = 16 << 20
"""Of the grammars' texts together: a bound on memory that many large schemas reach first."""

_PARALLEL_WORTH_S = 2e-3
"""Starting llguidance's thread pool costs a fraction of a millisecond: only a batch that would take
longer than this in one thread is given to it."""

_MAX_TRIGGERS = 64

_Key = tuple[str, str, str]


class LLGuidanceBackend:
    """Compiles grammars and fills masks (``worker_proc.grammar_protocol.GrammarBackend``).

    ``tokenizer_json``: path of the model's tokenizer.json. ``vocab_size``: columns of the logits; ids
    the tokenizer does not know (padding) are never allowed. ``compile`` and ``compile_async`` may be
    called from any thread, everything else from the step loop's.
    """

    def __init__(
        self,
        tokenizer_json: str | Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        max_cached: int = MAX_CACHED_GRAMMARS,
        threads: int = 1,
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
        self._special = special_tokens_of(path, self._eos)
        self._max_cached = max_cached
        self._cache: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._cached_chars = 0
        self._crossing: dict[bytes, bool] = {}
        """Trigger -> whether a token crosses its end: a pass over the vocabulary, and few triggers."""
        self._lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._executor = LLExecutor(threads) if threads > 1 else None
        self._mask_s = 0.0
        """Running mean of the time one mask takes."""

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

    def compile_async(self, grammar: Grammar) -> Future[LLGuidanceSession]:
        """As ``compile``, off the step loop. llguidance releases the GIL while it compiles."""
        return self._compiler.submit(self.compile, grammar)

    def fill_bitmasks(
        self, sessions: Sequence[LLGuidanceSession], bitmask: NDArray[np.int32]
    ) -> list[bool | ValueError]:
        """Masks of a batch: row i of ``bitmask`` (int32 [R, words], C order) for session i.

        Per row what ``fill_bitmask`` returns, or the error it raises: a failing row fails alone.
        """
        started = time.perf_counter()
        parallel = self._executor is not None and self._mask_s * len(sessions) > _PARALLEL_WORTH_S
        results = self._fill_parallel(sessions, bitmask) if parallel else self._fill_in_turn(sessions, bitmask)
        if sessions and not parallel:
            self._mask_s += 0.1 * ((time.perf_counter() - started) / len(sessions) - self._mask_s)
        return results

    def fill_bitmasks_async(
        self, sessions: Sequence[LLGuidanceSession], bitmask: NDArray[np.int32]
    ) -> Future[list[bool | ValueError]]:
        """As ``fill_bitmasks``, in a thread, while the forward pass runs. The sessions must not be
        advanced before the result is there."""
        return self._filler.submit(self.fill_bitmasks, sessions, bitmask)

    def close(self) -> None:
        """Stop the threads."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._filler.shutdown(wait=False, cancel_futures=True)

    def _fill_in_turn(
        self, sessions: Sequence[LLGuidanceSession], bitmask: NDArray[np.int32]
    ) -> list[bool | ValueError]:
        results: list[bool | ValueError] = []
        for session, row in zip(sessions, bitmask, strict=True):
            try:
                results.append(session.fill_bitmask(row))
            except ValueError as error:
                results.append(error)
        return results

    def _fill_parallel(
        self, sessions: Sequence[LLGuidanceSession], bitmask: NDArray[np.int32]
    ) -> list[bool | ValueError]:
        words = (self._tokenizer.vocab_size + 31) // 32
        if self._executor is None or not bitmask.flags.c_contiguous or bitmask.shape[1] != words:
            return self._fill_in_turn(sessions, bitmask)
        matchers = [(session.matcher, row) for row, session in enumerate(sessions) if session.matcher is not None]
        self._executor.unsafe_compute_mask_ptr(matchers, bitmask.ctypes.data, words * 4, bitmask.shape[0])
        results: list[bool | ValueError] = [session.matcher is not None for session in sessions]
        for row, session in enumerate(sessions):
            if results[row]:
                try:
                    session.check_filled(bitmask[row])
                except ValueError as error:
                    results[row] = error
        return results

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        matcher = compile_matcher(to_llguidance(grammar, self._special), self._tokenizer)
        triggers = tool_triggers(grammar)
        trigger = grammar.lazy_trigger
        token = self._special.get(trigger, -1)
        plain = trigger.encode() if token < 0 else b""
        return CompiledGrammar(
            matcher=matcher,
            tokenizer=self._tokenizer,
            eos_token_ids=frozenset(self._eos),
            lazy_trigger=plain,
            lazy_token=token,
            crosses_trigger=bool(plain) and self._some_token_crosses(plain),
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

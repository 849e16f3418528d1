"""Grammar work beside the step loop: compiling, and masks that are computed while the forward pass runs.

The ids a row has sampled are known when its next step begins, so what the grammar allows next can be
found out in a helper thread during the forward pass (llguidance releases the GIL), and is there when
the logits are. XGrammar and SGLang overlap the two in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from common.messages import Grammar
from worker_proc.grammar_protocol import Bitmask, GrammarBackend, GrammarSession

COMPILE_LIMIT_S = 10.0
"""A request whose grammar is not compiled this long after it began fails. Compiling is bounded by work,
not time, and the tokenizer has done it once within the same limit: this is for a worker that is swamped."""

PATIENCE_S = 0.05
"""How long after a request began a step may still wait for its grammar; after that the others go on and
its row is postponed. A usual grammar takes 1 to 5 ms, less than the forward pass it hides behind."""

_NUM_COMPILERS = 2
"""As many as the tokenizer tries at a time; a slow grammar leaves a thread for the others."""


class MaskAhead:
    """A ``GrammarSession`` whose next mask may be computed before it is asked for.

    ``jumps``: forced ids are appended without sampling, so a state that has some needs no mask. Threads
    may take turns; two at once must not use one session.
    """

    def __init__(self, session: GrammarSession, num_words: int, jumps: bool) -> None:
        self._session, self._num_words, self._jumps = session, num_words, jumps
        self._is_prepared = False
        self._mask: Bitmask | None = None
        """Prepared; None: everything is allowed, or the ids are forced."""
        self._error: Exception | None = None

    def prepare(self) -> None:
        """Find out what may come next. Never raises: an error comes out of ``fill_bitmask``, for this row alone."""
        if self._is_prepared:
            return
        try:
            if not (self._jumps and self._session.forced_tokens()):
                mask = np.zeros(self._num_words, np.int32)
                if self._session.fill_bitmask(mask):
                    self._mask = mask
        except Exception as error:
            self._error = error
        self._is_prepared = True

    def fill_bitmask(self, row: Bitmask) -> bool:
        """See the protocol. Raises what computing the mask raised."""
        self.prepare()
        if self._error is not None:
            raise self._error
        if self._mask is None:
            return False
        row[:] = self._mask
        return True

    def accept_token(self, token: int) -> None:
        """See the protocol."""
        self._session.accept_token(token)
        self._is_prepared, self._mask, self._error = False, None, None

    def forced_tokens(self) -> list[int]:
        """See the protocol."""
        return self._session.forced_tokens()

    def is_complete(self) -> bool:
        """See the protocol."""
        return self._session.is_complete()

    def in_tool_call(self) -> bool:
        """See the protocol."""
        return self._session.in_tool_call()


class GrammarThreads:
    """The helper threads of a step loop. All methods are called from the loop's thread.

    ``num_words``: length of a mask in int32 words. ``clock`` in seconds, monotonic.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        num_words: int,
        *,
        patience_s: float = PATIENCE_S,
        limit_s: float = COMPILE_LIMIT_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend, self._num_words = backend, num_words
        self._patience_s, self._limit_s, self._clock = patience_s, limit_s, clock
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "grammar-compile")
        self._filler = ThreadPoolExecutor(1, "grammar-mask")
        self._begun: dict[Future[GrammarSession], float] = {}
        """When each compilation that has not ended was asked for."""

    def begin(self, grammar: Grammar, outputs: list[int], jumps: bool) -> Future[GrammarSession]:
        """Compile a grammar, replay ``outputs``, and prepare the first mask, in a thread. The future raises
        ``ValueError`` for a grammar that does not compile or that the outputs do not fit."""

        def work() -> GrammarSession:
            session = MaskAhead(rebuild_session(self._backend, grammar, outputs), self._num_words, jumps)
            session.prepare()
            return session

        future: Future[GrammarSession] = self._compilers.submit(work)
        self._begun[future] = self._clock()
        future.add_done_callback(lambda done: self._begun.pop(done, None))
        return future

    def prepare(self, sessions: Sequence[MaskAhead]) -> Future[None]:
        """Compute the next masks in a thread. The sessions must not be used before the result is there."""

        def work() -> None:
            for session in sessions:
                session.prepare()

        return self._filler.submit(work)

    def wait(self, pending: Sequence[Future[GrammarSession]], others: bool) -> None:
        """Give compilations a last short time to end. ``others``: rows that need none of them wait, too."""
        now = self._clock()
        left = [self._begun.get(future, now) + self._patience_s - now for future in pending]
        wait(pending, max(0.0, *left) if others else self._patience_s)

    def overdue(self, future: Future[GrammarSession]) -> str:
        """Why a request must not wait any longer for a compilation that has not ended; empty: it may."""
        waited_s = self._clock() - self._begun.get(future, self._clock())
        if waited_s <= self._limit_s:
            return ""
        return f"not compiled after {waited_s:.1f} s (the limit is {self._limit_s:g} s); try again, or simplify it"

    def close(self) -> None:
        """Let the threads end; what has not begun is not done."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._filler.shutdown(wait=False, cancel_futures=True)


def rebuild_session(backend: GrammarBackend, grammar: Grammar, outputs: list[int]) -> GrammarSession:
    """Compile a grammar and replay the ids already generated. Raises ``ValueError`` if they do not fit it."""
    session = backend.compile(grammar)
    for token in outputs:
        session.accept_token(token)
    return session

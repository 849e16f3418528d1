"""What the step loop asks of a grammar, so that no backend is named outside ``worker_proc/grammar``.

One :class:`GrammarSession` per request follows the request's *output* ids. The loop uses it so:

1. ``forced_tokens()`` not empty: these ids are the only way on; they are appended without
   sampling, as many as fit (page capacity, ``max_tokens``), and each is given to ``accept_token``.
2. otherwise ``fill_bitmask`` narrows the logits, one id is sampled and given to ``accept_token``,
   and then again 1.
3. ``is_complete()`` after an id: the request ends with ``GRAMMAR_END``.

A request that begins with output ids (preemption, recovery) replays them through
``accept_token``, so a session never needs to be moved or rolled back.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.messages import Grammar

Bitmask = NDArray[np.int32]
"""int32 [ceil(vocab_size / 32)]: bit ``id % 32`` of word ``id // 32`` set means allowed."""


def bitmask_words(vocab_size: int) -> int:
    """Length of a bitmask row in int32 words."""
    return (vocab_size + 31) // 32


class GrammarSession(Protocol):
    """The state of one request's constraint. Used from the step loop's thread only."""

    def fill_bitmask(self, row: Bitmask) -> bool:
        """Write the ids allowed next into ``row`` (every word; end-of-sequence ids where the grammar may end).

        False, with ``row`` untouched: everything is allowed now (a lazy grammar before its trigger).
        Ids at or beyond the tokenizer's vocabulary (padding of the embedding) are not allowed.
        Raises ``ValueError`` when no id at all is allowed.
        """
        ...

    def accept_token(self, token: int) -> None:
        """Advance by one output id. Raises ``ValueError``, the state unchanged, if the grammar forbids it.

        An end-of-sequence id is accepted wherever ``fill_bitmask`` allowed it. Before the trigger of
        a lazy grammar every id is accepted.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """Ids that must come next, in order, with the tokenizer's own segmentation; empty when there is a choice.

        Does not advance the session. Never contains an end-of-sequence id.
        """
        ...

    def is_complete(self) -> bool:
        """Nothing may follow any more: the output is a complete word of the grammar."""
        ...

    def in_tool_call(self) -> bool:
        """The last id lies inside a tool call (a lazy or structural-tag grammar after its trigger)."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer. ``compile`` may be called from a helper thread."""

    def compile(self, grammar: Grammar) -> GrammarSession:
        """A fresh session at the beginning of the output. Raises ``ValueError`` with words for the client."""
        ...

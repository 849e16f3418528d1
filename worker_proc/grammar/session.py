"""The state of one constrained request: a matcher, and for a lazy grammar the wait for its trigger."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from worker_proc.grammar_protocol import Bitmask


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What all requests with the same grammar share. ``matcher`` is at the beginning; it is copied, never advanced."""

    matcher: LLMatcher
    tokenizer: LLTokenizer
    eos_token_ids: frozenset[int]
    lazy_trigger: bytes = b""
    """Not empty: text that switches the constraint on."""
    lazy_token: int = -1
    """The special token that does so, where the trigger is one (spelled out, it does too)."""
    crosses_trigger: bool = False
    """Some token contains the whole trigger and text after it: then every step needs a mask, as
    that token could carry the output past the trigger in a way the grammar forbids."""
    call_triggers: tuple[bytes, ...] | None = None
    """Texts after which the output is inside a tool call; () from its beginning, None never."""

    @property
    def is_lazy(self) -> bool:
        """Free text comes first."""
        return bool(self.lazy_trigger) or self.lazy_token >= 0


class LLGuidanceSession:
    """One request's constraint (``worker_proc.grammar_protocol.GrammarSession``)."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None if compiled.is_lazy else compiled.matcher.deep_copy()
        self._lookout: LLMatcher | None = compiled.matcher.deep_copy() if compiled.crosses_trigger else None
        """Before the trigger: a matcher that has seen the possible beginning of it, for exact masks."""
        self._tail = b""
        """The end of the output where it may be the beginning of the trigger."""
        self._recent = b""
        """The last three bytes: a matcher that begins within a character would forbid the rest of it."""
        self._forced: list[int] | None = None
        self._complete = self._matcher is not None and self._matcher.is_stopped()
        self._in_call = compiled.call_triggers == ()
        self._call_tail = b""

    def fill_bitmask(self, row: Bitmask) -> bool:
        """See the protocol. Writes in place, about 2 to 30 us for usual grammars."""
        matcher = self._matcher or self._lookout
        if matcher is None:
            return False
        vocab_words = (self._compiled.tokenizer.vocab_size + 31) // 32
        if row.flags.c_contiguous and vocab_words == row.size:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            # A tokenizer larger or smaller than the embedding: ids that the model lacks are cut off.
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
            row.fill(0)
            row[: mask.size] = mask[: row.size]
        self._check_filled(matcher, row)
        return True

    @staticmethod
    def _check_filled(matcher: LLMatcher, row: Bitmask) -> None:
        """Raises ``ValueError`` when the matcher failed or allows nothing."""
        if matcher.is_error():
            raise ValueError(f"the grammar became too costly here: {matcher.get_error().splitlines()[0]}")
        if not row.any():
            raise ValueError("the grammar allows no token of this model's vocabulary here")

    def accept_token(self, token: int) -> None:
        """See the protocol."""
        matcher = self._matcher
        if matcher is None:
            self._wait_for_trigger(token)
        else:
            if matcher.try_consume_tokens([token]) != 1:
                raise ValueError(f"token {token} is not allowed by the grammar here")
            self._complete = matcher.is_stopped()
            self._forced = self._forced[1:] if self._forced and self._forced[0] == token else None
            if not self._forced:
                self._forced = None
        if not self._in_call:
            self._look_for_call(token)

    def forced_tokens(self) -> list[int]:
        """See the protocol. The segmentation is the tokenizer's own; a last piece that could still
        join with what follows is left to sampling."""
        matcher = self._matcher
        if matcher is None or self._complete:
            return []
        if self._forced is None:
            forced = matcher.compute_ff_tokens()
            ends = self._compiled.eos_token_ids
            cut = next((index for index, token in enumerate(forced) if token in ends), len(forced))
            self._forced = forced[:cut]
        return list(self._forced)

    def is_complete(self) -> bool:
        """See the protocol."""
        return self._complete

    def in_tool_call(self) -> bool:
        """See the protocol. Stays set after the first call."""
        return self._in_call

    def _wait_for_trigger(self, token: int) -> None:
        compiled = self._compiled
        self._lookout = None
        if token == compiled.lazy_token:
            self._bind([token])
            return
        special = compiled.tokenizer.is_special_token(token)
        data = b"" if special else self._tail + compiled.tokenizer.decode_bytes([token])
        self._recent = b"" if special else (self._recent + data[len(self._tail) :])[-3:]
        at = data.find(compiled.lazy_trigger)
        if at >= 0 and self._bind(self._trigger_and(data[at:])):
            return
        self._tail = _possible_beginning(data, compiled.lazy_trigger)
        if compiled.lazy_token >= 0:
            return
        if self._tail:
            self._lookout = compiled.matcher.deep_copy()
            self._lookout.try_consume_tokens(compiled.tokenizer.tokenize_bytes(self._tail))
        elif compiled.crosses_trigger and not _within_character(self._recent):
            self._lookout = compiled.matcher.deep_copy()

    def _trigger_and(self, data: bytes) -> list[int]:
        """Tokens of text that begins with the trigger. A special token may be spelled out: who reads the text
        cannot tell it from the token, so it counts as one."""
        compiled = self._compiled
        if compiled.lazy_token < 0:
            return [*compiled.tokenizer.tokenize_bytes(data)]
        rest = data[len(compiled.lazy_trigger) :]
        return [compiled.lazy_token, *(compiled.tokenizer.tokenize_bytes(rest) if rest else [])]

    def _bind(self, tokens: list[int]) -> bool:
        """The trigger is there: from now on the grammar holds. False where it cannot hold any more."""
        matcher = self._compiled.matcher.deep_copy()
        if matcher.try_consume_tokens(tokens) != len(tokens):
            return False
        self._matcher, self._lookout, self._tail, self._in_call = matcher, None, b"", True
        self._complete = matcher.is_stopped()
        return True

    def _look_for_call(self, token: int) -> None:
        triggers = self._compiled.call_triggers
        if not triggers:
            return
        data = self._call_tail + self._compiled.tokenizer.decode_bytes([token])
        self._in_call = any(trigger in data for trigger in triggers)
        longest = max(map(len, triggers))
        self._call_tail = data[-(longest - 1) :] if longest > 1 else b""


def _possible_beginning(data: bytes, trigger: bytes) -> bytes:
    """The longest end of ``data`` that ``trigger`` begins with, shorter than the trigger."""
    for size in range(min(len(data), len(trigger) - 1), 0, -1):
        if trigger.startswith(data[-size:]):
            return data[-size:]
    return b""


def _within_character(data: bytes) -> bool:
    """Whether the bytes end within a UTF-8 character."""
    for back in range(1, min(len(data), 3) + 1):
        byte = data[-back]
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False

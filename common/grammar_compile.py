"""Compile a grammar with llguidance under limits, in the worker for use and in the tokenizer on trial.

Importing this loads llguidance's native library (no torch). Compiling releases the GIL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.errors import RequestError

LIMITS: Mapping[str, int] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 500_000,
    "step_max_items": 100_000,
    # A state takes 1-2 kB, so one grammar cannot hold more than some tens of MB.
    "max_lexer_states": 32_000,
    "max_grammar_size": 500_000,
}
"""llguidance's own bounds on the work and memory of one grammar: the work is a count, not a time, so
that a verdict does not depend on how busy the machine is."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def added_tokens_of(tokenizer_json: Path) -> dict[str, int]:
    """Name -> id of the tokens a tokenizer.json adds to its vocabulary, the special ones among them."""
    added = msgspec.json.decode(tokenizer_json.read_bytes(), type=_TokenizerFile).added_tokens
    return {token.content: token.id for token in added}


def special_tokens_of(
    added: Mapping[str, int], tokenizer: LLTokenizer, eos_token_ids: Iterable[int]
) -> dict[str, int]:
    """Those of the ``added`` tokens that no text of a grammar matches, but for those that end the output.

    llguidance takes every added token that looks like ``<tool_call>`` for one, special or not (Qwen's
    ``<tool_call>`` and ``</think>`` are not), so it is asked: in a grammar such a mark must be named by its id.
    """
    ends = set(eos_token_ids)
    inside = {name: number for name, number in added.items() if number < tokenizer.vocab_size and number not in ends}
    return {name: number for name, number in inside.items() if tokenizer.is_special_token(number)}


def compile_matcher(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the grammar ``text`` (see grammar_text.to_llguidance).

    Raises RequestError (400) for a grammar that is invalid, too costly, or that nothing satisfies. The
    first mask is computed here, so that the first use costs no more than the others.
    """
    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error() and not matcher.is_stopped():
        allowed = any(matcher.compute_bitmask())
        if not allowed and not matcher.is_error():
            raise _unsatisfiable()
    if matcher.is_error():
        words = matcher.get_error()
        # llguidance's way to say that no byte may follow.
        if words.startswith("NoExtensionBias"):
            raise _unsatisfiable()
        raise RequestError(plain_words(words), code="invalid_grammar")
    if matcher.is_stopped() and not matcher.is_accepting():
        raise _unsatisfiable()
    return matcher


def _unsatisfiable() -> RequestError:
    return RequestError("nothing satisfies this grammar", code="unsatisfiable_grammar")


def plain_words(error: str) -> str:
    """llguidance's message without the place in our Lark text and the grammar it quotes."""
    words = re.split(r"\n\s*\d+ \| |\n<state>", error)[0]
    words = re.sub(r"^at \d+\(\d+\): ", "", words)
    return words.strip() or "the grammar does not compile"

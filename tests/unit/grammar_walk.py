"""A small tokenizer and a model that knows nothing, for tests of constrained decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.messages import Grammar
from worker_proc.grammar import LLGuidanceBackend, LLGuidanceSession
from worker_proc.grammar_protocol import bitmask_words

EOS = "<|eos|>"
MARKS = (
    EOS, "<|im_start|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|mark|>", "<|channel|>", "<|message|>",
    "<|start|>", "<|end|>", "<|constrain|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>",
)
"""Special tokens; some of the families' marks are among them and some are plain text, as in real models."""
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Tokens of their own that are not special, as in Qwen's and GLM's tokenizers."""
_TEXT = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "ok": true, "list": [1, 2, 3]}}',
    "the quick brown fox jumps over the lazy dog. <tool_call> </tool_call> <function= <parameter= null false",
] * 20


def make_tokenizer(path: Path, vocab_size: int = 420, added: Sequence[str] = ()) -> Path:
    """Train a byte-level BPE with special tokens, and ``added`` ones; write tokenizer.json into ``path``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in added])
    file = path / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@dataclass
class Setup:
    """A backend and its tokenizer."""

    backend: LLGuidanceBackend
    tokenizer: Tokenizer
    vocab_size: int
    eos: int

    def session(self, kind: str, text: str, lazy_trigger: str = "") -> LLGuidanceSession:
        return self.backend.compile(Grammar(kind=kind, text=text, lazy_trigger=lazy_trigger))  # type: ignore[arg-type]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def allowed(self, session: LLGuidanceSession) -> list[int] | None:
        """Ids the mask allows; None when all are."""
        row = np.zeros(bitmask_words(self.vocab_size), np.int32)
        if not session.fill_bitmask(row):
            return None
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: self.vocab_size]
        return [int(token) for token in np.flatnonzero(bits)]

    def matches(self, kind: str, text: str, output: str, lazy_trigger: str = "") -> bool:
        """Whether the grammar lets exactly this output through."""
        session = self.session(kind, text, lazy_trigger)
        try:
            for token in self.encode(output):
                session.accept_token(token)
        except ValueError:
            return False
        allowed = self.allowed(session)
        return allowed is None or session.is_complete() or self.eos in allowed


def make_setup(path: Path, added: Sequence[str] = ()) -> Setup:
    """A backend over the small tokenizer; the embedding has 11 more columns than it has tokens."""
    file = make_tokenizer(path, added=added)
    tokenizer = Tokenizer.from_file(str(file))
    vocab_size = tokenizer.get_vocab_size() + 11
    eos: int = tokenizer.token_to_id(EOS)  # type: ignore[assignment]
    return Setup(LLGuidanceBackend(file, vocab_size, [eos]), tokenizer, vocab_size, eos)


@dataclass
class Walk:
    """What a random walk under the masks gave."""

    ids: list[int]
    text: str
    passes: int
    """Tokens that were drawn; the others were forced."""
    complete: bool
    """It ended because the grammar ended (or allowed the end)."""


def _closers(setup: Setup, ids: list[int], end: str) -> set[int]:
    """Tokens with which the text goes on to write ``end``."""
    text = setup.decode(ids[-2 * len(end) :])
    written = next(size for size in range(min(len(end), len(text)), -1, -1) if text.endswith(end[:size]))
    rest = end[written:]
    pieces = ((token, setup.decode([token])) for token in range(setup.vocab_size))
    return {token for token, piece in pieces if piece and rest.startswith(piece)}


def walk(
    setup: Setup, session: LLGuidanceSession, seed: int, limit: int = 500, patience: int = 40, end: str = ""
) -> Walk:
    """Draw uniformly among what is allowed; after ``patience`` tokens prefer those that close something: JSON, or
    with ``end`` the text that it ends."""
    rng = np.random.default_rng(seed)
    pieces = enumerate(setup.decode([token]) for token in range(setup.vocab_size))
    closing = {token for token, piece in pieces if piece == "<|end|>" or piece[:1] in tuple('"}]')}
    ids: list[int] = []
    passes = 0
    while len(ids) < limit and not session.is_complete():
        forced = session.forced_tokens()
        for token in forced:
            session.accept_token(token)
        ids += forced
        if forced:
            continue
        allowed = setup.allowed(session)
        choices = list(range(setup.vocab_size)) if allowed is None else allowed
        if len(ids) > patience:
            closing = _closers(setup, ids, end) if end else closing
            choices = [setup.eos] if setup.eos in choices else [each for each in choices if each in closing] or choices
        token = choices[int(rng.integers(len(choices)))]
        session.accept_token(token)
        passes += 1
        if token == setup.eos:
            return Walk(ids, setup.decode(ids), passes, True)
        ids.append(token)
    return Walk(ids, setup.decode(ids), passes, session.is_complete())

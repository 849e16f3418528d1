"""The backend as the worker's loop uses it: masks, forced tokens, lazy triggers, endings, the cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.messages import Grammar
from tests.unit.grammar_walk import ADDED, Setup, make_setup, walk
from worker_proc.grammar import LLGuidanceBackend, LLGuidanceSession
from worker_proc.grammar_protocol import GrammarBackend, GrammarSession, bitmask_words

KEYS = [f"a_rather_long_field_name_{i}" for i in range(6)]
FLAGS = json.dumps({
    "type": "object", "properties": {key: {"type": "boolean"} for key in KEYS}, "required": KEYS,
    "additionalProperties": False,
})


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(Path(tmp_path_factory.mktemp("tokenizer")))


def _as_protocols(backend: LLGuidanceBackend, session: LLGuidanceSession) -> tuple[GrammarBackend, GrammarSession]:
    return backend, session  # checked by mypy


def test_fixed_keys_are_forced_and_the_text_is_whole(setup: Setup) -> None:
    done = walk(setup, setup.session("json_schema", FLAGS), seed=1)
    assert done.complete and list(json.loads(done.text)) == KEYS
    assert done.passes <= 2 * len(KEYS) + 1 < len(done.ids)
    assert setup.decode(done.ids) == done.text


def test_forced_tokens_are_what_the_tokenizer_would_write(setup: Setup) -> None:
    session = setup.session("choice", '["the quick brown fox jumps over"]')
    forced = session.forced_tokens()
    assert forced == setup.encode("the quick brown fox jumps over")[: len(forced)] and len(forced) > 3
    assert session.forced_tokens() == forced  # asking does not advance
    for token in forced:
        session.accept_token(token)
    assert setup.eos not in forced


def test_only_some_forced_tokens_may_be_taken(setup: Setup) -> None:
    session = setup.session("choice", '["the quick brown fox jumps over"]')
    forced = session.forced_tokens()
    session.accept_token(forced[0])
    assert session.forced_tokens() == forced[1:]


def test_a_token_the_grammar_forbids_leaves_the_session_as_it_was(setup: Setup) -> None:
    session = setup.session("regex", "[ab]c")
    with pytest.raises(ValueError, match="not allowed"):
        session.accept_token(setup.encode("x")[0])
    with pytest.raises(ValueError, match="not allowed"):
        session.accept_token(setup.eos)
    session.accept_token(setup.encode("a")[0])
    session.accept_token(setup.encode("c")[0])
    assert session.is_complete()


def test_end_is_allowed_where_the_grammar_may_end_and_nothing_follows_completion(setup: Setup) -> None:
    session = setup.session("regex", "a+")
    allowed = setup.allowed(session)
    assert allowed is not None and setup.eos not in allowed
    session.accept_token(setup.encode("a")[0])
    allowed = setup.allowed(session)
    assert allowed is not None and setup.eos in allowed and not session.is_complete()
    session.accept_token(setup.eos)
    assert session.is_complete()


def test_padding_of_the_embedding_is_never_allowed(setup: Setup) -> None:
    allowed = setup.allowed(setup.session("regex", "(?s:.*)"))
    assert allowed is not None and max(allowed) < setup.tokenizer.get_vocab_size()


def test_a_tokenizer_larger_than_the_model_is_cut(setup: Setup, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(setup.tokenizer.to_str())
    backend = LLGuidanceBackend(file, 100, [])
    session = backend.compile(Grammar(kind="regex", text="(?s:.+)"))
    row = np.full(bitmask_words(100), -1, np.int32)
    assert session.fill_bitmask(row) and row.any()


def test_before_a_lazy_trigger_there_is_no_mask(setup: Setup) -> None:
    session = setup.session("json_schema", FLAGS, "<tool_call>")
    for token in setup.encode("Let me think, "):
        assert setup.allowed(session) is None and session.forced_tokens() == []
        session.accept_token(token)
    assert not session.in_tool_call()
    for token in setup.encode("<tool_call>"):
        session.accept_token(token)
    assert session.in_tool_call() and setup.allowed(session) is not None
    assert setup.decode(session.forced_tokens()).startswith('{"a_rather')


def test_a_possible_trigger_is_looked_out_for(setup: Setup) -> None:
    session = setup.session("regex", "[0-9]!", "<t>")
    session.accept_token(setup.encode("<")[0])
    allowed = setup.allowed(session)
    assert allowed is not None and setup.eos in allowed  # "<" may be all there is
    session.accept_token(setup.encode("x")[0])
    assert setup.allowed(session) is None and not session.in_tool_call()


def test_a_token_across_the_trigger_s_end_must_fit_the_grammar(setup: Setup) -> None:
    crossing = [token for token in range(setup.vocab_size) if "qui" in setup.decode([token])[:-1]]
    assert crossing  # what this test is about: a token holds the trigger and more
    session = setup.session("regex", "[0-9]", "qui")
    for token in setup.encode("a 🙂 é "):
        allowed = setup.allowed(session)
        assert allowed is None or (token in allowed and not set(crossing) & set(allowed))
        session.accept_token(token)
    for token in setup.encode("q") + setup.encode("ui"):
        session.accept_token(token)
    allowed = setup.allowed(session) or []
    assert session.in_tool_call() and {setup.decode([token]) for token in allowed} == {*"0123456789"}


def test_a_special_token_as_trigger(setup: Setup) -> None:
    session = setup.session("regex", "[0-9]!", "<|mark|>")
    for token in setup.encode("<|im_start|>text<|mark|>"):
        assert not session.in_tool_call()
        session.accept_token(token)
    assert session.in_tool_call()
    assert {setup.decode([token]) for token in setup.allowed(session) or []} <= {*"0123456789"}


def test_a_mark_with_a_token_of_its_own_that_is_not_special_binds_too(tmp_path: Path) -> None:
    """Qwen's </think> and <tool_call>."""
    setup = make_setup(tmp_path, ADDED)
    assert len(setup.encode("</think>")) == 1
    session = setup.session("json_schema", FLAGS, "</think>")
    for token in setup.encode("<think>so</think>"):
        assert not session.in_tool_call()
        session.accept_token(token)
    assert setup.decode(session.forced_tokens()).startswith('{"a_rather')


@pytest.mark.parametrize("rest", ["", "7", "7!"])
def test_a_special_token_spelled_out_is_one_to_whoever_reads_the_text(setup: Setup, rest: str) -> None:
    session = setup.session("regex", "[0-9]!", "<|mark|>")
    spelled = [token for part in ("text <|ma", "rk|", ">" + rest) for token in setup.encode(part)]
    assert setup.tokenizer.token_to_id("<|mark|>") not in spelled
    for token in spelled:
        session.accept_token(token)
    assert session.in_tool_call() and session.is_complete() == (rest == "7!")


@pytest.mark.parametrize("trigger", ["", "<tool_call>"])
def test_replaying_the_ids_gives_the_same_state(setup: Setup, trigger: str) -> None:
    prefix = setup.encode("so: " + trigger) if trigger else []
    ids = prefix + walk(setup, setup.session("json_schema", FLAGS), seed=3).ids
    first, second = setup.session("json_schema", FLAGS, trigger), setup.session("json_schema", FLAGS, trigger)
    for token in ids[:-4]:
        first.accept_token(token)
    for token in ids[:-4]:
        second.forced_tokens()
        second.accept_token(token)
    assert setup.allowed(first) == setup.allowed(second) and first.forced_tokens() == second.forced_tokens()


def test_structural_tags_tell_when_a_call_is_open(setup: Setup) -> None:
    tag = {"structures": [{"begin": "<function=a>", "schema": {}, "end": "</function>"}], "triggers": ["<function="]}
    session = setup.session("structural_tag", json.dumps(tag))
    for token in setup.encode("text "):
        session.accept_token(token)
    assert not session.in_tool_call()
    for token in setup.encode("<function="):
        session.accept_token(token)
    assert session.in_tool_call()


def test_the_cache_is_bounded_and_sessions_do_not_share_state(setup: Setup, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(setup.tokenizer.to_str())
    backend = LLGuidanceBackend(file, setup.vocab_size, [setup.eos], max_cached=4)
    first = backend.compile(Grammar(kind="regex", text="ab"))
    second = backend.compile(Grammar(kind="regex", text="ab"))
    first.accept_token(setup.encode("a")[0])
    second.accept_token(setup.encode("a")[0])
    for number in range(20):
        backend.compile(Grammar(kind="regex", text=f"a{number}"))
    assert len(backend._cache) == 4
    assert backend.compile(Grammar(kind="regex", text="ab")).forced_tokens()
    with pytest.raises(ValueError, match="unclosed"):
        backend.compile(Grammar(kind="regex", text="(a"))


def test_a_regex_that_explodes_is_refused_or_bounded(setup: Setup) -> None:
    for pattern in ("(a|b)*a(a|b){40}", "((a{0,100}){0,100}){0,100}", "(.*a){50}", r"\p{L}{1000}"):
        try:
            session = setup.session("regex", pattern)
        except ValueError:
            continue
        for _ in range(5):
            allowed = setup.allowed(session)
            if session.is_complete() or not allowed:
                break
            session.accept_token(next(token for token in allowed if token != setup.eos))

"""Decoding one id at a time equals decoding all of them, whatever the ids and the tokenizer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from detokenizer_proc.decoding import Vocabulary, WindowDecoder
from tests.unit.text_tokenizers import load

EXACT = ["byte_level", "llama", "unigram", "unigram_never", "unigram_bytes"]
SCRIPTS = [
    "plain English text, with  two blanks", "🙂👩‍👩‍👧🇩🇪", "日本語の文章です。", "e\u0301\u0323 a\u0308 नमस्ते", "مرحبا",
    "\ufffd", "  leading", "tab\tand\nnewline ", "\x00\x7f", "𝔘𝔫𝔦",
]  # fmt: skip


@cache
def vocabulary(family: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = load(family)
    return tokenizer, Vocabulary(tokenizer)


def stream(family: str, ids: list[int], skip: bool) -> list[str]:
    decoder = vocabulary(family)[1].decoder(skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@pytest.mark.parametrize("family", EXACT)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_give_what_the_tokenizer_decodes(family: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, _ = vocabulary(family)
    # Ids beyond the vocabulary are rows that pad an embedding: they have no text.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=40))
    assert "".join(stream(family, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", EXACT)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.lists(st.one_of(st.sampled_from(SCRIPTS), st.text(max_size=8)), max_size=5).map("".join))
def test_text_of_every_script_comes_back_in_whole_characters(family: str, text: str) -> None:
    tokenizer, _ = vocabulary(family)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = stream(family, ids, skip=False)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    data=st.lists(st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from(SCRIPTS).map(str.encode)), max_size=12)
)
@example([b"\xe6\x97", b"\xa5a", b"\xf0\x9f\x99"])
@example([b"\xe2\x82", b"\xe2\x82\xac"])
def test_any_bytes_in_any_split_are_decoded_as_a_whole(data: list[bytes]) -> None:
    tokenizer, known = vocabulary("byte_level")
    id_of = {known.show(i)[1]: i for i in range(tokenizer.get_vocab_size()) if i not in known.special_ids}
    ids = [id_of[bytes([byte])] for chunk in data for byte in chunk]
    expected = b"".join(data).decode("utf-8", "replace")
    assert "".join(stream("byte_level", ids, True)) == expected == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(["The", "fox", "Köln", "station", "river", "."]), max_size=12).map(" ".join))
def test_an_unknown_decoder_is_followed_through_a_window(text: str) -> None:
    tokenizer, known = vocabulary("word_end")
    assert isinstance(known.decoder(True), WindowDecoder)
    ids = tokenizer.encode(text).ids
    assert "".join(stream("word_end", ids, True)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", EXACT)
def test_every_token_is_shown_with_its_own_bytes(family: str) -> None:
    tokenizer, known = vocabulary(family)
    for token_id in range(tokenizer.get_vocab_size()):
        text, data = known.show(token_id)
        assert text == data.decode("utf-8", "replace")
        assert data, f"token {token_id} has no bytes"

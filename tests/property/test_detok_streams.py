"""Whole against streamed: any ids, any rows, any stop strings, full channels in between."""

from __future__ import annotations

import itertools
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.messages import (
    BeginOutput,
    Finish,
    TextParams,
    TextRow,
    TokenBatch,
    TokenRow,
    pack_f32,
    pack_i32,
    unpack_i32,
)
from detokenizer_proc.decoding import Vocabulary
from detokenizer_proc.outbox import Outbox
from detokenizer_proc.rows import PendingRow
from detokenizer_proc.server import Detokenizer
from detokenizer_proc.stream import Stream
from tests.unit.text_fakes import Channels, FakeSender, read
from tests.unit.text_tokenizers import load

FAMILIES = ["byte_level", "llama", "unigram", "unigram_bytes"]


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return load(family)


@cache
def vocabulary(family: str) -> Vocabulary:
    return Vocabulary(tokenizer_of(family))


def expected(family: str, ids: list[int], stops: tuple[str, ...], include: bool) -> tuple[str, int, str]:
    """(text, tokens used, stop string): by decoding every prefix of the ids as a whole."""
    tokenizer = tokenizer_of(family)
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        hits = []
        for stop in stops:
            at = text.find(stop)
            # What a broken character at the end shows for now is no text yet.
            if at >= 0 and (count == len(ids) or "\ufffd" not in text[at : at + len(stop)]):
                hits.append((at + len(stop), -len(stop), stop))
        if hits:
            end, _, stop = min(hits)
            return text[: end if include else end - len(stop)], count, stop
    return tokenizer.decode(ids), len(ids), ""


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data(), family=st.sampled_from(FAMILIES), include=st.booleans(), logprobs=st.booleans())
def test_streamed_equals_whole(data: st.DataObject, family: str, include: bool, logprobs: bool) -> None:
    tokenizer = tokenizer_of(family)
    text = data.draw(
        st.lists(st.sampled_from(["fox", " the ", "🙂", "日本", "ü", "e\u0301", ".", " over"]), max_size=8)
    )
    ids = tokenizer.encode("".join(text), add_special_tokens=False).ids
    ids = [i for n, i in enumerate(ids) if n % 7 != data.draw(st.integers(0, 40))]  # some characters are broken
    stops = tuple(data.draw(st.lists(st.sampled_from(["x t", "🙂", "本🙂", "e.", "the over", "ü", "."]), max_size=3)))
    channels, scheduler = Channels(), FakeSender()
    detokenizer = Detokenizer(vocabulary(family), Outbox(channels.connect, channels.local, 0), scheduler)
    params = TextParams(stop=stops, include_stop_str_in_output=include)
    begin = BeginOutput("r", 0, "gateway-0", 3, 0, params, logprobs=0 if logprobs else None)
    detokenizer.handle(TokenBatch(scheduler_generation=0, step=0, begins=[begin]))
    at = 0
    while True:
        detokenizer.flush(0.0)
        channels.opened["gateway-0"].room = data.draw(st.sampled_from([0, None]))
        count = data.draw(st.integers(1, 4))
        chunk = ids[at : at + count]
        done = at + count >= len(ids)
        values = pack_f32([-float(at + n) for n in range(len(chunk))]) if logprobs else b""
        row = TokenRow("r", 0, at, pack_i32(chunk), values, finish=Finish("length") if done else None)
        detokenizer.handle(TokenBatch(scheduler_generation=0, step=0, rows=[row]))
        at += count
        if done:
            break
    channels.opened["gateway-0"].room = None
    detokenizer.flush(1.0)
    reader = read(channels.opened["gateway-0"])
    text, sent = "", b""
    for row in reader.rows[:-1]:
        text, sent = text + row.text, sent + row.ids
        assert text.startswith(tokenizer.decode(unpack_i32(sent).tolist())), "ids were sent before their text"
    want, used, stop = expected(family, ids, stops, include)
    finish = reader.rows[-1].finish
    assert finish is not None
    assert (reader.text, reader.ids, finish.matched or "") == (want, ids[:used], stop)
    assert [entry.logprob for entry in reader.logprobs] == ([-float(n) for n in range(used)] if logprobs else [])
    assert detokenizer.num_live == 0 and not detokenizer.waiting


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data(), family=st.sampled_from(FAMILIES), with_stop=st.booleans(), logprobs=st.booleans())
def test_each_id_is_said_to_begin_where_its_text_does(
    data: st.DataObject, family: str, with_stop: bool, logprobs: bool
) -> None:
    tokenizer = tokenizer_of(family)
    word = st.sampled_from(["fox", " the ", "🙂", "日本", "◁/", "▷", "ü", "."])
    words = data.draw(st.lists(word, min_size=1, max_size=9))
    ids = tokenizer.encode("".join(words), add_special_tokens=False).ids
    channels = Channels()
    detokenizer = Detokenizer(vocabulary(family), Outbox(channels.connect, channels.local, 0), FakeSender())
    params = TextParams(stop=("fox the fox the fox",) if with_stop else (), starts=True)
    begin = BeginOutput("r", 0, "gateway-0", 3, 0, params, logprobs=0 if logprobs else None)
    detokenizer.handle(TokenBatch(scheduler_generation=0, step=0, begins=[begin]))
    at = 0
    while at < len(ids):
        channels.opened.get("gateway-0", FakeSender()).room = data.draw(st.sampled_from([0, None]))
        detokenizer.flush(0.0)
        chunk = ids[at : at + data.draw(st.integers(1, 4))]
        finish = Finish("length") if at + len(chunk) == len(ids) else None
        values = pack_f32([-1.0] * len(chunk)) if logprobs else b""
        row = TokenRow("r", 0, at, pack_i32(chunk), values, finish=finish)
        detokenizer.handle(TokenBatch(scheduler_generation=0, step=0, rows=[row]))
        at += len(chunk)
    channels.opened["gateway-0"].room = None
    detokenizer.flush(1.0)
    rows = read(channels.opened["gateway-0"]).rows
    assert all(len(row.starts) == len(row.ids) for row in rows)
    starts = [start for row in rows for start in unpack_i32(row.starts).tolist()]
    # What is not whole yet is U+FFFD, of which the words have none: a character, or a run of byte tokens.
    whole = [len(tokenizer.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids))]
    assert starts == list(itertools.accumulate(whole, max))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data(), family=st.sampled_from(FAMILIES), starts=st.booleans())
def test_the_short_way_says_what_the_long_way_does(data: st.DataObject, family: str, starts: bool) -> None:
    words = data.draw(st.lists(st.sampled_from(["fox", " the ", "🙂", "日本", "ü", "."]), min_size=1, max_size=9))
    ids = tokenizer_of(family).encode("".join(words), add_special_tokens=False).ids
    begin = BeginOutput("r", 0, "gateway-0", 3, 0, TextParams(starts=starts))
    short, long = Stream(begin, vocabulary(family)), Stream(begin, vocabulary(family))
    at = num_short = 0
    while at < len(ids):
        row = TokenRow("r", 0, at, pack_i32(ids[at : at + data.draw(st.integers(1, 5))]))
        at += len(row.ids) // 4
        ready: dict[str, PendingRow | TextRow] = {}
        said, pending = short.new_row(), long.new_row()
        if short.advance_plain(row, ready):
            num_short += 1
        else:
            short.advance(row, said)
            ready = {} if said.empty else {"r": said.to_wire()}
        long.advance(row, pending)
        assert ready == ({} if pending.empty else {"r": pending.to_wire()})
    assert num_short, "the first row can go the short way, whatever it holds"

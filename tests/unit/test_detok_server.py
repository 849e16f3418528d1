"""The detokenizer: one ending per request, text in whole characters, nothing of a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from common.inboxes import GATEWAY_STUCK_S
from common.messages import (
    BeginOutput,
    ErrorInfo,
    Finish,
    GatewayAddress,
    GatewayStuck,
    RefusedRow,
    StopHit,
    TextParams,
    TokenBatch,
    TokenLogprob,
    TokenRow,
    TopLogprobs,
    pack_f32,
    pack_i32,
    unpack_i32,
)
from detokenizer_proc.decoding import Vocabulary
from detokenizer_proc.outbox import Outbox
from detokenizer_proc.server import Detokenizer
from tests.unit.text_fakes import Channels, FakeSender, read, rows_of
from tests.unit.text_tokenizers import load

LENGTH = Finish("length")


class Bench:
    """A detokenizer with fake channels, and a scheduler's side to talk to it."""

    def __init__(self, family: str = "byte_level") -> None:
        self.tokenizer: Tokenizer = load(family)
        self.channels = Channels()
        self.scheduler = FakeSender()
        self.detokenizer = Detokenizer(
            Vocabulary(self.tokenizer), Outbox(self.channels.connect, self.channels.local, 3), self.scheduler
        )
        self.generation = 0
        self.now = 0.0

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def step(self, *rows: TokenRow, flush: bool = True, **fields: Any) -> None:
        self.detokenizer.handle(TokenBatch(scheduler_generation=self.generation, step=0, rows=list(rows), **fields))
        if flush:
            self.detokenizer.flush(self.now)

    def begin(self, rid: str = "r", gateway: str = "gateway-0", attempt: int = 0, **fields: Any) -> None:
        text = fields.pop("text", TextParams())
        self.step(begins=[BeginOutput(rid, attempt, gateway, 7, 4, text, **fields)])

    def gateway(self, name: str = "gateway-0") -> FakeSender:
        return self.channels.opened[name]

    def stream(self, ids: list[int], finish: Finish | None = LENGTH, rid: str = "r", attempt: int = 0) -> None:
        """One id a step; the finish with the last."""
        for n, token_id in enumerate(ids):
            last = finish if n == len(ids) - 1 else None
            self.step(TokenRow(rid, attempt, n, pack_i32([token_id]), finish=last))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_acceptance_is_sent_before_any_text(bench: Bench) -> None:
    bench.begin()
    (row,) = rows_of(bench.gateway())
    assert (row.accepted, row.text, row.ids, row.finish) == ((7, 4), "", b"", None)


def test_text_and_ids_of_a_stream_join_to_the_whole(bench: Bench) -> None:
    ids = bench.ids("Grüße 🙂 日本 end")
    bench.begin()
    bench.stream(ids)
    reader = read(bench.gateway())
    assert (reader.text, reader.ids) == ("Grüße 🙂 日本 end", ids)
    assert reader.rows[-1].finish == LENGTH
    assert reader.rows[-1].completion_tokens == len(ids)
    assert bench.detokenizer.num_live == 0
    assert not any("\ufffd" in row.text for row in reader.rows)


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(bench: Bench) -> None:
    prompt_and_output = bench.ids("tail 🧊")
    ids = [*prompt_and_output[-2:], *bench.ids("ok")]  # the prompt had the first bytes of the character
    bench.begin()
    bench.stream(ids)
    assert read(bench.gateway()).text == bench.tokenizer.decode(ids) == "\ufffd\ufffdok"


def test_state_is_kept_however_many_requests_live(bench: Bench) -> None:
    bench.begin("first")
    bench.stream(bench.ids("it is "), finish=None, rid="first")
    for n in range(3000):
        bench.begin(f"r{n}")
    assert bench.detokenizer.num_live == 3001
    rest = pack_i32(bench.ids("there"))
    bench.step(TokenRow("first", 0, len(bench.ids("it is ")), rest, finish=LENGTH))
    assert read(bench.gateway(), "first").text == "it is there"


def test_an_unfinished_character_is_flushed_at_the_end(bench: Bench) -> None:
    ids = bench.ids("a🧊")[:-1]
    bench.begin()
    bench.stream(ids)
    reader = read(bench.gateway())
    assert reader.text == bench.tokenizer.decode(ids) == "a\ufffd"
    assert reader.ids == ids


@pytest.mark.parametrize("family", ["byte_level", "llama"])
@pytest.mark.parametrize("stop", ["🧊", "is 🧊", "e🧊", "🧊!"])
def test_an_emoji_stop_string_is_found(family: str, stop: str) -> None:
    bench = Bench(family)
    text = "there is 🧊! more" if " " in stop else "there e🧊! more"
    ids = bench.ids(text)
    whole = bench.tokenizer.decode(ids)
    bench.begin(text=TextParams(stop=(stop,)))
    bench.stream(ids)
    reader = read(bench.gateway())
    assert reader.text == whole[: whole.index(stop)]
    assert reader.rows[-1].finish == Finish("stop", stop)
    (hit,) = bench.scheduler.sent
    # The first index at which decoding all ids so far shows the stop string.
    first = next(n for n in range(len(ids)) if stop in bench.tokenizer.decode(ids[: n + 1]))
    assert hit == StopHit(rid="r", attempt=0, index=first, stop=stop)
    assert reader.rows[-1].completion_tokens == first + 1


def test_nothing_of_a_stop_string_is_sent_before_it_is_complete(bench: Bench) -> None:
    bench.begin(text=TextParams(stop=("is over",)))
    bench.stream(bench.ids("It is over there"))
    reader = read(bench.gateway())
    assert reader.text == "It "
    assert all("is" not in row.text for row in reader.rows)


def test_held_text_is_released_when_it_was_no_stop_string(bench: Bench) -> None:
    bench.begin(text=TextParams(stop=("is over.",)))
    bench.stream(bench.ids("It is over there"))
    reader = read(bench.gateway())
    assert reader.text == "It is over there"
    assert reader.ids == bench.ids("It is over there")


def test_held_text_is_flushed_at_the_end(bench: Bench) -> None:
    bench.begin(text=TextParams(stop=("over there!",)))
    bench.stream(bench.ids("is over there"))
    assert read(bench.gateway()).text == "is over there"
    assert bench.scheduler.sent == []


def test_of_overlapping_stop_strings_the_first_complete_one_wins(bench: Bench) -> None:
    bench.begin(text=TextParams(stop=("quick brown fox", "brown", "rown f")))
    bench.stream(bench.ids("the quick brown fox"))
    reader = read(bench.gateway())
    assert reader.rows[-1].finish == Finish("stop", "brown")
    assert reader.text == "the quick "


def test_a_stop_string_can_be_kept_in_the_text(bench: Bench) -> None:
    bench.begin(text=TextParams(stop=("rown",), include_stop_str_in_output=True))
    bench.stream(bench.ids("the quick brown fox"))
    assert read(bench.gateway()).text == "the quick brown"


def test_usage_is_fixed_at_the_token_that_completed_the_stop_string(bench: Bench) -> None:
    ids = bench.ids("abcdefgh")
    bench.begin(text=TextParams(stop=("cd",)))
    bench.step(TokenRow("r", 0, 0, pack_i32(ids), finish=LENGTH))  # all in one row, and beyond the stop
    reader = read(bench.gateway())
    at = next(n for n in range(len(ids)) if "cd" in bench.tokenizer.decode(ids[: n + 1]))
    assert reader.rows[-1].completion_tokens == at + 1 < len(ids)
    assert reader.text == "ab"


def test_no_stop_hit_when_the_scheduler_ended_it_with_the_same_token(bench: Bench) -> None:
    ids = bench.ids("xyz")
    bench.begin(text=TextParams(stop=("z",)))
    bench.stream(ids, finish=LENGTH)
    assert read(bench.gateway()).rows[-1].finish == Finish("stop", "z")
    assert bench.scheduler.sent == []


def test_a_request_ends_once_whatever_follows(bench: Bench) -> None:
    bench.begin(text=TextParams(stop=("b",)))
    bench.stream(bench.ids("abc"), finish=None)
    bench.step(TokenRow("r", 0, 3, b"", finish=Finish("abort")))
    bench.step(TokenRow("r", 0, 3, pack_i32(bench.ids("d")), finish=LENGTH))
    assert [row.finish for row in rows_of(bench.gateway()) if row.finish] == [Finish("stop", "b")]


def test_the_text_of_the_stop_id_is_left_out_unless_asked_for(bench: Bench) -> None:
    end = bench.tokenizer.token_to_id("<|im_end|>")
    ids = [*bench.ids("fox"), end]
    for rid, params in {
        "shown": TextParams(skip_special_tokens=False),
        "kept": TextParams(skip_special_tokens=False, include_stop_str_in_output=True),
        "skipped": TextParams(),
    }.items():
        bench.begin(rid, text=params)
        bench.stream(ids, Finish("stop", end), rid)
    texts = {rid: read(bench.gateway(), rid).text for rid in ("shown", "kept", "skipped")}
    assert texts == {"shown": "fox", "kept": "fox<|im_end|>", "skipped": "fox"}
    assert read(bench.gateway(), "shown").ids == ids


def test_skip_special_tokens_is_each_requests_own(bench: Bench) -> None:
    ids = [*bench.ids("a"), bench.tokenizer.token_to_id("<|im_start|>"), *bench.ids("b")]
    bench.begin("plain")
    bench.begin("shown", text=TextParams(skip_special_tokens=False))
    for n, token_id in enumerate(ids):
        finish = LENGTH if n == len(ids) - 1 else None
        bench.step(*(TokenRow(rid, 0, n, pack_i32([token_id]), finish=finish) for rid in ("plain", "shown")))
    assert read(bench.gateway(), "plain").text == "ab"
    assert read(bench.gateway(), "shown").text == "a<|im_start|>b"


def test_one_message_per_step_and_gateway(bench: Bench) -> None:
    for n in range(6):
        bench.begin(f"r{n}", gateway=f"gateway-{n % 2}")
    before = [len(bench.gateway(f"gateway-{g}").sent) for g in (0, 1)]
    a = pack_i32(bench.ids("a"))
    bench.step(*(TokenRow(f"r{n}", 0, 0, a) for n in range(6)))
    assert [len(bench.gateway(f"gateway-{g}").sent) for g in (0, 1)] == [n + 1 for n in before]


def test_a_full_channel_loses_nothing_and_the_next_send_carries_all(bench: Bench) -> None:
    bench.begin()
    bench.gateway().room = 0
    ids = bench.ids("The quick 🙂 fox")
    bench.stream(ids[:-1], finish=None)
    assert len(bench.gateway().sent) == 1
    assert bench.detokenizer.waiting
    bench.gateway().room = None
    bench.step(TokenRow("r", 0, len(ids) - 1, pack_i32(ids[-1:]), finish=LENGTH))
    assert len(bench.gateway().sent) == 2
    assert read(bench.gateway()).text == "The quick 🙂 fox"
    assert not bench.detokenizer.waiting


def test_an_ending_waits_for_its_gateway(bench: Bench) -> None:
    bench.begin()
    bench.gateway().room = 0
    bench.stream(bench.ids("fox"))
    assert bench.detokenizer.num_live == 0
    bench.gateway().room = None
    bench.detokenizer.flush(1.0)
    assert read(bench.gateway()).rows[-1].finish == LENGTH


def test_a_step_of_very_many_rows_is_sent_in_several_messages(bench: Bench) -> None:
    params = TextParams()
    bench.step(begins=[BeginOutput(f"r{n}", 0, "gateway-0", 7, 0, params) for n in range(5000)])
    assert len(bench.gateway().sent) == 2
    assert {row.rid for row in rows_of(bench.gateway()) if row.accepted} == {f"r{n}" for n in range(5000)}


def test_one_gateways_full_channel_does_not_stop_another(bench: Bench) -> None:
    bench.begin("a", "gateway-0")
    bench.begin("b", "gateway-1")
    bench.gateway("gateway-0").room = 0
    x = pack_i32(bench.ids("x"))
    bench.step(TokenRow("a", 0, 0, x), TokenRow("b", 0, 0, x))
    assert read(bench.gateway("gateway-1"), "b").text == "x"


def test_a_gateway_that_stays_full_is_declared_gone(bench: Bench) -> None:
    bench.begin("a", "gateway-0")
    bench.begin("b", "gateway-1")
    bench.gateway("gateway-0").room = 0
    x = pack_i32(bench.ids("x"))
    bench.step(TokenRow("a", 0, 0, x))
    bench.now = GATEWAY_STUCK_S
    bench.step()
    assert bench.scheduler.sent == []
    bench.now = GATEWAY_STUCK_S + 0.1
    bench.step()
    assert bench.scheduler.sent == [GatewayStuck(gateway="gateway-0")]
    assert bench.detokenizer.num_live == 1
    assert bench.gateway("gateway-0").closed
    bench.step(TokenRow("a", 0, 1, x), TokenRow("b", 0, 0, x))
    assert read(bench.gateway("gateway-1"), "b").text == "x"


def test_requests_of_a_gateway_whose_lease_ran_out_are_forgotten(bench: Bench) -> None:
    bench.begin("a", "gateway-0")
    bench.begin("b", "gateway-1")
    bench.step(gone_gateways=["gateway-0"])
    bench.step(TokenRow("a", 0, 0, pack_i32(bench.ids("x")), finish=LENGTH))
    assert bench.detokenizer.num_live == 1
    assert [row.finish for row in rows_of(bench.gateway("gateway-0"))] == [None]


def test_late_news_of_a_gone_gateway_does_not_hurt_its_successors_requests(bench: Bench) -> None:
    bench.step(gone_gateways=["gateway-0"], begins=[BeginOutput("new", 0, "gateway-0", 7, 4, TextParams())])
    bench.detokenizer.handle(GatewayAddress(gateway="gateway-0", address="", gone=True))
    bench.stream(bench.ids("fox"), rid="new")
    assert read(bench.gateway(), "new").text == "fox"


def test_a_stop_hit_is_repeated_until_the_scheduler_takes_it(bench: Bench) -> None:
    bench.scheduler.room = 0
    bench.begin(text=TextParams(stop=("b",)))
    bench.stream(bench.ids("ab"), finish=None)
    assert bench.detokenizer.waiting
    bench.scheduler.room = None
    bench.detokenizer.flush(0.0)
    assert [type(message) for message in bench.scheduler.sent] == [StopHit]


def test_a_higher_attempt_begins_again_at_index_0(bench: Bench) -> None:
    ids = bench.ids("The quick fox")
    bench.begin()
    bench.stream(ids[:2], finish=None)
    bench.begin(attempt=1)
    bench.step(TokenRow("r", 0, 2, pack_i32(ids[2:]), finish=LENGTH))  # of the attempt before: dropped
    bench.step(TokenRow("r", 1, 0, pack_i32(ids), finish=LENGTH))
    rows = [row for row in rows_of(bench.gateway()) if row.attempt == 1]
    assert rows[0].accepted == (7, 4)
    assert (rows[-1].index, rows[-1].text_offset, rows[-1].text) == (0, 0, "The quick fox")
    assert [row.attempt for row in rows_of(bench.gateway()) if row.finish] == [1]


def test_a_lower_attempt_is_dropped(bench: Bench) -> None:
    bench.begin(attempt=2)
    bench.begin(attempt=1)
    bench.step(TokenRow("r", 1, 0, pack_i32(bench.ids("no")), finish=LENGTH))
    bench.step(TokenRow("r", 2, 0, pack_i32(bench.ids("yes")), finish=LENGTH))
    assert "".join(row.text for row in rows_of(bench.gateway())) == "yes"


def test_a_stop_string_found_again_ends_the_new_attempt_too(bench: Bench) -> None:
    for attempt in (0, 1):
        bench.begin(attempt=attempt, text=TextParams(stop=("b",)))
        bench.step(TokenRow("r", attempt, 0, pack_i32(bench.ids("abc"))))
    assert [(r.attempt, r.finish) for r in rows_of(bench.gateway()) if r.finish] == [
        (0, Finish("stop", "b")), (1, Finish("stop", "b")),
    ]  # fmt: skip


def test_a_new_scheduler_takes_over_and_the_old_ones_messages_are_dropped(bench: Bench) -> None:
    bench.begin("old")
    bench.generation = 1
    bench.begin("new")
    assert bench.detokenizer.num_live == 1
    bench.generation = 0
    bench.begin("late")
    assert bench.detokenizer.num_live == 1


def test_repeated_ids_are_taken_once(bench: Bench) -> None:
    ids = bench.ids("quick brown")
    bench.begin()
    bench.step(TokenRow("r", 0, 0, pack_i32(ids[:2])))
    bench.step(TokenRow("r", 0, 1, pack_i32(ids[1:]), finish=LENGTH))
    assert read(bench.gateway()).text == "quick brown"


def test_lost_ids_end_that_request_with_an_error(bench: Bench) -> None:
    bench.begin()
    bench.begin("other")
    x = pack_i32(bench.ids("x"))
    bench.step(TokenRow("r", 0, 3, x), TokenRow("other", 0, 0, x))
    finish = read(bench.gateway()).rows[-1].finish
    assert finish is not None and finish.error is not None
    assert (finish.reason, finish.error.status) == ("error", 500)
    assert bench.detokenizer.num_live == 1


def test_a_refusal_is_passed_on_once_however_often_it_is_repeated(bench: Bench) -> None:
    finish = Finish("error", None, ErrorInfo(status=503, message="full"))
    bench.begin("live")
    bench.gateway().room = 0
    for _ in range(3):
        bench.step(refused=[RefusedRow("r", 1, "gateway-0", finish)])
    bench.gateway().room = None
    bench.detokenizer.flush(0.0)
    (row,) = [row for row in rows_of(bench.gateway()) if row.rid == "r"]
    assert (row.attempt, row.finish, row.accepted) == (1, finish, None)


def test_a_refused_duplicate_does_not_touch_the_live_request(bench: Bench) -> None:
    bench.begin("r", "gateway-0")
    bench.step(refused=[RefusedRow("r", 0, "gateway-1", Finish("error", None, ErrorInfo(status=409, message="dup")))])
    bench.stream(bench.ids("fox"))
    assert read(bench.gateway("gateway-0")).text == "fox"
    assert [
        row.finish.error.status for row in rows_of(bench.gateway("gateway-1")) if row.finish and row.finish.error
    ] == [409]


def test_a_gateway_is_reached_where_it_was_announced(bench: Bench) -> None:
    bench.detokenizer.handle(GatewayAddress(gateway="gateway-9", address="tcp://10.0.0.9:5"))
    bench.begin("r", "gateway-9")
    bench.detokenizer.handle(GatewayAddress(gateway="gateway-9", address="tcp://10.0.0.9:5"))
    assert bench.channels.addresses == [("gateway-9", "tcp://10.0.0.9:5")]


def test_logprobs_travel_with_their_ids(bench: Bench) -> None:
    ids = bench.ids("a🧊")
    bench.begin(logprobs=1, text=TextParams(stop=("zz",)))
    for n, token_id in enumerate(ids):
        top = TopLogprobs(pack_i32([ids[0]]), pack_f32([-0.5]))
        bench.step(
            TokenRow("r", 0, n, pack_i32([token_id]), pack_f32([-float(n)]), [top],
                     finish=LENGTH if n == len(ids) - 1 else None)
        )  # fmt: skip
    reader = read(bench.gateway())
    assert [entry.logprob for entry in reader.logprobs] == [-float(n) for n in range(len(ids))]
    assert b"".join(entry.data for entry in reader.logprobs) == "a🧊".encode()
    assert all(len(row.logprobs) == len(row.ids) // 4 for row in reader.rows)
    assert reader.logprobs[0].token == "a"
    assert reader.logprobs[1].token == "\ufffd"
    assert reader.logprobs[1].top == [("a", b"a", -0.5)]
    assert [entry.token_id for entry in reader.logprobs] == ids
    assert unpack_i32(reader.logprobs[1].top_ids).tolist() == bench.ids("a")


def test_a_prompt_of_one_token_has_an_entry_too(bench: Bench) -> None:
    bench.begin("r", logprobs=0, prompt_ids=pack_i32([5]))
    bench.step(TokenRow("r", 0, 0, pack_i32([6]), logprobs=pack_f32([-1.0])))
    bench.step(TokenRow("r", 0, 1, pack_i32([7]), logprobs=pack_f32([-1.0]), finish=LENGTH))
    rows = read(bench.gateway()).rows
    assert [row.prompt_logprobs for row in rows if row.prompt_logprobs] == [
        [TokenLogprob(*Vocabulary(bench.tokenizer).show(5), None, token_id=5)]
    ]


def test_prompt_logprobs_have_one_entry_per_prompt_token(bench: Bench) -> None:
    prompt = bench.ids("The fox")
    bench.begin(prompt_ids=pack_i32(prompt), logprobs=0)
    values = [-1.0 - n for n in range(len(prompt) - 1)]
    bench.step(TokenRow("r", 0, 0, b"", prompt_logprobs=pack_f32(values), finish=LENGTH))
    entries = read(bench.gateway()).rows[-1].prompt_logprobs
    assert [entry.logprob for entry in entries] == [None, *values]
    assert [entry.token_id for entry in entries] == prompt
    assert (
        b"".join(entry.data for entry in entries[1:])
        == bench.tokenizer.decode(prompt)[len(bench.tokenizer.decode(prompt[:1])) :].encode()
    )


def test_an_abort_flushes_the_text_so_far(bench: Bench) -> None:
    bench.begin(text=TextParams(stop=("over!",)))
    bench.stream(bench.ids("is over"), finish=None)
    bench.step(TokenRow("r", 0, len(bench.ids("is over")), b"", finish=Finish("abort")))
    reader = read(bench.gateway())
    assert reader.text == "is over"
    assert reader.rows[-1].finish == Finish("abort")

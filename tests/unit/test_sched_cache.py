"""Prefixes: reused, shared while they are computed, copied when partial, kept apart, flushed."""

from __future__ import annotations

import pytest

from common.messages import Control, unpack_i32
from tests.unit.sched_support import GATEWAY, PAGE, Rig, expected, request, rows

LONG = list(range(20, 41))
"""21 tokens: five full pages and one token."""


def flush(timeout_s: float = 0.0, name: str = "f") -> Control:
    return Control(request_id=name, gateway=GATEWAY, action="flush_cache", timeout_s=timeout_s)


def test_the_second_request_computes_only_what_is_new() -> None:
    rig = Rig()
    rig.step(request("a", LONG))
    rig.finish()
    batch, _ = rig.step(request("b", LONG))
    assert batch.begins[0].computed_len == 20 and rows(batch)[0][1] == 1
    assert unpack_i32(batch.begins[0].pages).tolist()[:5] == [0, 1, 2, 3, 4]
    rig.finish()
    assert rig.reader.streams["b"].accepted == (21, 20)
    assert rig.ids("b") == expected(LONG, 8)


def test_the_answer_is_cached_as_well_as_the_prompt() -> None:
    rig = Rig()
    rig.step(request("a", LONG, max_tokens=8))
    rig.finish()
    turn = LONG + expected(LONG, 8) + [99, 98]
    rig.step(request("b", turn))
    # 21 + 8 tokens, of which the last was never computed: seven full pages.
    assert rig.reader.streams["b"].accepted == (31, 28)


def test_a_whole_cached_prompt_still_computes_its_last_token() -> None:
    rig = Rig()
    rig.step(request("a", LONG[:16]))
    rig.finish()
    batch, _ = rig.step(request("b", LONG[:16]))
    assert batch.begins[0].computed_len == 12 and rows(batch)[0][1] == 4


def test_disabled_nothing_is_reused() -> None:
    rig = Rig(radix=False)
    rig.step(request("a", LONG))
    rig.finish()
    rig.step(request("b", LONG))
    assert rig.reader.streams["b"].accepted == (21, 0)


def test_salts_are_kept_apart() -> None:
    rig = Rig()
    rig.step(request("a", LONG, cache_salt="x"))
    rig.finish()
    rig.step(request("b", LONG, cache_salt="y"), request("c", LONG, cache_salt="x"))
    assert rig.reader.streams["b"].accepted == (21, 0)
    assert rig.reader.streams["c"].accepted == (21, 20)


def test_a_prompt_is_shared_as_soon_as_it_is_computed() -> None:
    rig = Rig()
    rig.step(request("a", LONG, max_tokens=50))
    rig.turn()
    rig.turn(request("b", LONG))
    assert rig.reader.streams["b"].accepted == (21, 20)


def test_waiting_requests_wait_for_a_prefix_another_computes_and_the_rest_of_the_queue_does_not() -> None:
    rig = Rig()
    batch, *_ = rig.step(request("a", LONG), request("b", [*LONG[:18], 1]), request("c", [5] * 6))
    assert [begin.rid for begin in batch.begins] == ["a", "c"]
    rig.turn()
    assert rig.reader.streams["b"].accepted == (19, 16)
    rig.finish()
    assert rig.ids("b") == expected([*LONG[:18], 1], 8)


def test_a_long_prefix_is_waited_for_chunk_by_chunk() -> None:
    rig = Rig(chunked_prefill_size=8)
    long = list(range(20, 80))
    rig.step(request("a", long, max_tokens=1), request("b", [*long, 7], max_tokens=1))
    rig.finish()
    assert rig.reader.streams["b"].accepted == (61, 56), "for a single page more it does not wait"
    assert rig.scheduler.state.metrics.num_prefill_tokens_total == 60 + 5


def test_nobody_waits_for_a_request_that_was_aborted() -> None:
    rig = Rig(chunked_prefill_size=8)
    rig.step(request("a", LONG), request("b", LONG))
    rig.abort("a")
    rig.finish()
    assert rig.ids("b") == expected(LONG, 8)


def test_samples_share_full_pages_and_copy_the_partial_one() -> None:
    rig = Rig()
    prompt = LONG[:19]
    rig.step(*(request(f"s{i}", prompt, group="g") for i in range(3)))
    (batch,) = rig.turn()
    assert [begin.rid for begin in batch.begins] == ["s1", "s2"]
    assert [begin.computed_len for begin in batch.begins] == [18, 18]
    leader = [0, 1, 2, 3, 4]
    tables = [unpack_i32(begin.pages).tolist() for begin in batch.begins]
    assert [table[:4] for table in tables] == [leader[:4]] * 2
    copies = unpack_i32(batch.copies).reshape(-1, 2).tolist()
    assert copies == [[4, tables[0][4]], [4, tables[1][4]]]
    assert [chunk for _, chunk, _ in rows(batch)] == [0, 1, 1]
    rig.finish()
    assert all(rig.ids(f"s{i}") == expected(prompt, 8) for i in range(3))
    assert rig.free + rig.cached == 64


def test_the_source_of_a_copy_is_held_until_the_copy_is_made() -> None:
    rig = Rig(radix=True)
    prompt = LONG[:19]
    rig.step(*(request(f"s{i}", prompt, group="g", max_tokens=40) for i in range(2)))
    rig.turn()
    rig.abort("s0")
    rig.finish()
    assert rig.ids("s1") == expected(prompt, 40)


def test_prompt_logprobs_bypass_the_cache_and_are_collected_over_chunks() -> None:
    rig = Rig(chunked_prefill_size=8)
    rig.step(request("a", LONG))
    rig.finish()
    rig.step(request("b", LONG, prompt_logprobs=2, logprobs=0))
    rig.finish()
    stream = rig.reader.streams["b"]
    assert stream.accepted == (21, 0)
    assert stream.prompt_logprobs == [-token / 256 for token in LONG[1:]]
    assert stream.ids == expected(LONG, 8)


def test_flush_empties_the_cache_of_an_idle_engine() -> None:
    rig = Rig()
    rig.step(request("a", LONG))
    rig.finish()
    rig.step(flush())
    ((_, reply),) = rig.out.replies
    assert reply.status == 200 and reply.body["flushed_pages"] == 7
    assert rig.free == 64


def test_flush_is_409_while_busy_and_waits_if_asked() -> None:
    rig = Rig()
    rig.step(request("a", LONG))
    rig.step(flush(0.0, "now"), flush(60.0, "later"), flush(0.02, "briefly"))
    assert [(reply.request_id, reply.status) for _, reply in rig.out.replies] == [("now", 409)]
    answers = {}
    while len(answers) < 2:
        rig.turn()
        answers |= {reply.request_id: reply.status for _, reply in rig.out.replies}
    assert answers == {"briefly": 409, "later": 200}
    assert rig.ids("a") == expected(LONG, 8) and rig.free == 64


@pytest.mark.parametrize("ending", ["length", "stop"])
def test_flush_right_after_an_answer_waits_for_the_batches_that_are_still_out(ending: str) -> None:
    rig = Rig()
    eos = (expected(LONG, 8)[3],) if ending == "stop" else ()
    rig.step(request("a", LONG, eos_token_ids=eos))
    while rig.reason("a") is None:
        rig.turn()
    pool = rig.scheduler.state.need_pool()
    assert rig.reason("a") == ending and pool.in_flight
    rig.step(flush(0.0))
    assert rig.out.replies == [] and rig.out.wake_at > rig.now, "it is the batch that is waited for, and no clock"
    while not rig.out.replies:
        assert pool.in_flight
        rig.turn()
    ((_, reply),) = rig.out.replies
    assert reply.status == 200 and reply.body["flushed_pages"] > 0
    assert rig.free == 64


def test_flush_that_waits_for_a_batch_is_409_once_a_request_runs_again() -> None:
    rig = Rig()
    rig.step(request("a", LONG))
    while rig.reason("a") is None:
        rig.turn()
    rig.step(flush(0.0))
    rig.step(request("b", LONG))
    ((_, reply),) = rig.out.replies
    assert reply.status == 409 and "1 requests run and 0 wait" in reply.body["error"]


def test_least_recently_used_prefixes_make_room() -> None:
    rig = Rig(pages=12)
    for i, name in enumerate("abc"):
        rig.step(request(name, [30 + i] * 13, max_tokens=1))
        rig.finish()
    assert (rig.free, rig.cached) == (3, 9)
    rig.step(request("d", [40] * 13, max_tokens=1))
    rig.finish()
    rig.step(request("again", [31] * 13, max_tokens=1), request("gone", [30] * 13, max_tokens=1))
    assert rig.reader.streams["again"].accepted == (13, 3 * PAGE)
    assert rig.reader.streams["gone"].accepted == (13, 2 * PAGE), "the oldest lost its last page"

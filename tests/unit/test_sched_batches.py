"""What is in each batch: chunks, decoding rows, pages, ends; two batches in flight."""

from __future__ import annotations

import pytest

from common.messages import unpack_i32
from scheduler_proc.cost import TARGET_RATIO, StepCost, TokenCost
from tests.unit.sched_support import PAGE, Rig, expected, request, rows

P6 = [7, 8, 9, 10, 11, 12]


def test_a_request_begins_with_its_pages_and_decodes_in_the_batch_sent_while_the_first_runs() -> None:
    rig = Rig()
    first, second = rig.step(request("a", P6))
    begin = first.begins[0]
    assert (begin.slot, begin.computed_len, begin.prompt_len) == (0, 0, 6)
    assert unpack_i32(begin.pages).tolist() == [0, 1]
    assert rows(first) == [(0, 6, 0)]
    assert second.begins == [] and rows(second) == [(0, 0, 0)], "position 6 is in page 1 already"
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)


def test_no_third_batch_until_one_returns() -> None:
    rig = Rig()
    assert len(rig.step(request("a", P6))) == 2
    assert rig.step() == []
    assert len(rig.turn()) == 1


def test_without_overlap_one_batch_is_in_flight() -> None:
    rig = Rig(disable_overlap_schedule=True)
    assert len(rig.step(request("a", P6))) == 1
    assert rig.step() == []
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)


def test_at_most_max_batches_and_wake_at_once_for_the_next() -> None:
    rig = Rig()
    assert len(rig.step(request("a", P6), max_batches=1)) == 1
    assert rig.out.wake_at == rig.now
    assert len(rig.step(max_batches=1)) == 1
    assert rig.out.wake_at > rig.now


def test_a_decoding_row_gets_a_page_exactly_when_its_next_position_needs_one() -> None:
    rig = Rig()
    batches = rig.step(request("a", P6, max_tokens=8))
    grown = {}
    for _ in range(12):
        for batch in batches:
            for _, _chunk, new in rows(batch):
                if new:
                    grown[batch.step] = unpack_i32(batch.new_pages).tolist()
        batches = rig.turn()
    # Step 1 computes 0..5, step 2 position 6, step 3 position 7, step 4 position 8: the third page.
    assert grown == {4: [2], 8: [3]}


def test_never_schedules_past_max_tokens() -> None:
    rig = Rig()
    sent = rig.step(request("a", P6, max_tokens=3))
    for _ in range(8):
        sent += rig.turn()
    assert sum(len(rows(batch)) for batch in sent) == 3
    assert rig.reason("a") == "length"


def test_the_end_is_told_to_the_worker_and_the_slot_used_again_later() -> None:
    rig = Rig(slots=1)
    rig.step(request("a", P6, max_tokens=1), request("b", P6, max_tokens=1))
    ended, begun = [], []
    for _ in range(8):
        for batch in rig.turn():
            ended += [batch.step] * len(batch.ends)
            begun += [(batch.step, begin.rid) for begin in batch.begins]
    assert begun[0][1] == "b" and begun[0][0] > ended[0]
    assert rig.ids("b") == expected(P6, 1)


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    rig = Rig(chunked_prefill_size=8)
    rig.step(request("a", P6, max_tokens=20))
    rig.turn()
    long = list(range(20, 41))
    seen = [rows(batch) for batch in rig.turn(request("b", long))]
    for _ in range(3):
        seen += [rows(batch) for batch in rig.turn()]
    assert [[chunk for _, chunk, _ in batch] for batch in seen] == [[0, 8], [0, 8], [0, 5], [0, 0]]
    rig.finish()
    assert rig.ids("a") == expected(P6, 20) and rig.ids("b") == expected(long, 8)


def test_one_prompt_at_most_is_carried_over_half_computed() -> None:
    rig = Rig(chunked_prefill_size=8)
    batches = rig.step(*(request(f"r{i}", [i + 1] * 7, max_tokens=1) for i in range(4)))
    for _ in range(8):
        batches += rig.turn()
    chunks = [[(slot, chunk) for slot, chunk, _ in rows(batch)] for batch in batches if rows(batch)]
    assert chunks == [[(0, 7), (1, 1)], [(1, 6), (2, 2)], [(2, 5), (3, 3)], [(3, 4)]]


def test_a_grammar_row_has_room_for_forced_ids_and_all_of_them_come_out() -> None:
    rig = Rig(pages=128)
    first, *_ = rig.step(request("a", P6, max_tokens=40, forced=9))
    rig.finish()
    assert rig.ids("a") == expected(P6, 40)
    assert rig.scheduler.state.metrics.num_steps_total < 30, "ten ids a step, not one"
    assert first.begins[0].grammar is not None


def test_max_tokens_cuts_a_forced_run() -> None:
    rig = Rig()
    rig.step(request("a", P6, max_tokens=7, forced=30))
    rig.finish()
    assert rig.ids("a") == expected(P6, 7)
    assert rig.reason("a") == "length"


def test_stop_ids_end_with_the_id_that_matched() -> None:
    ids = expected(P6, 5)
    rig = Rig()
    rig.step(request("a", P6, stop_token_ids=(ids[2],)), request("b", P6, eos_token_ids=(ids[1],)))
    rig.finish()
    assert rig.ids("a") == ids[:3] and rig.ids("b") == ids[:2]
    finish = rig.reader.streams["a"].finish
    assert finish is not None and (finish.reason, finish.matched) == ("stop", ids[2])


def test_more_stop_ids_than_columns_work_too() -> None:
    ids = expected(P6, 5)
    rig = Rig()
    rig.step(request("a", P6, stop_token_ids=(*range(500, 511), ids[3])))
    rig.finish()
    assert rig.ids("a") == ids[:4]


def test_logprobs_stay_aligned_with_ids() -> None:
    rig = Rig(pages=20)
    rig.step(*(request(f"r{i}", [*P6, i], max_tokens=20, logprobs=i % 3) for i in range(4)))
    rig.finish()
    for i in range(4):
        stream = rig.reader.streams[f"r{i}"]
        assert stream.ids == expected([*P6, i], 20)
        assert stream.logprobs == [-token / 256 for token in stream.ids]


def test_pages_come_back_when_the_last_row_in_flight_has_returned() -> None:
    rig = Rig(radix=False)
    rig.step(request("a", P6, max_tokens=50))
    for _ in range(4):
        rig.turn()
    rig.abort("a")
    assert rig.reason("a") == "abort", "the client hears of it at once"
    assert rig.free < 64, "two batches that write to its pages are in flight"
    rig.work()
    rig.step()
    assert rig.free < 64
    rig.work()
    rig.step()
    assert rig.free == 64


def test_idle_sends_nothing_and_sleeps() -> None:
    rig = Rig()
    rig.step(request("a", P6))
    rig.finish()
    rig.step(seconds=0.001)
    assert rig.step(seconds=0.001) == [] and rig.out.tokens is None
    assert rig.out.wake_at - rig.now > 0.1
    assert PAGE == 4


STEP_S = 0.01
TOKEN_S = (TARGET_RATIO - 1) * STEP_S / 100.5
"""Beside one row that takes ``STEP_S``: 100 tokens, and 133 at the end of a prompt."""


def chunks_of(rig: Rig, num_tokens: int) -> list[int]:
    """Prefill chunks of a prompt that arrives while another request decodes."""
    found: list[int] = []
    rig.scheduler.state.cost = StepCost({1: STEP_S}, TokenCost(TOKEN_S))
    rig.step(request("b", list(range(100, 100 + num_tokens)), max_tokens=2))
    for _ in range(12):
        for order in rig.turn():
            found += [n for n in unpack_i32(order.num_tokens).tolist() if n]
    return found


@pytest.mark.parametrize(("num_tokens", "chunks"), [(120, [120]), (133, [133]), (140, [100, 40]), (233, [100, 133])])
def test_the_end_of_a_prompt_is_not_left_for_a_step_of_its_own(num_tokens: int, chunks: list[int]) -> None:
    rig = Rig(pages=256, chunked_prefill_size=0)
    rig.step(request("a", P6, max_tokens=200))
    rig.turn()
    assert chunks_of(rig, num_tokens) == chunks


@pytest.mark.parametrize(("num_tokens", "chunks"), [(120, [120]), (140, [95, 45]), (350, [95, 95, 95, 65])])
def test_a_step_with_a_chunk_fills_the_tiles_of_the_worker(num_tokens: int, chunks: list[int]) -> None:
    rig = Rig(pages=256, chunked_prefill_size=0, tile_tokens=12)
    rig.step(request("a", P6, max_tokens=200))
    rig.turn()
    assert chunks_of(rig, num_tokens) == chunks
    rig.finish()
    assert rig.ids("b") == expected(list(range(100, 100 + num_tokens)), 2)


@pytest.mark.parametrize("tile_tokens", [0, 1])
def test_chunks_are_whole_pages_where_no_tile_is_known(tile_tokens: int) -> None:
    rig = Rig(pages=256, chunked_prefill_size=0, tile_tokens=tile_tokens)
    rig.step(request("a", P6, max_tokens=200))
    rig.turn()
    assert chunks_of(rig, 350) == [100, 100, 100, 50]


def test_prompts_that_share_a_step_fill_its_tiles_together() -> None:
    rig = Rig(pages=256, chunked_prefill_size=0, tile_tokens=12)
    rig.step(request("a", P6, max_tokens=200))
    rig.turn()
    rig.scheduler.state.cost = StepCost({1: STEP_S}, TokenCost(TOKEN_S))
    rig.step(*(request(f"b{i}", list(range(100 * i, 100 * i + n)), 2) for i, n in enumerate((23, 41, 70, 19), 1)))
    chunks = [[n for _, n, _ in rows(batch)] for _ in range(12) for batch in rig.turn()]
    assert [sorted(step) for step in chunks if any(step)] == [[0, 23, 31, 41], [0, 0, 0, 19, 39]], "96; what is left"
    rig.finish()
    assert rig.ids("b3") == expected(list(range(300, 370)), 2)


def test_a_configured_chunk_size_is_obeyed_whatever_the_tiles() -> None:
    rig = Rig(pages=256, chunked_prefill_size=50, tile_tokens=12)
    rig.step(request("a", P6, max_tokens=200))
    rig.turn()
    assert chunks_of(rig, 120) == [50, 50, 20]


def test_the_deeper_a_prompt_the_smaller_its_chunks() -> None:
    rig = Rig(pages=256, chunked_prefill_size=0)
    rig.step(request("a", P6, max_tokens=200))
    rig.turn()
    rig.scheduler.state.cost = StepCost({1: STEP_S}, TokenCost(TOKEN_S, TOKEN_S / 200))
    rig.step(request("b", list(range(100, 500)), max_tokens=2))
    chunks, start = [], 0
    for _ in range(12):
        for order in rig.turn():
            [n] = [n for n in unpack_i32(order.num_tokens).tolist() if n] or [0]
            assert rig.scheduler.state.need_pool().in_flight[-1].prefill_context == sum(range(start, start + n))
            chunks.append(n)
            start += n
    assert start == 400
    whole = chunks[: chunks.index(0) - 1]
    assert len(whole) > 3 and whole == sorted(whole, reverse=True) and whole[0] > 1.5 * whole[-1]

"""Acceptance, refusal, repetition, and every way a request can end before its time."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import Abort, Control, Fleet, ForwardBatch, StopHit, Tokenized, pack_i32, unpack_i32
from scheduler_proc.ingest import ANY_ATTEMPT
from tests.unit.sched_support import Rig, expected, request

P6 = [7, 8, 9, 10, 11, 12]


def again(message: Tokenized, output_ids: list[int]) -> Tokenized:
    return msgspec.structs.replace(message, attempt=message.attempt + 1, output_ids=pack_i32(output_ids))


def test_accepts_when_it_is_first_scheduled_and_says_what_was_cached() -> None:
    rig = Rig()
    rig.step(request("a", P6))
    assert rig.reader.streams["a"].accepted == (6, 0)
    rig.finish()
    rig.step(request("b", P6))
    assert rig.reader.streams["b"].accepted == (6, 4)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(pages=10)
    rig.step(request("a", [1] * 41, max_tokens=1))
    assert rig.status("a") == 400
    assert "41 tokens" in rig.refused[0].finish.message and "holds 40" in rig.refused[0].finish.message
    error = rig.refused[0].finish.error
    assert error is not None and error.param == "prompt", "the gateway knows what its endpoint calls it"


def test_more_than_the_context_is_refused_with_the_numbers() -> None:
    rig = Rig(context_len=32)
    rig.step(request("a", P6, max_tokens=27))
    assert rig.status("a") == 400
    assert "33 tokens" in rig.refused[0].finish.message and "32" in rig.refused[0].finish.message


def test_what_cannot_fit_is_found_out_when_the_worker_comes_late() -> None:
    rig = Rig(pages=10, start=False)
    rig.step(request("a", [1] * 41, max_tokens=1), request("b", P6, max_tokens=2))
    assert rig.refused == []
    rig.step(rig.worker.ready())
    rig.finish()
    assert rig.status("a") == 400 and rig.ids("b") == expected(P6, 2)


def test_a_full_queue_answers_503_with_retry_after() -> None:
    rig = Rig(max_running_requests=1, max_queued_requests=2)
    rig.step(*(request(f"r{i}", P6) for i in range(4)))
    assert [row.rid for row in rig.refused] == ["r3"]
    error = rig.refused[0].finish.error
    assert error is not None and error.status == 503 and error.retry_after_s and "2" in error.message


def test_a_flood_beyond_the_queue_costs_those_who_run_no_step() -> None:
    calm, flooded = (Rig(max_running_requests=2, max_queued_requests=2) for _ in range(2))
    batches: list[list[list[ForwardBatch]]] = [[], []]
    for rig, seen in zip((calm, flooded), batches, strict=True):
        rig.step(*(request(rid, P6, 20) for rid in ("a", "b", "c", "d")))
        for turn in range(60):
            flood = [request(f"x{turn}-{n}", [9] * 40) for n in range(30)] if rig is flooded and turn < 15 else []
            seen.append(rig.turn(*flood))
    assert batches[0] == batches[1], "the same rows in the same steps"
    assert all(flooded.ids(rid) == expected(P6, 20) for rid in ("a", "b", "c", "d"))
    assert flooded.scheduler.state.metrics.num_aborted == {"queue_full": 15 * 30}


def test_an_empty_prompt_is_refused() -> None:
    rig = Rig()
    rig.step(request("a", []))
    assert rig.status("a") == 400


def test_draining_refuses_what_is_new_and_finishes_what_is_not() -> None:
    rig = Rig()
    rig.step(request("a", P6))
    rig.step(Fleet(generations={}, draining=True), request("b", P6), again(request("c", P6), []))
    rig.finish()
    assert rig.status("b") == 503
    assert rig.ids("a") == rig.ids("c") == expected(P6, 8)


def test_a_repeated_message_is_dropped() -> None:
    rig = Rig()
    rig.step(request("a", P6), request("a", P6))
    rig.step(request("a", P6))
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)
    assert rig.scheduler.state.metrics.num_requests_total == 1


def test_a_rid_in_use_by_another_gateway_is_refused_to_that_gateway_only() -> None:
    rig = Rig()
    rig.step(request("a", P6))
    out = rig.scheduler.step([request("a", P6, gateway="gateway-1")], rig.now)
    assert out.tokens is not None
    (row,) = out.tokens.refused
    assert (row.gateway, row.finish.reason) == ("gateway-1", "error")
    assert row.finish.error is not None and row.finish.error.status == 409


def test_a_higher_attempt_gets_everything_again_from_index_0() -> None:
    rig = Rig()
    message = request("a", P6)
    rig.step(message)
    for _ in range(4):
        rig.turn()
    before = list(rig.ids("a"))
    assert len(before) >= 2
    rig.step(again(message, before[:1]))
    stream = rig.reader.streams["a"]
    assert stream.attempt == 1 and stream.ids == before
    rig.step(message)
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)


def test_a_waiting_request_takes_a_higher_attempt_in_silence() -> None:
    rig = Rig(max_running_requests=1)
    message = request("b", P6)
    rig.step(request("a", [5] * 6), message)
    rig.step(again(message, []))
    rig.finish()
    assert rig.reader.streams["b"].attempt == 1 and rig.ids("b") == expected(P6, 8)


def test_an_unknown_resubmission_goes_on_where_it_was() -> None:
    rig = Rig()
    ids = expected(P6, 8)
    rig.step(again(request("a", P6), ids[:5]))
    assert rig.ids("a") == ids[:5], "the new detokenizer needs them from the start"
    rig.finish()
    assert rig.ids("a") == ids and rig.reader.streams["a"].accepted == (6, 0)


@pytest.mark.parametrize(("eos", "reason"), [(True, "stop"), (False, "length")])
def test_a_resubmission_whose_ids_are_complete_ends_at_once(eos: bool, reason: str) -> None:
    ids = expected(P6, 3)
    rig = Rig()
    batches = rig.step(again(request("a", P6, max_tokens=3, eos_token_ids=(ids[2],) if eos else ()), ids))
    assert batches == [] and rig.ids("a") == ids and rig.reason("a") == reason


def test_no_tokens_asked_for_none_given() -> None:
    rig = Rig()
    assert rig.step(request("a", P6, max_tokens=0)) == []
    assert rig.reason("a") == "length" and rig.reader.streams["a"].accepted == (6, 0)


def test_prompt_logprobs_with_no_tokens_compute_the_prompt_only() -> None:
    rig = Rig()
    rig.step(request("a", P6, max_tokens=0, prompt_logprobs=0))
    rig.finish()
    stream = rig.reader.streams["a"]
    assert stream.ids == [] and rig.reason("a") == "length"
    assert stream.prompt_logprobs == [-token / 256 for token in P6[1:]]


def test_aborting_in_the_queue_ends_it_there() -> None:
    rig = Rig(max_running_requests=1)
    rig.step(request("a", P6), request("b", P6))
    rig.abort("b")
    assert rig.reason("b") == "abort" and rig.reader.streams["b"].refused
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)


def test_aborting_between_two_chunks_gives_all_pages_back() -> None:
    rig = Rig(chunked_prefill_size=4, radix=False)
    rig.step(request("a", list(range(30)), max_tokens=4))
    rig.turn()
    rig.abort("a")
    rig.finish()
    assert rig.reason("a") == "abort" and rig.free == 64


def test_an_abort_is_answered_even_if_nobody_knows_the_rid() -> None:
    rig = Rig()
    rig.abort("ghost")
    assert [(row.rid, row.attempt, row.finish.reason) for row in rig.refused] == [("ghost", ANY_ATTEMPT, "abort")]


def test_another_gateway_cannot_abort_it() -> None:
    rig = Rig()
    rig.step(request("a", P6))
    out = rig.scheduler.step([Abort(rid="a", gateway="gateway-9")], rig.now)
    assert out.tokens is not None and [row.gateway for row in out.tokens.refused] == ["gateway-9"]
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)


def test_a_stop_hit_ends_it_without_another_word() -> None:
    rig = Rig()
    rig.step(request("a", P6, max_tokens=50))
    for _ in range(5):
        rig.turn()
    rig.reader.streams["a"].stopped = True
    length = len(rig.ids("a"))
    rig.step(StopHit(rid="a", attempt=0, index=1, stop="x"))
    rig.finish()
    assert len(rig.ids("a")) == length and rig.reason("a") is None
    assert not rig.scheduler.state.reqs and rig.scheduler.state.metrics.num_finished == {"stop": 1}


def test_a_stop_hit_of_an_older_attempt_is_stale() -> None:
    rig = Rig()
    message = request("a", P6)
    rig.step(message)
    rig.step(again(message, []))
    rig.step(StopHit(rid="a", attempt=0, index=0, stop="x"))
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)


def test_the_rid_is_free_as_soon_as_the_ending_is_handed_over() -> None:
    rig = Rig()
    rig.step(request("a", P6, max_tokens=50))
    rig.turn()
    rig.abort("a")
    rig.step(request("a", P6, max_tokens=2))
    rig.finish()
    assert rig.ids("a") == expected(P6, 2)


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    rig = Rig(max_running_requests=1)
    rig.step(request("a", P6, max_tokens=50, deadline=rig.now + 1), request("b", P6, deadline=rig.now + 1))
    rig.step(seconds=0.5)
    assert rig.out.wake_at <= rig.now + 0.5
    rig.step(seconds=0.6)
    assert rig.reason("a") == "abort" and rig.status("b") == 504


def test_the_queue_timeout_ends_only_what_never_ran() -> None:
    rig = Rig(max_running_requests=1, queue_timeout_s=1.0)
    rig.step(request("a", P6, max_tokens=50), request("b", P6))
    rig.step(seconds=1.5)
    assert rig.reason("a") is None and rig.status("b") == 503
    assert rig.scheduler.state.metrics.num_aborted == {"queue_timeout": 1}


def test_a_failing_row_takes_its_request_alone() -> None:
    rig = Rig()
    rig.worker.failing.add("a")
    rig.step(request("a", P6), request("b", [*P6[:-1], 99]))
    rig.finish()
    assert rig.status("a") == 500 and rig.ids("b") == expected([*P6[:-1], 99], 8)
    metrics = rig.scheduler.state.metrics
    assert metrics.num_failed == {"row_failed": 1} and metrics.num_finished == {"error": 1, "length": 1}
    assert metrics.counters()["num_failed_requests_total_row_failed"] == 1


def test_a_full_channel_leaves_the_cursor_where_it_is() -> None:
    rig = Rig()
    rig.step(request("a", P6, max_tokens=6), detokenizer_full=True)
    for _ in range(12):
        rig.work()
        rig.step(detokenizer_full=True)
    assert rig.reader.streams == {} and "a" in rig.scheduler.state.reqs
    rig.step()
    assert rig.ids("a") == expected(P6, 6) and rig.reason("a") == "length"
    assert rig.scheduler.state.reqs == {}


def test_tokens_are_handed_over_one_batch_a_step() -> None:
    rig = Rig()
    rig.step(request("a", P6), request("b", P6[::-1]))
    rig.turn()
    assert rig.out.tokens is not None
    assert {row.rid: unpack_i32(row.ids).size for row in rig.out.tokens.rows} == {"a": 1, "b": 1}
    assert rig.out.tokens.step == rig.scheduler.state.step


def test_a_request_the_worker_has_ended_unnoticed_does_not_hang() -> None:
    rig = Rig()
    rig.step(request("a", P6, 50))
    for _ in range(4):
        rig.turn()
    rig.worker.slots[0].ended = True
    rig.finish()
    assert rig.status("a") == 500


def test_an_operator_ends_one_request_or_a_whole_call_by_its_id() -> None:
    rig = Rig(max_running_requests=2)
    rig.step(*(request(f"call-{i}", P6, group="call") for i in range(3)), request("other", P6))

    def order(rid: str) -> tuple[int, dict[str, object]]:
        rig.step(Control(request_id="c", gateway="gateway-0", action="abort", rid=rid))
        reply = rig.out.replies[-1][1]
        return reply.status, reply.body

    assert order("call-0") == (200, {"aborted": 1})
    assert order("call") == (200, {"aborted": 2})
    assert order("call")[0] == 404
    rig.finish()
    assert [rig.reason(rid) for rid in ("call-0", "call-1", "call-2")] == ["abort"] * 3
    assert rig.ids("other") == expected(P6, 8)
    assert rig.free + rig.cached == 64

"""A part of the engine dies: every open stream goes on, nothing lost, repeated or changed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.fake_engine import FIRST_ID, Script
from common.messages import ErrorInfo, Finish, Rejected, TextBatch, TextRow, pack_i32, unpack_i32
from gateway import engine as engine_module
from gateway import fleet
from tests.unit.gateway_live import CHAT, Live, Stream, eventually, joined, live_gateway

PIECES = tuple(f"<{i}>" for i in range(8))


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway(lambda _: Script(pieces=PIECES, prompt_tokens=9, cached_tokens=4)) as pair:
        pair.engine.auto = False
        yield pair


def received(live: Live, count: int) -> None:
    """Wait until the gateway has ``count`` ids of its one open request."""
    eventually(lambda: [record.num_ids for record in live.open.values()] == [count], f"{count} ids")


@pytest.mark.parametrize("role", ["scheduler-0", "detokenizer-0"])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_restart_resubmits_and_the_stream_is_whole(live: Live, role: str, before: int) -> None:
    stream = Stream(live)
    live.engine.step(before)
    if before:
        received(live, before)
    seen = len(live.engine.generates)
    live.engine.restart(role)
    eventually(lambda: len(live.engine.generates) > seen, "the resubmission")
    again = live.engine.generates[-1]
    assert again.attempt == 1
    assert unpack_i32(again.output_ids).tolist() == list(range(FIRST_ID, FIRST_ID + before))
    assert again.sampling == live.engine.generates[-2].sampling
    live.engine.step(8)
    chunks = stream.chunks()
    assert joined(chunks) == "".join(PIECES)
    assert chunks[-2]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_tokenizer_restart_resubmits_what_it_had_not_handed_on(live: Live) -> None:
    stream = Stream(live)
    live.engine.restart("tokenizer-0")
    eventually(lambda: live.engine.generates[-1].attempt == 1, "the resubmission")
    live.engine.step(8)
    assert joined(stream.chunks()) == "".join(PIECES)


def test_tokenizer_restart_leaves_running_streams_alone(live: Live) -> None:
    stream = Stream(live)
    live.engine.step(2)
    received(live, 2)
    seen = len(live.engine.generates)
    live.engine.restart("tokenizer-0", forget=False)
    live.engine.step(6)
    assert joined(stream.chunks()) == "".join(PIECES)
    assert len(live.engine.generates) == seen


def test_two_restarts_count_attempts_up(live: Live) -> None:
    stream = Stream(live)
    live.engine.step(2)
    received(live, 2)
    for attempt in (1, 2):
        live.engine.restart("scheduler-0")
        eventually(lambda attempt=attempt: live.engine.generates[-1].attempt == attempt)  # type: ignore[misc]
    live.engine.step(8)
    assert joined(stream.chunks()) == "".join(PIECES)


def test_worker_restart_needs_nothing_from_the_gateway(live: Live) -> None:
    stream = Stream(live)
    live.engine.step(3)
    seen = len(live.engine.generates)
    live.engine.restart("worker-0", forget=False)
    live.engine.step(5)
    assert joined(stream.chunks()) == "".join(PIECES)
    assert len(live.engine.generates) == seen


def test_rows_of_an_older_attempt_are_dropped(live: Live) -> None:
    stream = Stream(live)
    rid = live.engine.generates[-1].rid
    live.engine.step(2)
    received(live, 2)
    live.engine.restart("detokenizer-0")
    eventually(lambda: live.engine.generates[-1].attempt == 1)
    stale = TextRow(rid, 0, 2, pack_i32([7]), len("<0><1>"), "STALE", finish=Finish(reason="stop"), completion_tokens=3)
    live.engine.send(TextBatch(detokenizer_generation=0, rows=[stale]))
    live.engine.send(Rejected(rid=rid, attempt=0, error=ErrorInfo(status=400, message="stale")))
    live.engine.step(8)
    assert joined(stream.chunks()) == "".join(PIECES)


def test_text_already_written_is_cut_within_a_row(live: Live) -> None:
    stream = Stream(live)
    rid = live.engine.generates[-1].rid

    def row(index: int, ids: list[int], offset: int, text: str, finish: Finish | None = None) -> None:
        accepted = (9, 4) if index == 0 else None
        count = index + len(ids)
        new = TextRow(rid, 0, index, pack_i32(ids), offset, text, accepted, finish=finish, completion_tokens=count)
        live.engine.send(TextBatch(detokenizer_generation=0, rows=[new]))

    metrics = live.gateway.gateway.engine.metrics
    counted = metrics.num_output_tokens
    row(0, [1, 2], 0, "abc")
    row(0, [1, 2], 0, "abc")
    row(1, [2, 3], 1, "bcde")
    row(3, [], 5, "f", Finish(reason="stop"))
    live.engine.call(live.engine._running.clear)
    chunks = stream.chunks()
    assert joined(chunks) == "abcdef"
    assert chunks[-2]["usage"]["completion_tokens"] == 3
    assert metrics.num_output_tokens - counted == 3, "each id once, however often it comes"


def test_missing_rows_are_asked_for_again(live: Live) -> None:
    stream = Stream(live)
    rid = live.engine.generates[-1].rid
    late = TextRow(rid, 0, 4, pack_i32([9]), 40, "late", completion_tokens=5)
    live.engine.send(TextBatch(detokenizer_generation=0, rows=[late]))
    eventually(lambda: live.engine.generates[-1].attempt == 1, "the resubmission")
    live.engine.step(8)
    assert joined(stream.chunks()) == "".join(PIECES)


def test_output_that_stays_lost_ends_in_an_error(live: Live) -> None:
    stream = Stream(live)
    rid = live.engine.generates[-1].rid
    live.engine.step()
    received(live, 1)
    for attempt in range(5):
        late = TextRow(rid, attempt, 4, pack_i32([9]), 40, "late", completion_tokens=5)
        live.engine.send(TextBatch(detokenizer_generation=0, rows=[late]))
    assert "lost" in stream.chunks()[-1]["error"]["message"]
    eventually(lambda: not live.open)


def test_silence_that_ends_resubmits_and_the_log_says_that_it_was_silence(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet, "STALE_S", 0.4)
    stream = Stream(live)
    live.engine.step(2)
    received(live, 2)
    live.engine.silent = True
    eventually(lambda: live.client.get("/health").status_code == 503, "the engine is silent")
    waiting = Stream(live)
    monkeypatch.setattr(engine_module, "SILENCE_LIMIT_S", 0.4)
    assert live.chat().json()["error"]["code"] == "engine_silent"
    live.engine.silent = False
    eventually(lambda: [generate.attempt for generate in live.engine.generates[-2:]] == [1, 1], "the resubmissions")
    assert "the scheduler was not heard of for" in caplog.text and "submitting 2 open requests again" in caplog.text
    assert "restarted" not in caplog.text
    live.engine.step(8)
    assert joined(stream.chunks()) == joined(waiting.chunks()) == "".join(PIECES)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"])
def test_new_requests_wait_for_a_worker_that_is_being_restarted(live: Live, path: str) -> None:
    live.engine.ready = False
    eventually(lambda: live.client.get("/health").json().get("error", {}).get("code") == "not_ready", "it is away")
    seen = len(live.engine.generates)
    body = {"/v1/chat/completions": {"messages": CHAT}, "/generate": {"text": "hi"}}.get(path, {"prompt": "hi"})
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(live.post, path, body)
        if path != "/tokenize":
            eventually(lambda: len(live.engine.generates) > seen, "it is taken")
            assert not reply.done()
        live.engine.ready = True
        eventually(lambda: live.client.get("/health").status_code == 200, "the worker is back")
        live.engine.step(8)
        assert reply.result(20).status_code == 200


def test_a_deadline_holds_while_the_engine_is_away(live: Live) -> None:
    with live.script(lambda _: Script(silent=True)):  # as if it lay in a dead process's channel
        response = live.chat(timeout=0.1)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline"
    eventually(lambda: not live.open, "the abort is answered")


def test_every_choice_is_resubmitted(live: Live) -> None:
    stream = Stream(live, n=3, seed=1)
    live.engine.step(2)
    eventually(lambda: [record.num_ids for record in live.open.values()] == [2, 2, 2])
    seen = len(live.engine.generates)
    seeds = {generate.rid: generate.sampling.seed for generate in live.engine.generates[-3:]}
    live.engine.restart("scheduler-0")
    eventually(lambda: len(live.engine.generates) == seen + 3)
    assert {generate.rid: generate.sampling.seed for generate in live.engine.generates[-3:]} == seeds
    live.engine.step(8)
    chunks = stream.chunks()
    assert [joined(chunks, index) for index in range(3)] == ["".join(PIECES)] * 3


def test_streams_that_pause_are_submitted_again_before_requests_that_never_began(live: Live) -> None:
    first = Stream(live)
    with live.script(lambda _: Script(pieces=PIECES, silent=True), auto=False):
        waiting = Stream(live)
    second = Stream(live)
    rids = [generate.rid for generate in live.engine.generates[-3:]]
    live.engine.step(2)
    eventually(lambda: [record.num_ids for record in live.open.values()] == [2, 0, 2], "two of three have begun")
    seen = len(live.engine.generates)
    live.engine.restart("scheduler-0")
    eventually(lambda: len(live.engine.generates) == seen + 3, "the resubmissions")
    assert [generate.rid for generate in live.engine.generates[seen:]] == [rids[0], rids[2], rids[1]]
    live.engine.step(8)
    assert [joined(stream.chunks()) for stream in (first, waiting, second)] == ["".join(PIECES)] * 3


def test_an_aborted_request_is_not_resubmitted(live: Live) -> None:
    live.engine.ignore_aborts = True
    connection = live.raw({"messages": CHAT, "stream": True})
    eventually(lambda: live.arrived, "it is with the engine")
    live.engine.step()
    received(live, 1)
    connection.close()
    eventually(lambda: all(record.aborting for record in live.open.values()) and bool(live.open))
    seen = len(live.engine.generates)
    aborts = len(live.engine.aborts)
    live.engine.restart("scheduler-0")
    eventually(lambda: len(live.engine.aborts) > aborts, "the repeated abort")
    live.engine.ignore_aborts = False
    eventually(lambda: not live.open, "the ending")
    assert len(live.engine.generates) == seen

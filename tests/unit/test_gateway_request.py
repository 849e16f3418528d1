"""The record of an open request and the decision to resubmit, without any I/O."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import (
    EngineStatus,
    Finish,
    Generate,
    SamplingParams,
    TextParams,
    TextPrompt,
    TextRow,
    TokenLogprob,
    pack_i32,
)
from gateway.fields import choice_seed
from gateway.fleet import STALE_S, Fleet, Lost
from gateway.request import Delta, Exchange, OpenRequest


def record(**kwargs: bool) -> OpenRequest:
    generate = Generate(
        rid="r", gateway="g", prompt=TextPrompt(text="x"), sampling=SamplingParams(), text=TextParams()
    )
    exchange = Exchange(0.0, 1 << 20)
    request = OpenRequest(generate, exchange, 0, **kwargs)
    exchange.records.append(request)
    return request


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=30))
def test_any_overlap_of_rows_delivers_each_id_and_character_once(spans: list[tuple[int, int]]) -> None:
    ids = list(range(100, 120))
    text = "".join(chr(0x4E00 + i) * (i % 3) for i in range(20))
    lengths = [0]
    for i in range(20):
        lengths.append(lengths[-1] + i % 3)
    request = record()
    got_ids: list[int] = []
    got_text = ""
    for start, count in spans:
        row = TextRow(
            "r", 0, start, pack_i32(ids[start : start + count]), lengths[start],
            text[lengths[start] : lengths[start + count]], completion_tokens=start + count,
        )  # fmt: skip
        if request.has_gap(row):
            assert start > len(got_ids)
            continue
        delta = request.apply(row)
        if delta is not None:
            got_ids += list(memoryview(delta.ids).cast("i"))
            got_text += delta.text
    assert got_ids == ids[: len(got_ids)]
    assert got_text == text[: lengths[len(got_ids)]]
    assert request.completion_tokens == len(got_ids)


def test_first_acceptance_fixes_the_counts() -> None:
    request = record()
    request.apply(TextRow("r", 0, 0, b"", 0, "", accepted=(10, 4)))
    request.apply(TextRow("r", 1, 0, b"", 0, "", accepted=(10, 0)))
    assert (request.prompt_tokens, request.cached_tokens) == (10, 4)


def test_prompt_logprobs_that_come_again_are_dropped() -> None:
    request = record()
    prompt = [TokenLogprob("a", b"a", None), TokenLogprob("b", b"b", -0.5)]
    first = request.apply(TextRow("r", 0, 0, pack_i32([5]), 0, "x", (2, 0), prompt_logprobs=prompt))
    assert first is not None and first.prompt_logprobs == prompt
    again = request.apply(TextRow("r", 1, 0, pack_i32([5, 6]), 0, "xy", (2, 0), prompt_logprobs=prompt))
    assert again is not None and (again.text, again.prompt_logprobs) == ("y", [])
    assert request.apply(TextRow("r", 2, 0, b"", 0, "", (2, 0), prompt_logprobs=prompt)) is None


def test_where_ids_begin_is_cut_as_the_ids_are() -> None:
    request = record()
    first = request.apply(TextRow("r", 0, 0, pack_i32([5, 6]), 0, "xy", (3, 0), starts=pack_i32([0, 1])))
    assert first is not None and first.starts == pack_i32([0, 1])
    again = request.apply(TextRow("r", 0, 1, pack_i32([6, 7]), 1, "yz", starts=pack_i32([1, 2])))
    assert again is not None and (again.text, again.starts) == ("z", pack_i32([2]))
    plain = request.apply_next(TextRow("r", 0, 3, pack_i32([8]), 3, "w", starts=pack_i32([3])))
    assert plain is not None and plain.starts == pack_i32([3])


def test_discarded_output_counts_nothing_and_ends_with_length() -> None:
    request = record(discard_output=True)
    delta = request.apply(
        TextRow("r", 0, 0, pack_i32([5]), 0, "x", (3, 0), finish=Finish(reason="stop"), completion_tokens=1)
    )
    assert delta is not None
    assert (delta.text, delta.ids, request.completion_tokens) == ("", b"", 0)
    assert request.finish == Finish(reason="length")


def test_resubmission_carries_every_id() -> None:
    request = record()
    request.apply(TextRow("r", 0, 0, pack_i32([5, 6]), 0, "xy", (3, 0), completion_tokens=2))
    assert request.message() is request.generate
    request.attempt = 2
    message = request.message()
    assert (message.attempt, message.output_ids) == (2, pack_i32([5, 6]))


def test_exchange_cuts_off_only_a_client_that_is_being_written_to() -> None:
    exchange = Exchange(0.0, 1000)
    cut: list[bool] = []
    exchange.cut_off = lambda: cut.append(True)
    delta = Delta(0, "x" * 600, b"", [], [], None)
    exchange.push(delta)
    exchange.push(delta)
    assert not cut
    exchange.take()
    exchange.sending_since = 1.0
    for _ in range(4):  # it is cut off once, whatever was on its way
        exchange.push(delta)
    assert cut == [True]
    assert exchange.gone


def test_exchange_wakes_its_waiter_once() -> None:
    async def run() -> None:
        exchange = Exchange(0.0, 1000)
        waiter = asyncio.ensure_future(exchange.wait())
        await asyncio.sleep(0)
        exchange.push(Delta(0, "a", b"", [], [], None))
        exchange.push(Delta(0, "b", b"", [], [], None))
        await waiter
        assert [delta.text for delta in exchange.take()] == ["a", "b"]

    asyncio.run(run())


def status(**generations: int) -> EngineStatus:
    return EngineStatus(
        generations={name.replace("_", "-"): value for name, value in generations.items()},
        ready=True, draining=False, num_running=0, num_waiting=0, max_queued=1, context_len=1, max_total_tokens=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"scheduler_0": 1}, Lost(everything=True, why="scheduler-0 was restarted")),
        ({"detokenizer_0": 1}, Lost(everything=True, why="detokenizer-0 was restarted")),
        ({"tokenizer_1": 1}, Lost(tokenizers=frozenset({1}), why="tokenizer-1 was restarted")),
        ({"worker_0": 1}, Lost()),
        ({"gateway_0": 1}, Lost()),
        ({}, Lost()),
    ],
)
def test_which_restart_makes_whose_requests_be_sent_again(change: dict[str, int], expected: Lost) -> None:
    start = {"scheduler_0": 0, "detokenizer_0": 0, "tokenizer_0": 0, "tokenizer_1": 0, "worker_0": 0, "gateway_0": 0}
    fleet = Fleet()
    assert fleet.take_status(status(**start), 0.0) == Lost()
    assert fleet.take_status(status(**{**start, **change}), 0.1) == expected
    assert fleet.take_status(status(**{**start, **change}), 0.2) == Lost()


def test_silence_that_ends_counts_as_a_restart_and_is_not_called_one() -> None:
    fleet = Fleet()
    assert fleet.take_status(status(scheduler_0=0), 0.0) == Lost()
    assert fleet.is_fresh(STALE_S / 2)
    assert not fleet.is_fresh(STALE_S)
    silent = "the scheduler was not heard of for 4.0 s"
    assert fleet.take_status(status(scheduler_0=0), STALE_S + 1) == Lost(everything=True, why=silent)
    both = f"{silent} and scheduler-0 was restarted"
    assert fleet.take_status(status(scheduler_0=1), 2 * STALE_S + 2) == Lost(everything=True, why=both)


def test_another_run_of_the_engine_is_named_as_such() -> None:
    fleet = Fleet()
    fleet.take_status(msgspec.structs.replace(status(scheduler_0=1), run="a"), 0.0)
    lost = fleet.take_status(msgspec.structs.replace(status(scheduler_0=0), run="b"), STALE_S + 1)
    assert lost == Lost(everything=True, why="the whole engine was started anew")


def test_seeds_of_choices_differ_and_repeat() -> None:
    seeds = [choice_seed(7, choice) for choice in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert seeds == [choice_seed(7, choice) for choice in range(50)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert choice_seed(-1, 0) == 2**63 - 1

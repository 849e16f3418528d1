"""Steps launched before the ids of the step before are on the host: the results are those of one after the other."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from common.messages import BeginRequest, ForwardBatch, Grammar, Reset, RowFlag, StepResult
from tests.unit.ahead_support import ContextRunner, Later, LateRunner, LoopWorker, facts
from tests.unit.test_worker_executor import ids_of
from tests.unit.worker_fakes import begin, step
from worker_proc.loop import Pulse, WorkerLoop


def grammar(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def test_decoding_goes_on_with_ids_the_host_has_not_seen() -> None:
    ahead = LoopWorker(True)
    batches = [step(1, [(0, 3, [])], begins=[begin(0, [7, 8, 9], [3, 4])]), *(step(n, [(0, 0, [])]) for n in (2, 3, 4))]
    assert [ids_of(r) for r in ahead.run(batches)] == [[[10]], [[11]], [[12]], [[13]]]
    assert isinstance(ahead.runner, LateRunner) and ahead.runner.num_late == 3


def test_a_request_that_ended_unseen_gives_nothing_more() -> None:
    batches = [
        step(1, [(0, 1, []), (1, 1, [])], begins=[begin(0, [7], [0, 1], eos_token_ids=(9,)), begin(1, [30], [2, 3])]),
        *(step(n, [(0, 0, []), (1, 0, [])]) for n in (2, 3, 4)),
    ]
    results = LoopWorker(True).run(batches)
    assert [ids_of(r)[0] for r in results] == [[8], [9], [], []]
    assert [r.flags[0] for r in results] == [0, 0, RowFlag.SKIPPED, RowFlag.SKIPPED]
    assert [ids_of(r)[1] for r in results] == [[31], [32], [33], [34]]


def test_the_length_is_known_before_the_ids_are() -> None:
    ahead = LoopWorker(True)
    first = step(1, [(0, 1, [])], begins=[begin(0, [7], [0], max_tokens=2)])
    batches = [first, *(step(n, [(0, 0, [])]) for n in (2, 3))]
    assert facts(ahead.run(batches)) == facts(LoopWorker(False).run(batches))
    assert len(ahead.runner.batches) == 2, "nothing was computed in vain"


def test_a_slot_given_to_another_request_while_its_last_step_runs() -> None:
    batches = [
        step(1, [(0, 1, [])], begins=[begin(0, [7], [0], repetition_penalty=1.01)]),
        step(2, [(0, 0, [])], ends=[0]),
        step(3, [(0, 2, [])], begins=[begin(0, [40, 41], [1])]),
        step(4, [(0, 0, [])]),
    ]
    assert [ids_of(r) for r in LoopWorker(True).run(batches)] == [[[8]], [[9]], [[42]], [[43]]]


# --------------------------------------------------------------------------- the order of launches


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 1}, {"min_tokens": 9, "eos_token_ids": (8, 9)}, {"logit_bias": {5: 2.0}}, {"temperature": 1.0}],
    ids=str,
)
def test_what_needs_nothing_of_the_host_is_launched_whole(fields: dict[str, Any]) -> None:
    ahead = LoopWorker(True)
    batches = [step(1, [(0, 1, [])], begins=[begin(0, [7], [0], **fields)]), *(step(n, [(0, 0, [])]) for n in (2, 3))]
    assert facts(ahead.run(batches)) == facts(LoopWorker(False).run(batches))
    assert ahead.watch.log == ["forward", "draw", "forward", "draw", "see", "forward", "draw", "see", "see"]


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5, "logprobs": 2},
     {"grammar": grammar("8|9 10|11 12|13")}, {"grammar": grammar("8|9 10|11 12|13"), "logprobs": 0}],
    ids=str,
)  # fmt: skip
def test_what_needs_the_host_is_drawn_while_its_forward_pass_runs(fields: dict[str, Any]) -> None:
    """The next forward pass is launched before an id is waited for, and a drawing before its forward pass is."""
    ahead = LoopWorker(True)
    batches = [step(1, [(0, 1, [])], begins=[begin(0, [7], [0], **fields)]), *(step(n, [(0, 0, [])]) for n in (2, 3))]
    assert facts(ahead.run(batches)) == facts(LoopWorker(False).run(batches))
    assert ahead.watch.log == ["forward", "draw", "forward", "see", "draw", "forward", "see", "draw", "see"]


def test_one_row_that_needs_the_host_keeps_the_others_with_it_and_leaves_again() -> None:
    ahead = LoopWorker(True)
    batches = [
        step(1, [(0, 1, [])], begins=[begin(0, [7], [0, 1])]),
        step(2, [(0, 0, []), (1, 1, [])], begins=[begin(1, [30], [2], grammar=grammar("31|32 40|41"))]),
        step(3, [(0, 0, []), (1, 0, [])], ends=[1]),
        step(4, [(0, 0, [])]),
    ]
    assert facts(ahead.run(batches)) == facts(LoopWorker(False).run(batches))
    assert ahead.watch.log == [
        "forward", "draw",
        "forward", "see", "draw",
        "forward", "see", "draw",
        "forward", "draw", "see", "see",
    ]  # fmt: skip


def test_prompt_logprobs_are_launched_with_their_step_and_a_step_without_ids_is_waited_for() -> None:
    ahead = LoopWorker(True)
    record = begin(0, [1, 2, 4, 9, 10, 12, 13], [0, 1, 2], prompt_logprobs=1)
    batches = [step(1, [(0, 3, [])], begins=[record]), step(2, [(0, 4, [])]), step(3, [(0, 0, [])])]
    assert facts(ahead.run(batches)) == facts(LoopWorker(False).run(batches))
    assert ahead.watch.log == [
        "forward", "prompt",
        "forward", "prompt", "draw", "see prompt",
        "forward", "draw", "see", "see prompt", "see",
    ]  # fmt: skip
    plain = LoopWorker(True)
    plain.handle(step(1, [(0, 3, [])], begins=[begin(0, [1, 2, 4, 9], [0])]))
    assert plain.loop._under_way is not None and not plain.loop._under_way.ready, "a chunk that is still computed"


def test_a_step_is_not_launched_over_one_that_is_not_drawn() -> None:
    executor = LoopWorker(True).executor
    record = begin(0, [7], [0], repetition_penalty=1.1)
    first = executor.launch(step(1, [(0, 1, [])], begins=[record]))
    second = executor.launch(step(2, [(0, 0, [])]), before=first)
    assert first.is_drawn and not second.is_drawn
    with pytest.raises(InvariantError, match="step 3 is launched and step 2 is not drawn"):
        executor.launch(step(3, [(0, 0, [])]), before=second)


# --------------------------------------------------------------------------- what the host learns too late


def test_a_row_whose_grammar_forced_ids_draws_when_they_are_computed() -> None:
    ahead = LoopWorker(True)
    record = begin(0, [10], [0, 1], grammar=grammar("40|12 50 51 60|61"))
    results = ahead.run([step(1, [(0, 1, [])], begins=[record]), *(step(n, [(0, 0, [])]) for n in (2, 3, 4))])
    assert [ids_of(r)[0] for r in results] == [[12, 50, 51], [], [60], []]
    assert [r.flags[0] for r in results] == [
        RowFlag.IN_TOOL_CALL, RowFlag.IN_TOOL_CALL, RowFlag.GRAMMAR_END, RowFlag.SKIPPED,
    ]  # fmt: skip
    assert [batch.ids.tolist() for batch in ahead.runner.batches] == [[10], [12], [50, 51], [60]]


def test_a_step_whose_rows_draw_nothing_after_all_is_waited_for() -> None:
    ahead = LoopWorker(True)
    record = begin(0, [10], [0, 1], grammar=grammar("40|12 50 51 60|61"))
    ahead.handle(step(1, [(0, 1, [])], begins=[record]))
    ahead.handle(step(2, [(0, 0, [])]))
    assert ahead.loop._under_way is not None and ahead.loop._under_way.drawn is None
    assert not ahead.loop._under_way.ready, "its forward pass may still run"
    assert [ids_of(r) for r in ahead.flush()] == [[[]]]


def test_ids_forced_without_a_draw_are_known_at_once() -> None:
    ahead = LoopWorker(True)
    record = begin(0, [10], [0, 1], grammar=grammar("50 51 60|61 70|71"))
    results = ahead.run([step(1, [(0, 1, [])], begins=[record]), *(step(n, [(0, 0, [])]) for n in (2, 3))])
    assert [ids_of(r)[0] for r in results] == [[50, 51], [60], [70]]


def test_a_grammar_that_ends_leaves_its_next_row_skipped() -> None:
    batches = [
        step(1, [(0, 1, []), (1, 1, [])],
             begins=[begin(0, [10], [0], grammar=grammar("11|12")), begin(1, [30], [1], grammar=grammar("31|32 7|8"))]),
        *(step(n, [(0, 0, []), (1, 0, [])]) for n in (2, 3)),
    ]  # fmt: skip
    assert facts(LoopWorker(True).run(batches)) == facts(LoopWorker(False).run(batches))


class Plan:
    """Draws a sequence of batches as a scheduler could send them, which knows what the step before last gave."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.batches: list[ForwardBatch] = []
        self.open: dict[int, int] = {}
        """Slot -> prompt ids left to compute."""
        self.free_pages = list(range(64))

    def batch(self, number: int) -> None:
        begins: list[BeginRequest] = []
        rows: list[tuple[int, int, list[int]]] = []
        ends = [slot for slot in self.open if self.draw(st.integers(0, 9)) == 0]
        for slot in range(4):
            if slot not in self.open and len(self.free_pages) >= 8 and self.draw(st.booleans()):
                pages, self.free_pages = self.free_pages[:8], self.free_pages[8:]
                length = self.draw(st.integers(1, 9))
                fields = self.draw(st.sampled_from(FIELDS))
                ids = self.draw(st.lists(st.integers(1, 60), min_size=length, max_size=length))
                begins.append(begin(slot, ids, pages, seed=number, **fields))
                self.open[slot] = length
        for slot, left in self.open.items():
            if left:
                chunk = self.draw(st.integers(1, left))
                rows.append((slot, chunk, []))
                self.open[slot] = left - chunk
            elif self.draw(st.integers(0, 4)):
                rows.append((slot, 0, []))
        self.batches.append(step(number, rows, begins=begins, ends=ends))
        for slot in ends:
            del self.open[slot]


FIELDS: list[dict[str, Any]] = [
    {"max_tokens": 20},
    {"max_tokens": 3},
    {"max_tokens": 20, "temperature": 1.0},
    {"max_tokens": 20, "eos_token_ids": tuple(range(0, 64, 3))},
    {"max_tokens": 20, "min_tokens": 4, "stop_token_ids": tuple(range(1, 64, 2))},
    {"max_tokens": 20, "logit_bias": {5: 3.0}, "temperature": 0.7, "top_k": 3},
    {"max_tokens": 20, "repetition_penalty": 1.3},
    {"max_tokens": 20, "presence_penalty": 1.0, "frequency_penalty": 0.4, "temperature": 0.8, "logprobs": 1},
    {"max_tokens": 20, "logprobs": 2},
    {"max_tokens": 20, "prompt_logprobs": 1},
    {"max_tokens": 20, "prompt_logprobs": 0, "logprobs": 0, "frequency_penalty": -0.5},
    {"max_tokens": 20, "grammar": Grammar(kind="regex", text="|".join(map(str, range(100))) + " 4|5|6 7|8|9")},
]
"""What gives the same in every step. Forced ids may come a step later: ``test_worker_ahead_scheduled.py``."""


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_batches_give_what_they_give_one_after_the_other(data: st.DataObject) -> None:
    plan = Plan(data.draw)
    for number in range(1, data.draw(st.integers(2, 12))):
        plan.batch(number)
    workers = [LoopWorker(ahead, ContextRunner()) for ahead in (True, False)]
    ahead, after = (facts(worker.run(plan.batches)) for worker in workers)
    assert ahead == after
    for worker in workers:
        worker.close()


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    ahead = LoopWorker(True)
    ahead.runner.poison = {8}
    begins = [begin(0, [7], [0]), begin(1, [30], [2])]
    first = step(1, [(0, 1, []), (1, 1, [])], begins=begins)
    batches = [first, *(step(n, [(0, 0, []), (1, 0, [])]) for n in (2, 3, 4))]
    results = ahead.run(batches)
    assert [[f.row for f in r.failures] for r in results] == [[], [0], [], []]
    assert [r.flags[0] for r in results][2:] == [RowFlag.SKIPPED] * 2
    assert [ids_of(r)[1] for r in results] == [[31], [32], [33], [34]]


class _Inbox:
    """Hands out one message at a time; with none left the loop's process is told to stop once nothing is under way."""

    def __init__(self, messages: list[Any], context: Any) -> None:
        self.messages, self.context = deque(messages), context

    def receive(self) -> list[Any]:
        return [self.messages.popleft()] if self.messages else []

    def wait(self, timeout_s: float) -> bool:
        if not self.messages:
            self.context.stopping = timeout_s > 0.01
        return bool(self.messages)


def test_the_loop_launches_before_it_finishes_and_looks_after_what_runs() -> None:
    worker = LoopWorker(True)
    log, looks = worker.watch.log, 0

    def send(message: Any) -> bool:
        log.append(f"result {message.step}" if isinstance(message, StepResult) else type(message).__name__)
        return True

    def ready(drawn: Any) -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    batches = [
        Reset(epoch=1, scheduler_generation=0),
        step(1, [(0, 1, [])], begins=[begin(0, [7], [0, 1])]),
        step(2, [(0, 0, [])]),
        step(3, [(0, 0, []), (1, 1, [])], begins=[begin(1, [30], [2], grammar=grammar("31|32 5|6"))]),
        step(4, [(0, 0, []), (1, 0, [])]),
        step(5, [(0, 0, [])], ends=[1]),
    ]
    context: Any = SimpleNamespace(stopping=False, trace=None)
    inbox: Any = _Inbox(batches, context)
    outbox: Any = SimpleNamespace(send=send)
    pulse = Pulse()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Later, "ready", ready)
        WorkerLoop(context, worker.executor, inbox, outbox, worker.ready(), pulse).run()
    assert log == [
        "WorkerReady", "WorkerReady",
        "forward", "draw",
        "forward", "draw", "see", "result 1",
        "forward", "see", "result 2", "draw",
        "forward", "see", "result 3", "draw",
        "forward", "draw", "see", "result 4",
        "see", "result 5",
    ]  # fmt: skip
    assert looks == 4 and pulse.progress == 5 and pulse.busy_since == 0.0
    worker.close()

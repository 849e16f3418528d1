"""Steps launched before the ids of the step before are on the host: the results are those of one after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import BeginRequest, ForwardBatch, Grammar, Reset, RowFlag, StepResult, WorkerReady
from tests.integration.tiny_models import tiny_model
from tests.unit.graph_fakes import CallingAgain
from tests.unit.test_worker_executor import ids_of
from tests.unit.worker_fakes import FakeBackend, FakeRunner, begin, step
from worker_proc.device_io import HostIo
from worker_proc.executor import StepExecutor
from worker_proc.generic.graphs import DecodeGraphs
from worker_proc.generic.runner import GenericRunner
from worker_proc.launched import LaunchedStep
from worker_proc.loop import Pulse, WorkerLoop
from worker_proc.runner import LateIds, PackedBatch
from worker_proc.sampling.cpu import CpuSampler


class LateRunner(FakeRunner):
    """Counts steps whose ids only the device knew."""

    num_late = 0

    def forward_late(self, batch: PackedBatch, late: LateIds) -> Any:
        assert not batch.ids[late.targets].any(), "the host knows nothing of them"
        batch.ids[late.targets] = late.drawn[late.sources]
        self.num_late += 1
        return self.forward(batch)


class SlowSampler(CpuSampler):
    """Draws at once, tells when asked."""

    def begin(self, logits: Any, requests: Any) -> SlowIds:
        return SlowIds(*self.sample(logits, requests))


@dataclass
class SlowIds:
    ids: Any
    bad: Any
    asked: bool = False

    def ready(self) -> bool:
        return False

    def wait(self) -> Any:
        assert not self.asked
        self.asked = True
        return self.ids, self.bad


@dataclass
class Ahead:
    """The worker's loop with every step that can follow launched before its predecessor is finished."""

    runner: LateRunner = field(default_factory=LateRunner)
    waiting: deque[LaunchedStep] = field(default_factory=deque)
    num_followed: int = 0

    def __post_init__(self) -> None:
        sampler = SlowSampler(1)
        self.executor = StepExecutor(self.runner, sampler, FakeBackend(), ahead=(self.runner, sampler))

    def run(self, batches: list[ForwardBatch]) -> list[StepResult]:
        results = []
        before: LaunchedStep | None = None
        for batch in batches:
            if before is not None and not self.executor.can_follow(before, batch):
                results.append(self.executor.finish(before))
                before = None
            launched = self.executor.launch(batch, before=before)
            if before is not None:
                self.num_followed += 1
                results.append(self.executor.finish(before))
            before = launched
        if before is not None:
            results.append(self.executor.finish(before))
        return results


def one_after_the_other(batches: list[ForwardBatch]) -> list[StepResult]:
    executor = StepExecutor(FakeRunner(), CpuSampler(1), FakeBackend())
    return [executor.execute(batch) for batch in batches]


def facts(results: list[StepResult]) -> list[Any]:
    """What the scheduler acts on."""
    return [(r.step, ids_of(r), bytes(r.flags), [f.row for f in r.failures]) for r in results]


def test_decoding_goes_on_with_ids_the_host_has_not_seen() -> None:
    ahead = Ahead()
    batches = [step(1, [(0, 3, [])], begins=[begin(0, [7, 8, 9], [3, 4])]), *(step(n, [(0, 0, [])]) for n in (2, 3, 4))]
    results = ahead.run(batches)
    assert [ids_of(r) for r in results] == [[[10]], [[11]], [[12]], [[13]]]
    assert ahead.num_followed == 3 and ahead.runner.num_late == 3


def test_a_request_that_ended_unseen_gives_nothing_more() -> None:
    batches = [
        step(1, [(0, 1, []), (1, 1, [])], begins=[begin(0, [7], [0, 1], eos_token_ids=(9,)), begin(1, [30], [2, 3])]),
        *(step(n, [(0, 0, []), (1, 0, [])]) for n in (2, 3, 4)),
    ]
    results = Ahead().run(batches)
    assert [ids_of(r)[0] for r in results] == [[8], [9], [], []]
    assert [r.flags[0] for r in results] == [0, 0, RowFlag.SKIPPED, RowFlag.SKIPPED]
    assert [ids_of(r)[1] for r in results] == [[31], [32], [33], [34]]


def test_the_length_is_known_before_the_ids_are() -> None:
    ahead = Ahead()
    first = step(1, [(0, 1, [])], begins=[begin(0, [7], [0], max_tokens=2)])
    batches = [first, *(step(n, [(0, 0, [])]) for n in (2, 3))]
    assert facts(ahead.run(batches)) == facts(one_after_the_other(batches))
    assert len(ahead.runner.batches) == 2, "nothing was computed in vain"


def test_a_slot_given_to_another_request_while_its_last_step_runs() -> None:
    batches = [
        step(1, [(0, 1, [])], begins=[begin(0, [7], [0])]),
        step(2, [(0, 0, [])], ends=[0]),
        step(3, [(0, 2, [])], begins=[begin(0, [40, 41], [1])]),
        step(4, [(0, 0, [])]),
    ]
    ahead = Ahead()
    assert [ids_of(r) for r in ahead.run(batches)] == [[[8]], [[9]], [[42]], [[43]]]
    assert ahead.num_followed == 3


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"grammar": "1|2 5 6"}],
    ids=lambda fields: next(iter(fields)),
)
def test_who_needs_the_host_is_waited_for(fields: dict[str, Any]) -> None:
    if "grammar" in fields:
        fields = {"grammar": Grammar(kind="regex", text=fields["grammar"])}
    batches = [step(1, [(0, 1, [])], begins=[begin(0, [7], [0], **fields)]), step(2, [(0, 0, [])])]
    ahead = Ahead()
    assert facts(ahead.run(batches)) == facts(one_after_the_other(batches))
    assert ahead.num_followed == 0


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
    {"max_tokens": 20, "logprobs": 2},
]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batches_give_what_they_give_one_after_the_other(data: st.DataObject) -> None:
    plan = Plan(data.draw)
    for number in range(1, data.draw(st.integers(2, 12))):
        plan.batch(number)
    assert facts(Ahead().run(plan.batches)) == facts(one_after_the_other(plan.batches))


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    ahead = Ahead()
    ahead.runner.poison = {8}
    begins = [begin(0, [7], [0]), begin(1, [30], [2])]
    first = step(1, [(0, 1, []), (1, 1, [])], begins=begins)
    batches = [first, *(step(n, [(0, 0, []), (1, 0, [])]) for n in (2, 3, 4))]
    results = ahead.run(batches)
    assert [[f.row for f in r.failures] for r in results] == [[], [0], [], []]
    assert [r.flags[0] for r in results][2:] == [RowFlag.SKIPPED] * 2
    assert [ids_of(r)[1] for r in results] == [[31], [32], [33], [34]]


def test_the_generic_path_takes_ids_from_the_device() -> None:
    runner = GenericRunner(tiny_model("llama"), 16)
    runner.allocate(8)
    runner.forward(batch_of([[3, 4, 5], [6, 7]], [0, 0]))
    known = batch_of([[3, 4, 5, 9], [6, 7, 8]], [3, 2])
    late = LateIds(torch.tensor([8, 1, 9]), np.array([2, 0], np.int32), np.array([0, 1], np.int32))
    expected = runner.forward(known).copy()
    assert not np.array_equal(runner.forward(without_ids(known)), expected)
    np.testing.assert_array_equal(runner.forward_late(without_ids(known), late), expected)


def test_recorded_steps_take_ids_from_the_device() -> None:
    graphs = DecodeGraphs(
        lambda inputs: inputs.ids[:, None].float(), 4, 64, 16, 9, HostIo(), CallingAgain(), lambda line: None
    )
    known = batch_of([[3, 4, 5, 9], [6, 7, 8], [1, 2]], [3, 2, 1])
    late = LateIds(torch.tensor([8, 1, 9], dtype=torch.int32), np.array([2, 0], np.int32), np.array([0, 1], np.int32))
    assert graphs.run(known, late).flatten().tolist() == [9, 8, 2]
    assert graphs.run(known).flatten().tolist() == [9, 8, 2]
    assert graphs.run(without_ids(known), late).flatten().tolist() == [9, 8, 0]


def without_ids(batch: PackedBatch) -> PackedBatch:
    return PackedBatch(np.zeros_like(batch.ids), batch.positions, batch.query_start, batch.context_lens,
                       batch.page_table, batch.logit_rows)  # fmt: skip


def batch_of(sequences: list[list[int]], done: list[int]) -> PackedBatch:
    """Sequence s has page s; its ids from ``done[s]`` on are computed."""
    lengths = [len(ids) - start for ids, start in zip(sequences, done, strict=True)]
    ends = np.cumsum(lengths)
    return PackedBatch(
        ids=np.array([i for ids, start in zip(sequences, done, strict=True) for i in ids[start:]], np.int32),
        positions=np.array(
            [p for ids, start in zip(sequences, done, strict=True) for p in range(start, len(ids))], np.int32
        ),
        query_start=np.array([0, *ends], np.int32),
        context_lens=np.array([len(ids) for ids in sequences], np.int32),
        page_table=np.arange(len(sequences), dtype=np.int32)[:, None],
        logit_rows=(ends - 1).astype(np.int32),
    )


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


class _Outbox:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def send(self, message: Any) -> bool:
        self.log.append(f"result {message.step}" if isinstance(message, StepResult) else type(message).__name__)
        return True


def test_the_loop_launches_what_can_follow_before_it_finishes_what_runs() -> None:
    log: list[str] = []

    class Runner(LateRunner):
        def forward(self, batch: PackedBatch) -> Any:
            log.append("forward")
            return super().forward(batch)

    class Ids(SlowIds):
        looks = 0

        def ready(self) -> bool:
            self.looks += 1
            return self.looks > 3

    class Sampler(CpuSampler):
        def begin(self, logits: Any, requests: Any) -> Ids:
            return Ids(*self.sample(logits, requests))

    runner, sampler = Runner(), Sampler(1)
    executor = StepExecutor(runner, sampler, FakeBackend(), ahead=(runner, sampler))
    context: Any = SimpleNamespace(stopping=False, trace=None)
    grammar = Grammar(kind="regex", text="1|2 5 6")
    batches = [
        Reset(epoch=1, scheduler_generation=0),
        step(1, [(0, 1, [])], begins=[begin(0, [7], [0, 1])]),
        step(2, [(0, 0, [])]),
        step(3, [(0, 0, []), (1, 1, [])], begins=[begin(1, [30], [2], grammar=grammar)]),
        step(4, [(0, 0, [])], ends=[1]),
        step(5, [(0, 0, [])]),
    ]
    outbox: Any = _Outbox(log)
    inbox: Any = _Inbox(batches, context)
    pulse = Pulse()
    ready = WorkerReady(
        epoch=0, generation=0, rank=0, num_pages=64, page_size=4, context_len=64, vocab_size=64, max_slots=4,
        model_path="fake", batch_invariant=True, dtype="float32", device="fake", threads=1,
    )  # fmt: skip
    WorkerLoop(context, executor, inbox, outbox, ready, pulse).run()
    assert log == [
        "WorkerReady", "WorkerReady",
        "forward", "forward", "result 1",
        "result 2", "forward", "result 3",
        "forward", "forward", "result 4", "result 5",
    ]  # fmt: skip
    assert pulse.progress == 5 and pulse.busy_since == 0.0

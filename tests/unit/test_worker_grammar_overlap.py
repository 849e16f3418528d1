"""Grammar work beside the steps: what runs where and when, whose row fails, and who does not wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from common.messages import ForwardBatch, Grammar, Reset, RowFlag, StepResult, WorkerReady, unpack_i32
from tests.unit.sched_support import Rig, request
from tests.unit.worker_fakes import PAGE, VOCAB, FakeBackend, FakeRunner, FakeSession, begin, step
from worker_proc.executor import StepExecutor
from worker_proc.grammar.overlap import COMPILE_LIMIT_S, MaskAhead
from worker_proc.grammar_protocol import Bitmask, GrammarSession, bitmask_words
from worker_proc.runner import PackedBatch
from worker_proc.sampling.cpu import CpuSampler

LONG_S = 30.0
"""Longer than any wait here takes; reached only when a test fails."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TracedSession(FakeSession):
    """Notes who computed its masks."""

    def __init__(self, plan: list[set[int]], world: World) -> None:
        super().__init__(plan)
        self.world = world

    def fill_bitmask(self, row: Bitmask) -> bool:
        name = threading.current_thread().name
        if name.startswith("grammar-mask") and self.world.awaits_mask:
            assert self.world.in_forward.wait(LONG_S), "the forward pass did not run meanwhile"
        self.world.masks.append(name.rpartition("_")[0] or name)
        self.world.mask_done.set()
        if self is self.world.breaks:
            raise ValueError("too costly here")
        return super().fill_bitmask(row)


class World(FakeRunner, FakeBackend):
    """A model and a grammar backend whose pace the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward, self.mask_done, self.compiles = threading.Event(), threading.Event(), threading.Event()
        self.compiles.set()
        self.masks: list[str] = []
        self.awaits_mask = False
        self.breaks: object = None
        self.clock = Clock()

    def compile(self, grammar: Grammar) -> FakeSession:
        if grammar.kind == "ebnf":
            assert self.compiles.wait(LONG_S)
        return TracedSession(FakeBackend.compile(self, grammar)._plan, self)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.mask_done.clear()
        self.in_forward.set()
        if self.awaits_mask:
            assert self.mask_done.wait(LONG_S), "no mask was computed during the forward pass"
        logits = super().forward(batch)
        self.in_forward.clear()
        return logits


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.compiles.set()


@pytest.fixture
def executor(world: World) -> Iterator[StepExecutor]:
    executor = StepExecutor(world, CpuSampler(1), world, clock=world.clock)
    yield executor
    world.compiles.set()
    executor.close()


def ids_of(result: StepResult) -> list[list[int]]:
    ids, ends = unpack_i32(result.ids), np.cumsum(unpack_i32(result.num_ids))
    return [part.tolist() for part in np.split(ids, ends[:-1])]


def fast(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def slow(text: str) -> Grammar:
    """Compiles when ``world.compiles`` is set."""
    return Grammar(kind="ebnf", text=text)


# --------------------------------------------------------------------------- masks during the forward pass


def test_masks_are_computed_while_the_forward_pass_runs(executor: StepExecutor, world: World) -> None:
    begins = [begin(0, [10], [0, 2], grammar=fast("12|40 12|13 12|14 5")), begin(1, [20], [1])]
    assert ids_of(executor.execute(step(1, [(0, 1, []), (1, 1, [])], begins=begins))) == [[12], [21]]
    assert world.masks == ["grammar-compile"], "the first mask comes with the grammar"
    world.awaits_mask = True
    assert ids_of(executor.execute(step(2, [(0, 0, []), (1, 0, [])]))) == [[13], [22]]
    assert ids_of(executor.execute(step(3, [(1, 0, []), (0, 0, [])]))) == [[23], [14, 5]]
    assert world.masks[1:] == ["grammar-mask"] * 2, "one per sampled id, none in the step loop's thread"


def test_chunks_that_do_not_sample_need_no_mask(executor: StepExecutor, world: World) -> None:
    record = begin(0, [1, 2, 3, 4, 5, 10], [0, 1], grammar=fast("12|40 12|13"))
    assert ids_of(executor.execute(step(1, [(0, 4, [])], begins=[record]))) == [[]]
    assert ids_of(executor.execute(step(2, [(0, 2, [])]))) == [[12]]
    assert world.masks == ["grammar-compile"]


def test_forced_states_need_no_mask_unless_the_row_does_not_jump(executor: StepExecutor, world: World) -> None:
    begins = [begin(0, [10], [0], grammar=fast("7 8")), begin(1, [10], [1], grammar=fast("7 8"), logprobs=0)]
    assert ids_of(executor.execute(step(1, [(0, 1, []), (1, 1, [])], begins=begins))) == [[7, 8], [7]]
    assert world.masks == ["grammar-compile"]


def test_without_grammars_no_thread_is_asked(world: World) -> None:
    executor = StepExecutor(world, CpuSampler(1), world)
    executor.execute(step(1, [(0, 1, [])], begins=[begin(0, [10], [0])]))
    executor.execute(step(2, [(0, 0, [])]))
    assert executor._grammars is not None and not executor._grammars._filler._threads
    assert not executor._grammars._compilers._threads


def test_a_mask_that_fails_fails_its_row_alone(executor: StepExecutor, world: World) -> None:
    begins = [begin(0, [10], [0], grammar=fast("12|40 12|13 5")), begin(1, [20], [1]),
              begin(2, [30], [2], grammar=fast("31|40 32|40 33|40 5|6"))]  # fmt: skip
    rows: list[tuple[int, int, list[int]]] = [(0, 0, []), (1, 0, []), (2, 0, [])]
    executor.execute(step(1, rows, begins=begins))
    world.breaks = executor._slots[0].grammar._session  # type: ignore[union-attr]
    result = executor.execute(step(2, rows))
    assert [(f.row, f.message) for f in result.failures] == [(0, "grammar: too costly here")]
    assert ids_of(result) == [[], [22], [32]]
    assert ids_of(executor.execute(step(3, rows))) == [[], [23], [33]]


def test_a_mask_computed_ahead_is_the_one_computed_late() -> None:
    words = bitmask_words(VOCAB)

    def masks(ahead: bool) -> list[list[int]]:
        session: GrammarSession = FakeBackend().compile(fast("1|2 5|9 6|7"))
        wrapped = MaskAhead(session, words, jumps=True)
        out = []
        for token in (2, 9, 6):
            if ahead:
                wrapped.prepare()
                wrapped.prepare()
            row = np.full(words, -1, np.int32)
            assert wrapped.fill_bitmask(row)
            out.append(row.tolist())
            wrapped.accept_token(token)
        assert wrapped.is_complete()
        return out

    assert masks(True) == masks(False)


# --------------------------------------------------------------------------- slow compilation


def test_a_slow_grammar_holds_up_nobody_and_its_row_goes_on_later(executor: StepExecutor, world: World) -> None:
    world.compiles.clear()
    begins = [begin(0, [8, 9, 10], [0, 1], grammar=slow("12|40 50 12|52")), begin(1, [20], [2, 3])]
    assert ids_of(executor.execute(step(1, [(0, 3, []), (1, 1, [])], begins=begins))) == [[], [21]]
    world.clock.now = 1.0  # from now on the others do not wait at all
    for number, token in ((2, 22), (3, 23)):
        result = executor.execute(step(number, [(0, 0, []), (1, 0, [])]))
        assert (ids_of(result), list(result.flags), result.failures) == ([[], [token]], [0, 0], [])
    world.compiles.set()
    future: Any = executor._slots[0].grammar
    future.result(LONG_S)
    assert ids_of(executor.execute(step(4, [(0, 0, []), (1, 0, [])]))) == [[12, 50], [24]]
    assert world.batches[-1].ids.tolist() == [10, 23], "its last id again, and nothing more"


def test_a_grammar_that_is_never_ready_fails_its_row_with_words(executor: StepExecutor, world: World) -> None:
    world.compiles.clear()
    begins = [begin(0, [10], [0], grammar=slow("12|40")), begin(1, [20], [1])]
    rows: list[tuple[int, int, list[int]]] = [(0, 0, []), (1, 0, [])]
    executor.execute(step(1, rows, begins=begins))
    world.clock.now = COMPILE_LIMIT_S + 0.5
    result = executor.execute(step(2, rows))
    assert [failure.row for failure in result.failures] == [0]
    assert "not compiled after 10.5 s (the limit is 10 s)" in result.failures[0].message
    assert ids_of(result) == [[], [22]]
    assert list(executor.execute(step(3, rows, ends=[0])).flags) == [RowFlag.SKIPPED, 0]


def test_a_slow_grammar_leaves_a_thread_for_others_and_ended_requests_leave_the_queue(
    executor: StepExecutor, world: World
) -> None:
    world.compiles.clear()
    begins = [begin(0, [10], [0], grammar=slow("12|40")), begin(1, [10], [1], grammar=fast("12|40"))]
    result = executor.execute(step(1, [(0, 1, []), (1, 1, [])], begins=begins))
    assert ids_of(result) == [[], [12]]
    more = [begin(n, [10], [n], grammar=slow("12|40")) for n in (2, 3)]
    executor.execute(step(2, [], begins=more))
    queued: Any = executor._slots[3].grammar
    executor.execute(step(3, [], ends=[3]))
    assert queued.cancelled()


class ExecutorWorker:
    """The step executor where the scheduler's tests have their fake worker."""

    def __init__(self, executor: StepExecutor, num_pages: int) -> None:
        self.executor, self.num_pages, self.epoch = executor, num_pages, 0

    def ready(self) -> WorkerReady:
        return WorkerReady(
            epoch=self.epoch, generation=0, rank=0, num_pages=self.num_pages, page_size=PAGE, context_len=64,
            vocab_size=VOCAB, max_slots=8, model_path="fake", batch_invariant=True, dtype="float32",
            device="cpu", threads=1,
        )  # fmt: skip

    def handle(self, message: Any) -> list[Any]:
        if isinstance(message, Reset):
            self.epoch = message.epoch
            return [self.ready()]
        assert isinstance(message, ForwardBatch)
        return [self.executor.execute(message)]


@pytest.mark.parametrize(("num_pages", "turns"), [(32, 0), (32, 1), (32, 2), (32, 5), (9, 28)])
def test_the_scheduler_takes_a_postponed_row_as_one_that_comes_later(world: World, num_pages: int, turns: int) -> None:
    world.clock.now = 1.0
    executor = StepExecutor(world, CpuSampler(1), world, clock=world.clock)
    rig = Rig(start=False)
    worker = ExecutorWorker(executor, num_pages)
    rig.worker = worker  # type: ignore[assignment]
    rig.step(worker.ready())
    rig.work()
    rig.step()
    if turns:
        world.compiles.clear()
    constrained = request("c", [8, 9, 10, 11, 12], 6, temperature=0.0)
    constrained = msgspec.structs.replace(constrained, grammar=slow("14|40 50 51 52|53"))
    rig.step(constrained, request("a", [20], 30, temperature=0.0))
    for _ in range(turns):
        rig.work()
        rig.step()
    world.compiles.set()
    rig.finish(turns=100)
    assert rig.ids("a") == list(range(21, 51)) and rig.reason("a") == "length"
    assert rig.ids("c") == [14, 50, 51, 52] and rig.reason("c") == "stop"
    assert (rig.scheduler.state.metrics.num_preemptions_total > 0) == (num_pages == 9)
    executor.close()

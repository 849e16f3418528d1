"""A device that is told what to do and asked later, for tests of steps that are launched ahead."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.messages import ForwardBatch, Grammar, StepResult, WorkerReady, unpack_f32, unpack_i32
from tests.unit.worker_fakes import PAGE, FakeBackend, FakeRunner
from worker_proc.executor import StepExecutor
from worker_proc.grammar_protocol import Bitmask, GrammarBackend
from worker_proc.loop import Pulse, WorkerLoop
from worker_proc.runner import LATE, LateIds, PackedBatch
from worker_proc.sampling.at_once import AtOnce
from worker_proc.sampling.cpu import CpuSampler
from worker_proc.sampling.request import LogprobRequest, SampleRequest, TopTokens

LONG_S = 30.0
"""Longer than any wait here takes; reached only when a test fails."""


def hash_of(*values: Any) -> int:
    """Of numbers, the same in every process."""
    return zlib.crc32(np.array(values, np.int64).tobytes())


class LateRunner(FakeRunner):
    """Counts steps whose ids only the device knew."""

    num_late = 0

    def forward_late(self, batch: PackedBatch, late: LateIds) -> Any:
        assert np.flatnonzero(batch.ids == LATE).tolist() == late.targets.tolist()
        batch.ids[late.targets] = late.drawn[late.sources]
        self.num_late += 1
        return self.forward(batch)


class ContextRunner(LateRunner):
    """Logits follow from all ids of a context, as they lie in its pages; after one in ``one_bad_in`` contexts they
    are no numbers."""

    one_bad_in = 61

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        super().forward(batch)
        assert (batch.ids >= 0).all(), "an id that nobody has filled in"
        logits = np.empty((batch.logit_rows.size, self.vocab_size), np.float32)
        for place, row in enumerate(batch.logit_rows.tolist()):
            s, length = int(np.searchsorted(batch.query_start, row, "right")) - 1, int(batch.positions[row]) + 1
            at = np.arange(length)
            seed = hash_of(*self.pool[batch.page_table[s, at // PAGE] * PAGE + at % PAGE])
            values = np.random.default_rng(seed).standard_normal(self.vocab_size) * 2
            logits[place] = values if seed % self.one_bad_in else np.nan
        return logits


class Watch:
    """What was launched and waited for, in order. While ``launching`` nothing may be waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.launching = False

    def saw(self, what: str) -> None:
        assert not self.launching, f"{what} within a launch"
        self.log.append(what)


class Later:
    """Something that is launched and waited for once."""

    def __init__(self, watch: Watch, name: str, what: Any) -> None:
        self._watch, self._name, self._what, self.waited = watch, name, what, False

    @property
    def ids(self) -> Any:
        return self._what.ids

    def ready(self) -> bool:
        return False

    def wait(self) -> Any:
        assert not self.waited
        self.waited = True
        self._watch.saw(self._name)
        return self._what.wait()

    def report(self, place: int) -> tuple[np.float32, TopTokens]:
        assert self.waited
        return self._what.report(place)  # type: ignore[no-any-return]


class LateSampler(CpuSampler):
    """An ``AheadSampler`` that has drawn at once, and says so when asked."""

    made = Later

    def __init__(self, watch: Watch) -> None:
        super().__init__(1)
        self._watch, self._now = watch, AtOnce(self)

    def begin(self, logits: Any, requests: Sequence[SampleRequest]) -> Later:
        self._watch.log.append("draw")
        return self.made(self._watch, "see", self._now.begin(logits, requests))

    def begin_logprobs(self, logits: Any, requests: Sequence[LogprobRequest]) -> Later:
        self._watch.log.append("prompt")
        return self.made(self._watch, "see prompt", self._now.begin_logprobs(logits, requests))


class WatchedExecutor(StepExecutor):
    """Says when it launches."""

    watch: Watch

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        return self._launching(super().launch, *args, **kwargs)

    def draw(self, *args: Any, **kwargs: Any) -> Any:
        return self._launching(super().draw, *args, **kwargs)

    def _launching(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer, self.watch.launching = self.watch.launching, True
        try:
            return work(*args, **kwargs)
        finally:
            self.watch.launching = outer


class LoopDriver:
    """The worker's loop without its process: message by message, with what it answers."""

    def __init__(self, executor: WatchedExecutor, watch: Watch, ready: Any = None) -> None:
        self.executor, self.watch, executor.watch = executor, watch, watch
        self._sent: list[Any] = []
        context: Any = SimpleNamespace(stopping=False, trace=None)
        outbox: Any = SimpleNamespace(send=lambda message: self._sent.append(message) or True)
        inbox: Any = None
        self.loop = WorkerLoop(context, executor, inbox, outbox, ready, Pulse())
        self.loop._epoch = 1

    def handle(self, message: Any) -> list[Any]:
        """Do as the loop does when this message has come; what it answers."""
        self.loop._handle(message)
        return self._answers()

    def flush(self) -> list[Any]:
        """Do as the loop does when what is under way is on the host and no message has come."""
        self.loop._finish_under_way()
        return self._answers()

    def _answers(self) -> list[Any]:
        answers, self._sent[:] = list(self._sent), []
        return answers

    def run(self, batches: list[ForwardBatch]) -> list[StepResult]:
        """All of them, each there before the last is finished."""
        return [result for batch in batches for result in self.handle(batch)] + self.flush()

    def close(self) -> None:
        self.executor.close()


class LoopWorker(LoopDriver):
    """With a fake model. ``ahead``: it launches before it has seen what it drew; else one step after the other."""

    def __init__(
        self, ahead: bool, runner: FakeRunner | None = None, backend: GrammarBackend | None = None, **executor: Any
    ) -> None:
        self.runner, watch = runner or LateRunner(), Watch()
        sampler, forward = LateSampler(watch), self.runner.forward
        self.runner.forward = lambda batch: watch.log.append("forward") or forward(batch)  # type: ignore
        kwargs = {"ahead": (self.runner, sampler)} if ahead else {}
        made = WatchedExecutor(self.runner, CpuSampler(1), backend or FakeBackend(), **kwargs, **executor)  # type: ignore[arg-type]
        super().__init__(made, watch, self.ready())

    def ready(self) -> WorkerReady:
        return WorkerReady(
            epoch=0, generation=0, rank=0, num_pages=self.runner.pool.size // PAGE, page_size=PAGE, context_len=64,
            vocab_size=self.runner.vocab_size, max_slots=8, model_path="fake", batch_invariant=True, dtype="float32",
            device="fake", threads=1,
        )  # fmt: skip


def facts(results: list[StepResult]) -> list[Any]:
    """What the scheduler acts on."""
    return [
        (
            r.step, unpack_i32(r.num_ids).tolist(), unpack_i32(r.ids).tolist(), bytes(r.flags),
            unpack_f32(r.logprobs).tolist(), [(top.ids, top.logprobs) for top in r.top_logprobs],
            [(p.row, p.start, p.logprobs, [top.ids for top in p.top]) for p in r.prompt_logprobs],
            [(failure.row, failure.message) for failure in r.failures],
        )
        for r in results
    ]  # fmt: skip


class BranchSession:
    """A grammar in which what may come follows from all ids before: choices, runs of forced ids, no constraint at
    all, an error. Where ids are forced the mask allows another way, too, as it does where a text can be cut into
    tokens differently: who draws there in place of jumping ahead gets other ids.
    """

    def __init__(self, seed: int, length: int) -> None:
        self._history, self._length = [seed], length
        self._forced: list[int] = []
        self._force()

    def _hash(self, *more: int) -> int:
        return hash_of(*self._history, *more)

    def _force(self) -> None:
        count = (0, 0, 0, 1, 2, 6)[self._hash() % 6]
        left = self._length + 1 - len(self._history)
        self._forced = [10 + self._hash(1, k) % 80 for k in range(min(count, left))]

    def _choices(self) -> set[int] | None:
        """None: all."""
        if self._forced:
            return {self._forced[0], 10 + self._hash(2) % 80}
        if self._hash(3) % 7 == 0:
            return None
        return {10 + self._hash(4, k) % 80 for k in range(1 + self._hash(5) % 5)}

    def fill_bitmask(self, row: Bitmask) -> bool:
        choices = self._choices()
        if self._hash(6) % 41 == 0:
            raise ValueError("too costly here")
        if choices is None:
            return False
        row[:] = 0
        for token in choices:
            row[token // 32] |= np.array(1 << (token % 32), np.uint32).view(np.int32)
        return True

    def accept_token(self, token: int) -> None:
        choices = self._choices()
        if self.is_complete() or (choices is not None and token not in choices):
            raise ValueError(f"{token} is not allowed after {self._history}")
        follows = self._forced[:1] == [token]
        self._history.append(token)
        self._forced = self._forced[1:] if follows else []
        if not self._forced:
            self._force()

    def forced_tokens(self) -> list[int]:
        return [] if self.is_complete() else list(self._forced)

    def is_complete(self) -> bool:
        return len(self._history) > self._length

    def in_tool_call(self) -> bool:
        return self._hash(7) % 3 == 0


class BranchBackend:
    """Grammars ``seed length``. Those of kind ``ebnf`` compile when ``compiles`` is set."""

    def __init__(self) -> None:
        self.compiles = threading.Event()
        self.compiles.set()

    def compile(self, grammar: Grammar) -> BranchSession:
        if grammar.kind == "ebnf":
            assert self.compiles.wait(LONG_S)
        seed, length = map(int, grammar.text.split())
        return BranchSession(seed, length)

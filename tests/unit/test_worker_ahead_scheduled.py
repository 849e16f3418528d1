"""The scheduler with a worker that launches ahead: every request gets the ids it gets alone, one step after the other.

Grammars that force ids, end, fail and are slow to compile; penalties, log-probabilities of outputs and prompts, ends
and aborts; few pages, so that requests are preempted and resumed and prefixes come from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Grammar, Tokenized, pack_f32
from tests.unit.ahead_support import BranchBackend, ContextRunner, LoopWorker
from tests.unit.sched_support import Rig, request
from tests.unit.worker_fakes import PAGE

NUM_PAGES = (10, 13, 40)
"""The fewest hold two requests of the longest kind hardly."""
TURNS = 3000


@dataclass
class Outcome:
    """What a client sees."""

    ids: list[int]
    logprobs: bytes
    """Every bit of them."""
    prompt_logprobs: bytes
    finish: tuple[str, str] | None


class LoopRig(Rig):
    """A rig whose worker has the real loop."""

    def __init__(self, ahead: bool, pages: int, backend: BranchBackend, clock: Any) -> None:
        super().__init__(start=False, chunked_prefill_size=8, schedule_conservativeness=0.1, max_running_requests=6)
        runner = ContextRunner(pages)
        self.worker: Any = LoopWorker(ahead, runner, backend, clock=clock)
        self.step(self.worker.ready())
        self.work()
        self.step()

    def work(self, lazily: bool = False) -> None:
        """The oldest order, or (``lazily``) what is under way ends before that order comes."""
        if self.orders and not lazily:
            self.inbox += self.worker.handle(self.orders.popleft())
        else:
            self.inbox += self.worker.flush()

    def outcome(self, rid: str) -> Outcome:
        stream = self.reader.streams[rid]
        finish = None if stream.finish is None else (stream.finish.reason, stream.finish.message)
        return Outcome(stream.ids, pack_f32(stream.logprobs), pack_f32(stream.prompt_logprobs), finish)


def alone(one: Tokenized) -> Outcome:
    """What the request gets with the worker to itself, without a step ahead."""
    rig = LoopRig(False, 40, BranchBackend(), lambda: 0.0)
    rig.step(one)
    rig.finish(TURNS)
    rig.worker.close()
    return rig.outcome(one.rid)


SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5]
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"eos_token_ids": tuple(range(0, 99, 6)), "min_tokens": 3}, {"logit_bias": {7: 3.0}},
    {"repetition_penalty": 1.5}, {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 5}, {"logprobs": 2},
    {"prompt_logprobs": 1}, {"prompt_logprobs": 0, "logprobs": 0, "repetition_penalty": 0.7},
]  # fmt: skip


@st.composite
def requests(draw: st.DrawFn, number: int) -> Tokenized:
    prompt = draw(st.sampled_from([SHARED, []])) + draw(st.lists(st.integers(1, 99), min_size=1, max_size=6))
    kind = {"temperature": 1.0} | draw(st.sampled_from(KINDS))
    max_tokens = draw(st.integers(1, 18))
    made = request(f"r{number}", prompt, max_tokens, seed=draw(st.integers(0, 99)), **kind)
    text = f"{draw(st.integers(0, 999))} {draw(st.integers(1, 20))}"
    constraint = draw(st.sampled_from([None, Grammar(kind="regex", text=text), Grammar(kind="ebnf", text=text)]))
    return msgspec.structs.replace(made, grammar=constraint)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_gets_the_ids_it_gets_alone(data: st.DataObject) -> None:
    backend = BranchBackend()
    rig = LoopRig(True, data.draw(st.sampled_from(NUM_PAGES)), backend, lambda: 0.0)
    todo = [data.draw(requests(number)) for number in range(data.draw(st.integers(1, 7)))]
    wanted = {one.rid: alone(one) for one in todo}
    aborted = set()
    for one in todo:
        if one.grammar is not None and one.grammar.kind == "ebnf" and data.draw(st.integers(0, 5)) == 0:
            backend.compiles.clear()
        rig.step(one)
        for _ in range(data.draw(st.integers(0, 4))):
            rig.work(lazily=data.draw(st.integers(0, 4)) == 0)
            rig.step()
        backend.compiles.set()
        if data.draw(st.integers(0, 5)) == 0:
            aborted.add(gone := data.draw(st.sampled_from(todo)).rid)
            rig.abort(gone)
    rig.finish(TURNS)
    rig.worker.close()
    for one in todo:
        got, want = rig.reader.streams.get(one.rid), wanted[one.rid]
        if one.rid in aborted:
            assert got is None or got.ids == want.ids[: len(got.ids)]
        else:
            assert rig.outcome(one.rid) == want
    assert rig.free + rig.cached == rig.worker.runner.pool.size // PAGE

"""A worker without a model and a reader of its tokens: for tests, simulation and debugging.

``FakeWorker`` keeps the contract of ``ForwardBatch`` to the letter. Its next token is a function of the ids
so far, and its "KV" at a position is a hash of all ids up to there, written to and read through pages: a page
given away too early, a wrong page table or a missing copy changes what a row reads, and ``KvError`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import QuintetError
from common.messages import (
    BeginRequest,
    Finish,
    ForwardBatch,
    PromptLogprobs,
    Reset,
    RowFailure,
    RowFlag,
    StepResult,
    TokenBatch,
    TopLogprobs,
    ToScheduler,
    ToWorker,
    WorkerControl,
    WorkerControlReply,
    WorkerReady,
    pack_f32,
    pack_i32,
    unpack_f32,
    unpack_i32,
)

I32 = NDArray[np.int32]
_MODULUS = (1 << 31) - 1


class KvError(QuintetError):
    """A row read something else from its pages than what was computed for its ids."""


class WorkerCrash(QuintetError):
    """The fake worker died (see ``FakeWorker.poison``)."""


def next_hash(previous: int, token: int) -> int:
    """Hash of a sequence from the hash of all but its last token."""
    return (previous * 1_000_003 + token + 12_345) % _MODULUS


def next_token(value: int, vocab_size: int) -> int:
    """The token that follows a sequence with this hash; never 0, which tests use as padding."""
    return 1 + (value * 69_621 + 7) % _MODULUS % (vocab_size - 1)


def logprob_of(token: int) -> float:
    """The fake log-probability of a sampled token (exact in float32)."""
    return -token / 256.0


def alone(prompt: list[int], max_tokens: int, stop_ids: frozenset[int], vocab_size: int) -> list[int]:
    """What the fake worker generates for a request that has it for itself."""
    value = 0
    for token in prompt:
        value = next_hash(value, token)
    out: list[int] = []
    while len(out) < max_tokens:
        token = next_token(value, vocab_size)
        out.append(token)
        value = next_hash(value, token)
        if token in stop_ids:
            break
    return out


@dataclass
class _Slot:
    begin: BeginRequest
    ids: list[int]
    hashes: list[int]
    """hashes[p] is the hash of ids[: p + 1], for every known id."""
    pages: list[int]
    computed: int
    ended: bool = False
    stop_ids: frozenset[int] = frozenset()


@dataclass
class FakeWorker:
    """Executes batches. Every forced run of a grammar is ``grammar.text`` tokens long (an int as text).

    With ``max_drafts`` rows that decode have up to so many drafts, of which some are right.
    """

    num_pages: int = 64
    page_size: int = 16
    context_len: int = 4096
    vocab_size: int = 512
    max_slots: int = 64
    generation: int = 0
    max_drafts: int = 0
    tile_tokens: int = 1
    check_kv: bool = True
    cost: Callable[[int, int], float] = lambda prefill_tokens, decode_rows: 0.0
    """Seconds of a step."""
    poison: dict[str, int] = field(default_factory=dict)
    """rid -> position whose computation kills the worker."""
    failing: set[str] = field(default_factory=set)
    """rids whose rows fail."""
    epoch: int = 0
    slots: dict[int, _Slot] = field(default_factory=dict)
    kv: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def ready(self, epoch: int = 0) -> WorkerReady:
        """What it says when it has started (epoch 0) and for a Reset."""
        return WorkerReady(
            epoch=epoch, generation=self.generation, rank=0, num_pages=self.num_pages, page_size=self.page_size,
            context_len=self.context_len, vocab_size=self.vocab_size, max_slots=self.max_slots, model_path="fake",
            batch_invariant=True, dtype="float32", device="none", threads=1, max_drafts=self.max_drafts,
            tile_tokens=self.tile_tokens,
        )  # fmt: skip

    def handle(self, message: ToWorker) -> list[ToScheduler]:
        """Execute one message; raises WorkerCrash when it is poisonous."""
        match message:
            case Reset():
                self.epoch = message.epoch
                self.slots.clear()
                self.kv = np.full(self.num_pages * self.page_size, -1, dtype=np.int64)
                return [self.ready(message.epoch)]
            case WorkerControl():
                return [WorkerControlReply(request_id=message.request_id, ok=True, message=message.action)]
            case ForwardBatch():
                return [self._step(message)] if message.epoch == self.epoch else []

    def _step(self, batch: ForwardBatch) -> StepResult:
        size = self.page_size
        for source, target in unpack_i32(batch.copies).reshape(-1, 2).tolist():
            self.kv[target * size : (target + 1) * size] = self.kv[source * size : (source + 1) * size]
        for begin in batch.begins:
            self._begin(begin)
        new_pages = iter(unpack_i32(batch.new_pages).tolist())
        results = _Results()
        slots, counts = unpack_i32(batch.slots).tolist(), unpack_i32(batch.num_new_pages).tolist()
        chunks = unpack_i32(batch.num_tokens).tolist()
        if len(set(slots)) != len(slots):
            raise KvError(f"a slot has two rows: {slots}")
        for row, (slot, chunk, count) in enumerate(zip(slots, chunks, counts, strict=True)):
            state = self.slots[slot]
            state.pages += [next(new_pages) for _ in range(count)]
            self._row(row, state, chunk, results)
        for slot in unpack_i32(batch.ends).tolist():
            del self.slots[slot]
        cost = self.cost(sum(chunks), sum(chunk == 0 for chunk in chunks))
        return results.message(batch, cost)

    def _begin(self, begin: BeginRequest) -> None:
        if begin.slot in self.slots:
            raise KvError(f"slot {begin.slot} is begun for {begin.rid} before it was ended")
        ids = unpack_i32(begin.ids).tolist()
        hashes, value = [], 0
        for token in ids:
            value = next_hash(value, token)
            hashes.append(value)
        stop_ids = frozenset(begin.eos_token_ids) | frozenset(begin.sampling.stop_token_ids)
        state = _Slot(begin, ids, hashes, unpack_i32(begin.pages).tolist(), begin.computed_len, stop_ids=stop_ids)
        if len(set(state.pages)) != len(state.pages):
            raise KvError(f"{begin.rid} has a page twice: {state.pages}")
        self.slots[begin.slot] = state

    def _row(self, row: int, state: _Slot, chunk: int, results: _Results) -> None:
        begin = state.begin
        if state.ended:
            results.add([], RowFlag.SKIPPED)
            return
        if begin.rid in self.failing:
            results.add([], 0)
            results.failures.append(RowFailure(row, f"{begin.rid} cannot be computed"))
            return
        first = state.computed
        capacity = len(state.pages) * self.page_size
        goal = first + chunk if chunk else min(len(state.ids), capacity)
        if goal > min(len(state.ids), capacity):
            raise KvError(f"{begin.rid}: asked to compute {goal} of {len(state.ids)} ids in {capacity} positions")
        if begin.rid in self.poison and first <= self.poison[begin.rid] < goal:
            raise WorkerCrash(begin.rid)
        self._compute(state, goal)
        if chunk and begin.sampling.prompt_logprobs is not None and first < begin.prompt_len - 1:
            results.prompt.append(self._prompt_logprobs(row, state, first, goal))
        if state.computed < len(state.ids):
            results.add([], 0)
            return
        room = 0 if chunk or begin.grammar is not None else max(min(self.max_drafts, capacity - len(state.ids) - 1), 0)
        results.add(*self._sample(state, capacity, state.hashes[-1] % (room + 1)), asks=begin.sampling.logprobs)
        if room:
            self._spoil(state, goal + room)

    def _compute(self, state: _Slot, goal: int) -> None:
        pages = np.array(state.pages, dtype=np.int64)
        positions = np.arange(state.computed if not self.check_kv else 0, goal)
        where = pages[positions // self.page_size] * self.page_size + positions % self.page_size
        done = len(positions) - (goal - state.computed)
        known = state.hashes[:goal] if self.check_kv else state.hashes[state.computed : goal]
        expected = np.array(known, dtype=np.int64)
        self.kv[where[done:]] = expected[done:]
        if self.check_kv and not np.array_equal(self.kv[where], expected):
            bad = int(np.flatnonzero(self.kv[where] != expected)[0])
            page = pages[bad // self.page_size]
            raise KvError(f"{state.begin.rid}: position {bad} of {goal} holds another sequence (page {page})")
        state.computed = goal

    def _spoil(self, state: _Slot, end: int) -> None:
        """Drafts up to position ``end`` were computed; those that were right stay."""
        positions = np.arange(state.computed, end)
        pages = np.array(state.pages, dtype=np.int64)
        self.kv[pages[positions // self.page_size] * self.page_size + positions % self.page_size] = -2
        self._compute(state, len(state.ids) - 1)

    def _sample(self, state: _Slot, capacity: int, num_right: int = 0) -> tuple[list[int], int]:
        """One token, then the tokens a grammar forces after it as far as the pages reach, or those after drafts."""
        begin = state.begin
        grammar = begin.grammar
        forced = int(grammar.text) if grammar is not None else 0
        limit = begin.prompt_len + (begin.sampling.max_tokens or 0)
        new: list[int] = []
        while len(new) <= forced + num_right and (not new or len(state.ids) < capacity) and not state.ended:
            token = next_token(state.hashes[-1], self.vocab_size)
            state.ids.append(token)
            state.hashes.append(next_hash(state.hashes[-1], token))
            new.append(token)
            state.ended = token in state.stop_ids or len(state.ids) >= limit
        flags = RowFlag.IN_TOOL_CALL if forced and new[-1] % 2 and not state.ended else 0
        return new, flags

    def _prompt_logprobs(self, row: int, state: _Slot, first: int, goal: int) -> PromptLogprobs:
        end = min(goal, state.begin.prompt_len - 1)
        tokens = state.ids[first + 1 : end + 1]
        k = state.begin.sampling.prompt_logprobs
        top = [TopLogprobs(pack_i32([t] * k), pack_f32([logprob_of(t)] * k)) for t in tokens] if k else []
        return PromptLogprobs(row, first + 1, pack_f32([logprob_of(t) for t in tokens]), top)


@dataclass
class _Results:
    """Columns of a StepResult while they grow."""

    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)

    def add(self, new: list[int], flags: int, asks: int | None = None) -> None:
        self.counts.append(len(new))
        self.ids += new
        self.flags.append(flags)
        if asks is not None:
            self.logprobs += [logprob_of(token) for token in new]
            if asks:
                self.top += [TopLogprobs(pack_i32([t] * asks), pack_f32([logprob_of(t)] * asks)) for t in new]

    def message(self, batch: ForwardBatch, forward_s: float) -> StepResult:
        return StepResult(
            epoch=batch.epoch, step=batch.step, num_ids=pack_i32(self.counts), ids=pack_i32(self.ids),
            flags=bytes(self.flags), logprobs=pack_f32(self.logprobs), top_logprobs=self.top,
            prompt_logprobs=self.prompt, failures=self.failures, forward_s=forward_s,
        )  # fmt: skip


@dataclass
class Stream:
    """What a client would have of one rid."""

    attempt: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    accepted: tuple[int, int] | None = None
    """(prompt tokens, cached tokens)."""
    finish: Finish | None = None
    refused: bool = False
    stopped: bool = False
    """A stop string was found: what still comes is dropped."""


@dataclass
class FakeReader:
    """Detokenizer and gateway in one: keeps each rid's ids, and raises when the contract of TokenBatch is broken."""

    streams: dict[str, Stream] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    successor: bool = False
    """It replaced another, so rows of requests it never saw begin may come, and are dropped."""
    num_cached_tokens: int = 0

    def read(self, batch: TokenBatch) -> None:
        """Take in one batch."""
        self.gone += batch.gone_gateways
        for begin in batch.begins:
            old = self.streams.get(begin.rid)
            if old is not None and old.finish is None and begin.attempt <= old.attempt:
                raise QuintetError(f"{begin.rid}: begun twice with attempt {begin.attempt}")
            self.streams[begin.rid] = Stream(begin.attempt, accepted=(begin.prompt_len, begin.cached_len))
            self.num_cached_tokens += begin.cached_len
        for row in batch.rows:
            stream = self.streams.get(row.rid)
            if stream is None and not self.successor:
                raise QuintetError(f"{row.rid}: a row of a request that was not begun")
            if stream is None or stream.stopped:
                continue
            if stream.finish is not None or stream.attempt != row.attempt or row.index != len(stream.ids):
                raise QuintetError(f"{row.rid}: row {row} does not continue {stream}")
            stream.ids += unpack_i32(row.ids).tolist()
            stream.logprobs += unpack_f32(row.logprobs).tolist()
            if row.prompt_logprobs:
                stream.prompt_logprobs = unpack_f32(row.prompt_logprobs).tolist()
            stream.finish = row.finish
        for refused in batch.refused:
            known = self.streams.get(refused.rid)
            stream = Stream(refused.attempt) if known is None or known.attempt < refused.attempt else known
            self.streams[refused.rid] = stream
            if stream.finish is None:
                stream.finish, stream.refused = refused.finish, True

"""A worker that keeps the wire contract and computes nothing.

It does with lengths what the real one does with tensors: takes slots, appends pages, computes
chunks, samples where all known ids are computed, sees a request's end before the scheduler does
and skips the rows sent meanwhile. Token ids are a function of (rid, index) alone, as a real
model's are of the prompt and seed, so whatever the scheduler does (preempt, restart, resend) the
same ids must come out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import InvariantError
from common.messages import (
    BeginRequest,
    ForwardBatch,
    RowFlag,
    StepResult,
    WorkerReady,
    unpack_i32,
)

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
EOS = 2
FIRST_ID = 3
"""Ids below are never sampled, except the end."""


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What a worker announces of itself."""

    num_pages: int = 4096
    page_size: int = 16
    context_len: int = 8192
    vocab_size: int = 32000
    max_slots: int = 1024


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a cost model needs to know of a step."""

    prefill_tokens: int
    decode_rows: int
    context_tokens: int
    """Sum over the rows that ran of the positions they attended to."""


def output_ids(rid: str, start: int, stop: int, vocab_size: int) -> I32:
    """The ids the fake worker gives ``rid`` at output indices [start, stop), its end aside."""
    return _mix(np.uint64(zlib.crc32(rid.encode())), np.arange(start, stop), vocab_size)


def _mix(seeds: NDArray[np.uint64] | np.uint64, index: I64, vocab_size: int) -> I32:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    with np.errstate(over="ignore"):
        x = seeds * np.uint64(0x9E3779B97F4A7C15) + index.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    ids: I32 = (FIRST_ID + x % np.uint64(vocab_size - FIRST_ID)).astype(np.int32)
    return ids


class FakeWorker:
    """Executes batches in order. ``output_len_of(rid)`` says after how many tokens the model would end."""

    def __init__(self, shape: WorkerShape, output_len_of: Callable[[str], int]) -> None:
        self.shape = shape
        self.epoch = 0
        self._output_len_of = output_len_of
        n = shape.max_slots
        self.rids: list[str | None] = [None] * n
        self.known: I32 = np.zeros(n, dtype=np.int32)
        self.computed: I32 = np.zeros(n, dtype=np.int32)
        self.capacity: I32 = np.zeros(n, dtype=np.int32)
        self._prompt: I32 = np.zeros(n, dtype=np.int32)
        self._end: I32 = np.zeros(n, dtype=np.int32)
        """Known ids with which the request ends."""
        self._ends_by_eos: NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        self._seed: NDArray[np.uint64] = np.zeros(n, dtype=np.uint64)

    def ready(self, epoch: int, generation: int = 0) -> WorkerReady:
        """Forget everything and say so."""
        self.epoch = epoch
        self.rids = [None] * self.shape.max_slots
        self.known[:] = 0
        return WorkerReady(
            epoch=epoch,
            generation=generation,
            rank=0,
            num_pages=self.shape.num_pages,
            page_size=self.shape.page_size,
            context_len=self.shape.context_len,
            vocab_size=self.shape.vocab_size,
            max_slots=self.shape.max_slots,
            model_path="fake",
            batch_invariant=True,
            dtype="none",
            device="none",
            threads=0,
        )

    def execute(self, batch: ForwardBatch) -> tuple[StepResult, StepLoad]:
        """Run one step. Raises InvariantError where a batch breaks the contract."""
        for begin in batch.begins:
            self._begin(begin)
        slots = unpack_i32(batch.slots)
        chunks = unpack_i32(batch.num_tokens)
        size = self.shape.page_size
        self.capacity[slots] += unpack_i32(batch.num_new_pages) * size
        known = self.known[slots]
        computed = self.computed[slots]
        over = (known >= self._end[slots]) & (chunks == 0)
        todo = np.where(chunks > 0, chunks, np.minimum(known, self.capacity[slots]) - computed)
        todo[over] = 0
        after = computed + todo
        self._check(slots, after, known, todo, over)
        self.computed[slots] = after
        sampled = (after == known) & ~over & (known < self._end[slots])
        ids = self._sample(slots[sampled])
        flags = np.zeros(len(slots), dtype=np.uint8)
        flags[over] = RowFlag.SKIPPED
        load = StepLoad(
            int(chunks.sum()), int((todo[chunks == 0] > 0).sum()), int(after[todo > 0].sum())
        )
        for slot in unpack_i32(batch.ends).tolist():
            self.rids[slot] = None
            self.known[slot] = 0
        result = StepResult(
            epoch=batch.epoch,
            step=batch.step,
            num_ids=sampled.astype("<i4").tobytes(),
            ids=ids.astype("<i4").tobytes(),
            flags=flags.tobytes(),
        )
        return result, load

    def _begin(self, begin: BeginRequest) -> None:
        sampling = begin.sampling
        slot, size = begin.slot, self.shape.page_size
        if self.rids[slot] is not None:
            raise InvariantError(f"slot {slot} was begun for {begin.rid} while {self.rids[slot]} holds it")
        if begin.grammar is not None or sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            raise InvariantError(f"{begin.rid}: the fake worker has no grammars and no log-probabilities")
        limit = sampling.max_tokens or 0
        natural = max(self._output_len_of(begin.rid), 1, sampling.min_tokens + 1)
        if not begin.eos_token_ids:
            natural = limit + 1
        if sampling.stop_token_ids:
            found = np.isin(output_ids(begin.rid, 0, limit, self.shape.vocab_size), sampling.stop_token_ids)
            found[: sampling.min_tokens] = False
            natural = min(natural, int(found.argmax()) + 1 if found.any() else natural)
        self.rids[slot] = begin.rid
        self.known[slot] = len(begin.ids) // 4
        self.computed[slot] = begin.computed_len
        self.capacity[slot] = len(begin.pages) // 4 * size
        self._prompt[slot] = begin.prompt_len
        self._end[slot] = begin.prompt_len + min(natural, limit)
        self._ends_by_eos[slot] = bool(begin.eos_token_ids) and self._output_len_of(begin.rid) <= natural <= limit
        self._seed[slot] = zlib.crc32(begin.rid.encode())

    def _sample(self, slots: I32) -> I32:
        index = (self.known[slots] - self._prompt[slots]).astype(np.int64)
        ids = _mix(self._seed[slots], index, self.shape.vocab_size)
        self.known[slots] += 1
        ids[(self.known[slots] == self._end[slots]) & self._ends_by_eos[slots]] = EOS
        return ids

    def _check(self, slots: I32, after: I32, known: I32, todo: I32, over: NDArray[np.bool_]) -> None:
        bad = (after > known) | (after > self.capacity[slots]) | ((todo <= 0) & ~over) | (known == 0)
        if bad.any():
            r = int(bad.argmax())
            slot = int(slots[r])
            raise InvariantError(
                f"row {r}, slot {slot} ({self.rids[slot]}): {todo[r]} tokens to position {after[r]} of {known[r]}"
                f" known, with pages for {self.capacity[slot]}"
            )

"""A runner and a grammar that need no model: what the worker's own bookkeeping is tested with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.messages import BeginRequest, ForwardBatch, Grammar, SamplingParams, pack_i32
from worker_proc.grammar_protocol import Bitmask
from worker_proc.runner import PackedBatch

VOCAB = 100
PAGE = 4


class FakeRunner:
    """Each id's likeliest successor is id + 1. Keeps ids in its "pages" and checks that they are there.

    Logits of a position depend on the ids in the pages, so a wrong page table or a lost token shows.
    """

    name, batch_invariant, page_size, vocab_size, dtype = "fake", True, PAGE, VOCAB, "float32"

    def __init__(self, num_pages: int = 64) -> None:
        self.pool = np.full(num_pages * PAGE, -1, np.int64)
        self.batches: list[PackedBatch] = []
        self.poison: set[int] = set()
        """Ids after which the logits are NaN."""

    def kv_bytes_per_page(self) -> int:
        return 8 * PAGE

    def weight_bytes(self) -> int:
        return 0

    def allocate(self, num_pages: int) -> None:
        self.pool = np.full(num_pages * PAGE, -1, np.int64)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.batches.append(batch)
        logits = np.zeros((batch.ids.size, VOCAB), np.float32)
        for s, length in enumerate(batch.context_lens.tolist()):
            cells = batch.page_table[s, np.arange(length) // PAGE] * PAGE + np.arange(length) % PAGE
            rows = np.arange(batch.query_start[s], batch.query_start[s + 1])
            assert batch.positions[rows].tolist() == list(range(length - rows.size, length))
            self.pool[cells[length - rows.size :]] = batch.ids[rows]
            assert (self.pool[cells] >= 0).all(), "attends to a cell that was never written"
            for row, position in zip(rows.tolist(), range(length - rows.size, length), strict=True):
                last = int(self.pool[cells[position]])
                logits[row, (last + 1) % VOCAB] = 5.0
                logits[row, (last + 2) % VOCAB] = 4.0
                if last in self.poison:
                    logits[row] = np.nan
        return logits[batch.logit_rows]

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            self.pool[b * PAGE : (b + 1) * PAGE] = self.pool[a * PAGE : (a + 1) * PAGE]

    def close(self) -> None:
        pass


class FakeSession:
    """The output is a fixed list of alternatives per position: one alternative is forced."""

    def __init__(self, plan: list[set[int]]) -> None:
        self._plan, self._at = plan, 0

    def fill_bitmask(self, row: Bitmask) -> bool:
        row[:] = 0
        for token in self._plan[self._at]:
            row[token // 32] |= np.array(1 << (token % 32), np.uint32).view(np.int32)
        return True

    def accept_token(self, token: int) -> None:
        if self._at >= len(self._plan) or token not in self._plan[self._at]:
            raise ValueError(f"{token} is not allowed at {self._at}")
        self._at += 1

    def forced_tokens(self) -> list[int]:
        forced = []
        for choices in self._plan[self._at :]:
            if len(choices) > 1:
                break
            forced += list(choices)
        return forced

    def is_complete(self) -> bool:
        return self._at == len(self._plan)

    def in_tool_call(self) -> bool:
        return 0 < self._at < len(self._plan)


class FakeBackend:
    """Grammar text such as ``1|2 5 6``: 1 or 2, then 5, then 6."""

    def compile(self, grammar: Grammar) -> FakeSession:
        if grammar.text == "broken":
            raise ValueError("cannot compile 'broken'")
        return FakeSession([{int(t) for t in part.split("|")} for part in grammar.text.split()])


def begin(slot: int, ids: list[int], pages: list[int], **kwargs: Any) -> BeginRequest:
    """A ``BeginRequest``; sampling parameters and record fields by name."""
    fields = {"prompt_len": len(ids), "computed_len": 0, "eos_token_ids": (), "grammar": None}
    for name in list(kwargs):
        if name in fields:
            fields[name] = kwargs.pop(name)
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 50} | kwargs))
    return BeginRequest(slot, f"r{slot}", pack_i32(ids), pages=pack_i32(pages), sampling=sampling, **fields)  # type: ignore[arg-type]


def step(number: int, rows: list[tuple[int, int, list[int]]], **kwargs: Any) -> ForwardBatch:
    """A ``ForwardBatch`` of rows (slot, num_tokens, new pages)."""
    ends = kwargs.pop("ends", [])
    return ForwardBatch(
        epoch=1,
        step=number,
        slots=pack_i32([slot for slot, _, _ in rows]),
        num_tokens=pack_i32([n for _, n, _ in rows]),
        num_new_pages=pack_i32([len(pages) for _, _, pages in rows]),
        new_pages=pack_i32([page for _, _, pages in rows for page in pages]),
        ends=pack_i32(ends),
        **kwargs,
    )

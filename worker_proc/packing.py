"""From the rows of a ``ForwardBatch`` to one ``PackedBatch``: which ids of which slots are computed in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worker_proc.runner import LATE, PackedBatch
from worker_proc.slots import Slot

I32 = NDArray[np.int32]


@dataclass(slots=True)
class Row:
    """One row of a step that is computed."""

    index: int
    """Row number in the ``ForwardBatch``."""
    slot: Slot
    start: int
    """Position of its first token."""
    length: int
    """How many tokens it computes."""
    samples: bool
    """All known ids are computed after it."""
    prompt_rows: int = 0
    """How many of its tokens' logits are wanted for prompt log-probabilities (its first ones)."""
    first_logit: int = 0
    """Its first row in the step's logits."""
    num_logits: int = 0
    proposal: list[int] = field(default_factory=list)
    """Ids that may come next (``speculation/``)."""
    match: int = 0
    """How many ids agree before them."""
    num_drafts: int = 0
    """How many of them it computes: its last tokens."""

    @property
    def is_late(self) -> bool:
        """Its one token is not on the host yet."""
        return self.start >= self.slot.ids.size

    @property
    def sample_logit(self) -> int:
        """Row of the step's logits that the next id is drawn from; those after its drafts follow."""
        return self.first_logit + self.num_logits - 1 - self.num_drafts

    @property
    def drafts(self) -> list[int]:
        """Ids it computes beyond those known."""
        return self.proposal[: self.num_drafts]


def plan_row(index: int, slot: Slot, num_tokens: int, page_size: int) -> Row | str:
    """Work out what a row computes; words if it cannot be done.

    ``num_tokens`` > 0: that many; 0: every known id that is not computed, within the page table.
    """
    known, capacity = slot.num_known, slot.capacity(page_size)
    open_len = min(known, capacity) - slot.computed_len
    length = num_tokens or open_len
    if length <= 0 or length > open_len:
        return (
            f"cannot compute {num_tokens or 'the'} next ids: {known} known, {slot.computed_len} computed, "
            f"pages for {capacity}"
        )
    samples = slot.computed_len + length == known
    row = Row(index, slot, slot.computed_len, length, samples)
    if slot.sampling.prompt_logprobs is not None:
        row.prompt_rows = max(0, min(row.start + length, slot.prompt_len - 1) - row.start)
    return row


def pack(rows: list[Row], page_size: int) -> PackedBatch:
    """Pack the rows' tokens; fills in each row's place among the logits."""
    lengths = np.array([row.length for row in rows], np.int32)
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    starts = np.array([row.start for row in rows], np.int32)
    positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(starts - query_start[:-1], lengths)
    ids = np.full(query_start[-1], LATE, np.int32)
    width = max(-(-(row.start + row.length) // page_size) for row in rows)
    table = np.zeros((len(rows), width), np.int32)
    logit_rows: list[I32] = []
    num_logits = 0
    for s, row in enumerate(rows):
        begin, end = int(query_start[s]), int(query_start[s + 1])
        if not row.is_late:
            ids[begin : end - row.num_drafts] = row.slot.ids.view()[row.start : row.start + row.length - row.num_drafts]
            ids[end - row.num_drafts : end] = row.drafts
        num_pages = -(-(row.start + row.length) // page_size)
        table[s, :num_pages] = row.slot.pages.view()[:num_pages]
        wanted = np.arange(begin, begin + row.prompt_rows, dtype=np.int32)
        if row.samples and row.prompt_rows < row.length:
            wanted = np.append(wanted, np.arange(end - 1 - row.num_drafts, end, dtype=np.int32))
        row.first_logit, row.num_logits = num_logits, int(wanted.size)
        num_logits += row.num_logits
        logit_rows.append(wanted)
    return PackedBatch(
        ids=ids,
        positions=positions.astype(np.int32, copy=False),
        query_start=query_start,
        context_lens=starts + lengths,
        page_table=table,
        logit_rows=np.concatenate(logit_rows),
    )

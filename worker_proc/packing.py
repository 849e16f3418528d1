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
    # Lists: rows that decode have so few tokens that a call of numpy costs more than its work.
    ids: list[int] = []
    positions: list[int] = []
    query_start = [0]
    context_lens: list[int] = []
    logit_rows: list[int] = []
    width = max([-(-(row.start + row.length) // page_size) for row in rows])
    table = np.zeros((len(rows), width), np.int32)
    for s, row in enumerate(rows):
        begin, end, context = len(ids), len(ids) + row.length, row.start + row.length
        if row.is_late:
            ids += [LATE] * row.length
        else:
            ids += row.slot.ids.part(row.start, context - row.num_drafts).tolist()
            if row.num_drafts:
                ids += row.drafts
        positions += range(row.start, context)
        query_start.append(end)
        context_lens.append(context)
        num_pages = -(-context // page_size)
        table[s, :num_pages] = row.slot.pages.part(0, num_pages)
        row.first_logit = len(logit_rows)
        logit_rows += range(begin, begin + row.prompt_rows)
        if row.samples and row.prompt_rows < row.length:
            logit_rows += range(end - 1 - row.num_drafts, end)
        row.num_logits = len(logit_rows) - row.first_logit
    return PackedBatch(
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        query_start=np.array(query_start, np.int32),
        context_lens=np.array(context_lens, np.int32),
        page_table=table,
        logit_rows=np.array(logit_rows, np.int32),
    )

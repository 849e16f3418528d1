"""A batch while it is put together, and how it becomes a ForwardBatch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from common.messages import BeginRequest, ForwardBatch, pack_ints
from scheduler_proc import wide
from scheduler_proc.slots import FEW
from scheduler_proc.state import InFlight, Pool


@dataclass(slots=True)
class Draft:
    """Decoding rows, which are many and all alike, apart from prefill rows."""

    pool: Pool
    decode_slots: array[int] = field(default_factory=lambda: array("i"))
    num_new_pages: dict[int, int] = field(default_factory=dict)
    """Slot of a decoding row -> pages appended to it, where there are any; in the order of the rows."""
    new_pages: list[int] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_chunks: list[int] = field(default_factory=list)
    prefill_samples: list[bool] = field(default_factory=list)
    prefill_context: int = 0
    """Sum over the prefill tokens of how many positions are before each."""
    begins: list[BeginRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: bool = False

    @property
    def num_prefill_tokens(self) -> int:
        """Prefill tokens so far."""
        return sum(self.prefill_chunks)

    def seal(self, epoch: int, step: int) -> ForwardBatch | None:
        """Count the rows as in flight and make the message; None when there is nothing to do."""
        table = self.pool.table
        ends = table.end_slots()
        slots = self.decode_slots + array("i", self.prefill_slots)
        if not slots and not ends:
            return None
        num_decode = len(self.decode_slots)
        chunks = array("i", bytes(4 * num_decode)) + array("i", self.prefill_chunks)
        samples = b"\1" * num_decode + bytes(self.prefill_samples)
        if len(slots) > FEW:
            wide.count_sent(table, slots, samples)
        else:
            for slot, sample in zip(slots, samples, strict=True):
                table.rows[slot] += 1
                table.sampling[slot] += sample
        copied = tuple(src for src, _ in self.copies)
        num_tokens, context = self.num_prefill_tokens, self.prefill_context
        self.pool.in_flight.append(InFlight(step, slots, chunks, samples, num_decode, num_tokens, copied, context))
        num_pages, row = array("i", bytes(4 * len(slots))), 0
        for slot, n in self.num_new_pages.items():
            row = slots.index(slot, row)
            num_pages[row] = n
        return ForwardBatch(
            epoch=epoch,
            step=step,
            copies=pack_ints([page for copy in self.copies for page in copy]),
            begins=self.begins,
            slots=slots.tobytes(),
            num_tokens=chunks.tobytes(),
            num_new_pages=num_pages.tobytes(),
            new_pages=pack_ints(self.new_pages),
            ends=pack_ints(ends),
        )

"""A batch while it is put together, and how it becomes a ForwardBatch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.messages import BeginRequest, ForwardBatch, pack_i32
from scheduler_proc.state import InFlight, Pool

I32 = NDArray[np.int32]
_NONE: I32 = np.zeros(0, dtype=np.int32)


@dataclass
class Draft:
    """Decoding rows as arrays, prefill rows as lists: there are many of the former, few of the latter."""

    pool: Pool
    decode_slots: I32 = field(default_factory=lambda: _NONE)
    decode_num_pages: I32 = field(default_factory=lambda: _NONE)
    """[D]: pages appended to each decoding row."""
    new_pages: list[int] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_chunks: list[int] = field(default_factory=list)
    prefill_samples: list[bool] = field(default_factory=list)
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
        slots = np.concatenate([self.decode_slots, np.array(self.prefill_slots, dtype=np.int32)]).astype(np.int32)
        ends = table.end_slots()
        if not slots.size and not ends:
            return None
        num_decode, num_prefill = len(self.decode_slots), len(self.prefill_slots)
        chunks = np.zeros(slots.size, dtype=np.int32)
        chunks[num_decode:] = self.prefill_chunks
        sampling = np.ones(slots.size, dtype=np.bool_)
        sampling[num_decode:] = self.prefill_samples
        num_pages = np.concatenate([self.decode_num_pages, np.zeros(num_prefill, dtype=np.int32)])
        table.rows[slots] += 1
        table.sampling[slots] += sampling
        copied = tuple(src for src, _ in self.copies)
        self.pool.in_flight.append(InFlight(step, slots, chunks, sampling, copied))
        return ForwardBatch(
            epoch=epoch,
            step=step,
            copies=pack_i32(np.array(self.copies, dtype=np.int32).reshape(-1)),
            begins=self.begins,
            slots=pack_i32(slots),
            num_tokens=pack_i32(chunks),
            num_new_pages=pack_i32(num_pages),
            new_pages=pack_i32(self.new_pages),
            ends=pack_i32(ends),
        )

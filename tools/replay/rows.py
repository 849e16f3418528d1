"""Which request each row of a forward batch worked on, and how far it came.

A row names only a slot and a number of tokens (the worker knows the rest), so a reader follows the
slots as the worker does: begins fill them, rows move them on, results append ids, ends empty them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.messages import ForwardBatch, RowFlag, StepResult, pack_i32, unpack_i32
from common.trace import AnyRecord, SchedulerStep
from scheduler_proc.scheduler import Scheduler


@dataclass(slots=True)
class Slot:
    """What is known of the request in a slot."""

    rid: str
    prompt_len: int
    known: int
    """Ids known to the worker."""
    computed: int
    capacity: int
    """Positions its pages cover."""


@dataclass(frozen=True, slots=True)
class RowDone:
    """One row of a step that returned."""

    rid: str
    start: int
    """First position it computed."""
    num_tokens: int
    prompt_len: int
    chunk: int
    """Tokens of a prefill chunk; 0 for a row that decodes."""
    new_pages: int
    ids: tuple[int, ...]
    """Ids it sampled (and a grammar forced)."""
    skipped: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    """A batch with its result."""

    decided: float
    """When the scheduler decided it."""
    returned: float
    """When the scheduler saw the result."""
    batch: ForwardBatch
    result: StepResult
    rows: list[RowDone]


class SlotReader:
    """Follows the slots of one epoch after the other. Slots begun before the trace have the rid ``?``."""

    def __init__(self, page_size: int = 16) -> None:
        self.page_size = page_size
        self.slots: dict[int, Slot] = {}
        self._sent: dict[tuple[int, int], tuple[float, ForwardBatch]] = {}

    def resume(self, scheduler: Scheduler) -> None:
        """Take over the slots and the batches in flight of a scheduler restored from a snapshot."""
        pool = scheduler.state.pool
        if pool is None:
            return
        table = pool.table
        self.page_size = pool.page_size
        for req in table.taken():
            self.slots[req.slot] = Slot(
                req.rid,
                req.prompt_len,
                int(table.known[req.slot]),
                int(table.computed[req.slot]),
                int(table.capacity[req.slot]),
            )
        for flight in pool.in_flight:
            batch = ForwardBatch(
                epoch=scheduler.state.epoch,
                step=flight.step,
                slots=pack_i32(flight.slots),
                num_tokens=pack_i32(flight.chunks),
                num_new_pages=bytes(4 * len(flight.slots)),
            )
            self.sent(batch, -1.0)

    def steps(self, records: Iterable[AnyRecord]) -> Iterator[StepDone]:
        """Every step that returned, in order."""
        for record in records:
            if isinstance(record, SchedulerStep):
                for message in record.messages:
                    if isinstance(message, StepResult):
                        done = self.returned(message, record.now)
                        if done is not None:
                            yield done
                if record.batch is not None:
                    self.sent(record.batch, record.now)

    def sent(self, batch: ForwardBatch, now: float) -> None:
        """A batch was decided."""
        if any(epoch != batch.epoch for epoch, _ in self._sent):
            self._sent.clear()
        self._sent[batch.epoch, batch.step] = (now, batch)

    def returned(self, result: StepResult, now: float) -> StepDone | None:
        """A result came back; None when its batch is not in the trace (or of a worker that died)."""
        sent = self._sent.pop((result.epoch, result.step), None)
        if sent is None:
            return None
        decided, batch = sent
        for begin in batch.begins:
            self.slots[begin.slot] = Slot(
                begin.rid,
                begin.prompt_len,
                len(begin.ids) // 4,
                begin.computed_len,
                len(begin.pages) // 4 * self.page_size,
            )
        rows = self._rows(batch, result)
        for slot in unpack_i32(batch.ends).tolist():
            self.slots.pop(slot, None)
        return StepDone(decided, now, batch, result, rows)

    def _rows(self, batch: ForwardBatch, result: StepResult) -> list[RowDone]:
        rows = []
        counts = unpack_i32(result.num_ids).tolist()
        ids = unpack_i32(result.ids).tolist()
        pages = unpack_i32(batch.num_new_pages).tolist()
        at = 0
        for r, (number, chunk) in enumerate(
            zip(unpack_i32(batch.slots).tolist(), unpack_i32(batch.num_tokens).tolist(), strict=True)
        ):
            slot = self.slots.setdefault(number, Slot("?", 0, 0, 0, 0))
            slot.capacity += pages[r] * self.page_size
            skipped = bool(result.flags[r] & RowFlag.SKIPPED) if result.flags else False
            n = chunk or max(min(slot.known, slot.capacity) - slot.computed, 0)
            n = 0 if skipped else n
            new = tuple(ids[at : at + counts[r]])
            at += counts[r]
            rows.append(RowDone(slot.rid, slot.computed, n, slot.prompt_len, chunk, pages[r], new, skipped))
            slot.computed += n
            slot.known += len(new)
        return rows

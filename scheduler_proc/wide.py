"""Steps of many rows as array operations: what the loops of ``commit.py``, ``batch.py``, ``draft.py`` and
``output.py`` do to each row, done to the columns.

For ``slots.FEW`` rows and less a loop takes less: each of some sixty calls of numpy has its code and data to fetch
from memory when a step of a worker on the same cores has just passed through the caches. Each gives what the loop
gives.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from common.messages import StepResult, TokenRow, unpack_i32
from scheduler_proc.slots import SlotTable
from scheduler_proc.state import InFlight

I32 = NDArray[np.int32]


def count_sent(table: SlotTable, slots: array[int], samples: bytes) -> None:
    """A batch of these rows goes out; 1 in ``samples``: that row is to sample."""
    index = np.frombuffer(slots, dtype=np.int32)
    table.view("rows")[index] += 1
    table.view("sampling")[index] += np.frombuffer(samples, dtype=np.uint8)


def decoding_rows(table: SlotTable, slots: array[int]) -> tuple[array[int], list[int], list[int]]:
    """See ``batch.decoding_rows``."""
    index = np.frombuffer(slots, dtype=np.int32)
    expected = table.view("known")[index] + table.view("sampling")[index]
    open_ = expected < table.view("limit")[index]
    index, expected = index[open_], expected[open_]
    capacity, limit = table.view("capacity")[index], table.view("limit")[index]
    wishing = index[np.minimum(expected + table.view("headroom")[index], limit) > capacity]
    return array("i", index.tobytes()), wishing.tolist(), index[expected > capacity].tolist()


def note_computed(table: SlotTable, flight: InFlight, num_ids: bytes) -> None:
    """See ``Commit._note_computed``."""
    slots = np.frombuffer(flight.slots, dtype=np.int32)
    table.view("rows")[slots] -= 1
    table.view("sampling")[slots] -= np.frombuffer(flight.samples, dtype=np.uint8)
    sampled = unpack_i32(num_ids) > 0
    chunks = np.frombuffer(flight.chunks, dtype=np.int32)
    computed = table.view("computed")
    computed[slots] = np.where(sampled, table.view("known")[slots], computed[slots] + chunks)


def append_plain(
    table: SlotTable, slots: array[int], message: StepResult
) -> tuple[int, list[tuple[int, int]], list[tuple[int, int, int]]]:
    """See ``commit.append_plain``."""
    index, num_ids, ids = np.frombuffer(slots, dtype=np.int32), unpack_i32(message.num_ids), unpack_i32(message.ids)
    starts = np.cumsum(num_ids) - num_ids
    plain = (num_ids > 0) & table.view("plain")[index] & (np.frombuffer(message.flags, dtype=np.uint8) == 0)
    rows = (~plain).nonzero()[0]
    others = list(zip(rows.tolist(), starts[rows].tolist(), num_ids[rows].tolist(), strict=True))
    single = plain & (num_ids == 1)
    alone, tokens = index[single], ids[starts[single]]
    known = table.view("known")
    table.ids[alone, known[alone]] = tokens
    known[alone] += 1
    ends = (table.stop[alone] == tokens[:, None]).any(axis=1) | (known[alone] >= table.view("limit")[alone])
    num_appended = len(alone)
    ended = list(zip(single.nonzero()[0][ends].tolist(), alone[ends].tolist(), tokens[ends].tolist(), strict=True))
    for row in (plain & (num_ids > 1)).nonzero()[0].tolist():  # drafts were right: of few, in a step as wide as this
        slot, at = int(index[row]), int(starts[row])
        req = table.reqs[slot]
        assert req is not None  # a plain slot is taken
        added, at_end = table.append_until_end(slot, ids[at : at + num_ids[row]].tolist(), req.stop_ids)
        num_appended += added
        if at_end:
            ended.append((row, slot, int(ids[at + added - 1])))
    return num_appended, [(slot, token) for _, slot, token in sorted(ended)], others


def new_rows(table: SlotTable) -> list[TokenRow]:
    """See ``output.new_rows``."""
    known, sent = table.view("known"), table.view("sent")
    slots = (table.view("streaming") & (known > sent)).nonzero()[0]
    if not slots.size:
        return []
    begins, ends = sent[slots], known[slots]
    indexes = (begins - table.view("prompt")[slots]).tolist()
    sent[slots] = ends
    if int((ends - begins).max()) > 1:
        pieces = [table.ids[s, a:b].tobytes() for s, a, b in zip(slots, begins, ends, strict=True)]
    else:
        column = table.ids[slots, begins].tobytes()
        pieces = [column[i : i + 4] for i in range(0, len(column), 4)]
    at = zip(map(table.reqs.__getitem__, slots.tolist()), indexes, pieces, strict=True)
    return [TokenRow(req.rid, req.attempt, index, piece) for req, index, piece in at if req is not None]

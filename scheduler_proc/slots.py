"""The running requests as numpy columns, one row per worker slot.

A step with a thousand decoding rows is a few dozen array operations on these columns instead of a
thousand turns of a Python loop; Python runs only for rows to which something happens (a page, an end,
log-probabilities, a grammar).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from scheduler_proc.request import Req

I32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

NUM_STOP_COLUMNS = 8
"""Stop ids checked as columns; a request with more goes the slow way."""
GRAMMAR_HEADROOM = 32
"""Tokens of page capacity kept ahead of a grammar row, so that forced ids can be appended."""


class SlotTable:
    """Columns of shape [max_slots], and the ids themselves as [max_slots, width].

    A slot belongs to one request from ``take`` until ``give_back``; it may be begun again only in a
    batch later than the one that ends it in the worker, hence ``to_end``.
    """

    def __init__(self, max_slots: int, width: int) -> None:
        self.max_slots = max_slots
        self.width = width
        self.reqs: list[Req | None] = [None] * max_slots
        # Rows of ids never touched cost no memory: the kernel maps pages on first use.
        self.ids: I32 = np.empty((max_slots, width), dtype=np.int32)
        self.known: I32 = np.zeros(max_slots, dtype=np.int32)
        """Ids known, prompt included."""
        self.computed: I32 = np.zeros(max_slots, dtype=np.int32)
        """Leading ids whose KV is in the pages for certain (committed)."""
        self.sent: I32 = np.zeros(max_slots, dtype=np.int32)
        """Ids handed to the detokenizer, prompt included."""
        self.limit: I32 = np.zeros(max_slots, dtype=np.int32)
        """Ids at which the request is at its max_tokens."""
        self.prompt: I32 = np.zeros(max_slots, dtype=np.int32)
        self.capacity: I32 = np.zeros(max_slots, dtype=np.int32)
        """Positions its pages cover."""
        self.headroom: I32 = np.zeros(max_slots, dtype=np.int32)
        self.rows: I32 = np.zeros(max_slots, dtype=np.int32)
        """Rows in flight."""
        self.sampling: I32 = np.zeros(max_slots, dtype=np.int32)
        """Rows in flight that sample."""
        self.stop: I32 = np.full((max_slots, NUM_STOP_COLUMNS), -1, dtype=np.int32)
        self.running: Bool = np.zeros(max_slots, dtype=np.bool_)
        """The request's status is RUNNING."""
        self.decoding: Bool = np.zeros(max_slots, dtype=np.bool_)
        """RUNNING and every known id was sent for computing."""
        self.plain: Bool = np.zeros(max_slots, dtype=np.bool_)
        """RUNNING or LEAVING, and its new ids need no look by Python unless they end it."""
        self.streaming: Bool = np.zeros(max_slots, dtype=np.bool_)
        """New ids go out as plain rows: RUNNING, begun at the detokenizer, no log-probabilities."""
        self.to_end: list[int] = []
        """Given back; the next batch ends them in the worker."""
        self.free_slots = list(range(max_slots - 1, -1, -1))
        """Those that can be begun; the next to be taken last."""

    @property
    def num_free(self) -> int:
        """Slots a request can begin in now."""
        return len(self.free_slots)

    @property
    def num_taken(self) -> int:
        """Slots that belong to a request."""
        return self.max_slots - len(self.free_slots) - len(self.to_end)

    def take(self, req: Req, page_size: int) -> int:
        """Give a free slot to ``req`` and move its ids into the columns. The caller checks ``num_free``."""
        slot = self.free_slots.pop()
        n = len(req.ids)
        sampling = req.spec.sampling
        self.reqs[slot] = req
        req.slot = slot
        self.ids[slot, :n] = req.ids
        req.ids = self.ids[slot, :0]
        self.known[slot] = n
        self.prompt[slot] = req.prompt_len
        self.sent[slot] = req.sent_len
        self.limit[slot] = min(req.max_len, self.width)
        self.capacity[slot] = len(req.pages) * page_size
        self.headroom[slot] = GRAMMAR_HEADROOM if req.spec.grammar is not None else 0
        self.rows[slot] = self.sampling[slot] = 0
        self.stop[slot] = -1
        stop = sorted(req.stop_ids)[:NUM_STOP_COLUMNS]
        self.stop[slot, : len(stop)] = stop
        by_column = req.counted and sampling.logprobs is None and req.spec.grammar is None
        self.plain[slot] = by_column and len(req.stop_ids) <= NUM_STOP_COLUMNS and req.prompt_logprobs_sent
        self.running[slot] = True
        return slot

    def give_back(self, req: Req) -> None:
        """Move the ids back into ``req`` and queue the slot to be ended in the worker."""
        slot = req.slot
        req.ids = self.ids[slot, : self.known[slot]].copy()
        req.sent_len = int(self.sent[slot])
        req.slot = -1
        self.reqs[slot] = None
        self.running[slot] = self.decoding[slot] = self.plain[slot] = self.streaming[slot] = False
        self.to_end.append(slot)

    def end_slots(self) -> list[int]:
        """Slots for the ``ends`` of the batch being built. They can be taken again after it."""
        ended, self.to_end = self.to_end, []
        self.free_slots.extend(reversed(ended))
        return ended

    def known_ids(self, req: Req) -> I32:
        """Every known id of a request, in a slot or not. Borrowed: copy it to keep it."""
        if req.slot < 0:
            return req.ids
        ids: I32 = self.ids[req.slot, : self.known[req.slot]]
        return ids

    def known_len(self, req: Req) -> int:
        """How many ids are known."""
        return len(req.ids) if req.slot < 0 else int(self.known[req.slot])

    def sent_len(self, req: Req) -> int:
        """Ids handed to the detokenizer, prompt included."""
        return req.sent_len if req.slot < 0 else int(self.sent[req.slot])

    def set_sent(self, req: Req, n: int) -> None:
        """Move the request's cursor."""
        if req.slot < 0:
            req.sent_len = n
        else:
            self.sent[req.slot] = n

    def append(self, req: Req, token: int) -> None:
        """Add one id the slow way. ``req`` has a slot."""
        self.ids[req.slot, self.known[req.slot]] = token
        self.known[req.slot] += 1

    def taken(self) -> Iterable[Req]:
        """Requests that have a slot, by slot."""
        return (req for req in self.reqs if req is not None)

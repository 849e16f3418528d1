"""The running requests as columns, one place per worker slot.

A step of a few rows is a few short loops over these columns, one of a thousand rows a few dozen array operations
(``wide.py``). More is done only for rows to which something happens: a page, an end, log-probabilities, a grammar.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_proc.request import Req

NUM_STOP_COLUMNS = 8
"""Stop ids checked as columns; a request with more goes the slow way."""
GRAMMAR_HEADROOM = 32
"""Tokens of page capacity kept ahead of a grammar row, so that forced ids can be appended."""
NUMBERS = ("known", "computed", "sent", "limit", "prompt", "capacity", "headroom", "rows", "sampling")
FLAGS = ("running", "decoding", "plain", "streaming")
"""The columns by name: of int32, of truth values."""
FEW = 96
"""Rows that a loop handles; array operations take less than it from some 150 rows on, and from fewer where the columns
lie in a cache."""


class SlotTable:
    """Columns of ``max_slots`` entries, and the ids themselves as [max_slots, width].

    A slot belongs to one request from ``take`` until ``give_back``; it may be begun again only in a
    batch later than the one that ends it in the worker, hence ``to_end``.
    """

    def __init__(self, max_slots: int, width: int, max_drafts: int = 0) -> None:
        self.max_slots = max_slots
        self.draft_headroom = 2 * max_drafts
        """Tokens of page capacity kept ahead of any row: what the two steps in flight may add to it."""
        self.width = width
        self.reqs: list[Req | None] = [None] * max_slots
        # Rows of ids never touched cost no memory: the kernel maps pages on first use.
        self.ids: NDArray[np.int32] = np.empty((max_slots, width), dtype=np.int32)
        self.id_at = self.ids.data
        """``id_at[slot, position]``: one of ``ids``, without numpy."""
        zeros = bytes(4 * max_slots)
        self.known = array("i", zeros)
        """Ids known, prompt included."""
        self.computed = array("i", zeros)
        """Leading ids whose KV is in the pages for certain (committed)."""
        self.sent = array("i", zeros)
        """Ids handed to the detokenizer, prompt included."""
        self.limit = array("i", zeros)
        """Ids at which the request is at its max_tokens."""
        self.prompt = array("i", zeros)
        self.capacity = array("i", zeros)
        """Positions its pages cover."""
        self.headroom = array("i", zeros)
        self.rows = array("i", zeros)
        """Rows in flight."""
        self.sampling = array("i", zeros)
        """Rows in flight that sample."""
        self.stop: NDArray[np.int32] = np.full((max_slots, NUM_STOP_COLUMNS), -1, dtype=np.int32)
        self.running = bytearray(max_slots)
        """The request's status is RUNNING."""
        self.decoding = bytearray(max_slots)
        """RUNNING and every known id was sent for computing."""
        self.plain = bytearray(max_slots)
        """RUNNING or LEAVING, and its new ids need no further look unless they end it."""
        self.streaming = bytearray(max_slots)
        """New ids go out as plain rows: RUNNING, begun at the detokenizer, no log-probabilities."""
        self._views: dict[str, NDArray[Any]] = {
            **{name: np.frombuffer(getattr(self, name), dtype=np.int32) for name in NUMBERS},
            **{name: np.frombuffer(getattr(self, name), dtype=np.bool_) for name in FLAGS},
        }
        self.to_end: list[int] = []
        """Given back; the next batch ends them in the worker."""
        self.free_slots = list(range(max_slots - 1, -1, -1))
        """Those that can be begun; the next to be taken last."""

    def view(self, column: str) -> NDArray[Any]:
        """A column as an array that shares its memory."""
        return self._views[column]

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
        sampling = req.spec.sampling
        self.reqs[slot] = req
        req.slot = slot
        n = len(req.ids)
        self.ids[slot, :n] = req.ids
        req.ids = array("i")
        self.known[slot] = n
        self.prompt[slot] = req.prompt_len
        self.sent[slot] = req.sent_len
        self.limit[slot] = min(req.max_len, self.width)
        self.capacity[slot] = len(req.pages) * page_size
        self.headroom[slot] = GRAMMAR_HEADROOM if req.spec.grammar is not None else self.draft_headroom
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
        req.ids = array("i", self.ids_up_to(slot, self.known[slot]))
        req.sent_len = self.sent[slot]
        req.slot = -1
        self.reqs[slot] = None
        self.running[slot] = self.decoding[slot] = self.plain[slot] = self.streaming[slot] = False
        self.to_end.append(slot)

    def end_slots(self) -> list[int]:
        """Slots for the ``ends`` of the batch being built. They can be taken again after it."""
        ended, self.to_end = self.to_end, []
        self.free_slots.extend(reversed(ended))
        return ended

    def known_len(self, req: Req) -> int:
        """How many ids are known."""
        return len(req.ids) if req.slot < 0 else self.known[req.slot]

    def known_ids(self, req: Req) -> array[int]:
        """Every known id of a request, in a slot or not; not to be changed."""
        return req.ids if req.slot < 0 else array("i", self.ids_up_to(req.slot, self.known[req.slot]))

    def ids_up_to(self, slot: int, end: int, begin: int = 0) -> bytes:
        """Known ids [begin, end) of a slot's request."""
        return self.ids[slot, begin:end].tobytes()

    def sent_len(self, req: Req) -> int:
        """Ids handed to the detokenizer, prompt included."""
        return req.sent_len if req.slot < 0 else self.sent[req.slot]

    def set_sent(self, req: Req, n: int) -> None:
        """Move the request's cursor."""
        if req.slot < 0:
            req.sent_len = n
        else:
            self.sent[req.slot] = n

    def append(self, req: Req, token: int) -> None:
        """Add one id the slow way. ``req`` has a slot."""
        self.id_at[req.slot, self.known[req.slot]] = token
        self.known[req.slot] += 1

    def append_until_end(self, slot: int, tokens: Sequence[int], stop_ids: frozenset[int]) -> tuple[int, bool]:
        """Add ids up to one that ends the request: a stop id, or the last it may have. Returns how many were added,
        and whether the last of them is its end."""
        known, limit = self.known[slot], self.limit[slot]
        for number, token in enumerate(tokens, start=1):
            self.id_at[slot, known] = token
            known += 1
            if known >= limit or token in stop_ids:
                self.known[slot] = known
                return number, True
        self.known[slot] = known
        return len(tokens), False

    def taken(self) -> Iterable[Req]:
        """Requests that have a slot, by slot."""
        return (req for req in self.reqs if req is not None)

    def half_computed(self) -> list[Req]:
        """Requests that run and have ids that were not sent for computing, by slot."""
        if self.running == self.decoding:  # nearly always, and found out at once
            return []
        reqs = compress(self.reqs, self.running)
        return [req for req in reqs if req is not None and not self.decoding[req.slot]]

    def decoding_slots(self) -> array[int]:
        """Slots with ``decoding``, in order."""
        if self.decoding.count(1) > FEW:
            return array("i", self.view("decoding").nonzero()[0].astype(np.int32).tobytes())
        return array("i", compress(range(self.max_slots), self.decoding))

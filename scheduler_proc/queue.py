"""The waiting queue: requests in order of arrival, a preempted one back at its old place."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_proc.request import Req


def _seq(req: Req) -> int:
    return req.seq


class WaitingQueue:
    """Sorted by arrival. Policies choose from it; they do not reorder it."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        """Insert at the place of its arrival."""
        insort(self._reqs, req, key=_seq)

    def remove(self, req: Req) -> None:
        """Take out a request that is in the queue."""
        del self._reqs[bisect_left(self._reqs, req.seq, key=_seq)]

    def lazily(self) -> Iterator[Req]:
        """In order of arrival, while the caller may remove what it was just given."""
        index = 0
        while index < len(self._reqs):
            req = self._reqs[index]
            yield req
            if index < len(self._reqs) and self._reqs[index] is req:
                index += 1

    def snapshot(self) -> list[Req]:
        """The queue as a list that later changes do not touch."""
        return self._reqs.copy()

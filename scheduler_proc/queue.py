"""The waiting queue: who has output already first, in each part the order of arrival.

A request with output was preempted, or ran when a part of the engine died: somebody reads its stream, which pauses
until it runs again. They are few, for only who ran can be among them, so those who never ran wait little longer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_proc.request import Req


def _place(req: Req) -> tuple[bool, int]:
    return not req.has_output, req.seq


class WaitingQueue:
    """Sorted. Policies choose from it; they do not reorder it."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        """Insert at its place."""
        insort(self._reqs, req, key=_place)

    def remove(self, req: Req) -> None:
        """Take out a request that is in the queue."""
        del self._reqs[bisect_left(self._reqs, _place(req), key=_place)]

    @property
    def has_resumed(self) -> bool:
        """Somebody with output waits."""
        return bool(self._reqs) and self._reqs[0].has_output

    def lazily(self) -> Iterator[Req]:
        """In order, while the caller may remove what it was just given."""
        index = 0
        while index < len(self._reqs):
            req = self._reqs[index]
            yield req
            if index < len(self._reqs) and self._reqs[index] is req:
                index += 1

    def snapshot(self) -> list[Req]:
        """The queue as a list that later changes do not touch."""
        return self._reqs.copy()

"""Page ids and their reference counts. The bytes of a page live in the worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import InvariantError

I32 = NDArray[np.int32]


class PageAllocator:
    """A stack of free pages and one count per page: the number of its holders.

    A holder is a live request that has the page in its table, the radix tree, or a copy in flight.
    The page most recently freed is the next one given (its bytes are likelier to be in a CPU's cache).
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs: I32 = np.zeros(num_pages, dtype=np.int32)
        self._stack: I32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    def alloc(self, n: int) -> I32 | None:
        """Take ``n`` pages, each with one holder; None, and nothing taken, when fewer are free."""
        if n > self.num_free:
            return None
        top = self.num_free
        pages: I32 = self._stack[top - n : top][::-1].copy()
        self.num_free = top - n
        self.refs[pages] = 1
        return pages

    def retain(self, pages: Sequence[int] | I32) -> None:
        """Add a holder to each page (all different, all held already)."""
        index = np.asarray(pages, dtype=np.int32)
        if index.size and int(self.refs[index].min()) < 1:
            raise InvariantError(f"a free page was retained: {index[self.refs[index] < 1].tolist()}")
        self.refs[index] += 1

    def release(self, pages: Sequence[int] | I32) -> int:
        """Remove a holder from each page (all different); returns how many became free."""
        index = np.asarray(pages, dtype=np.int32)
        if not index.size:
            return 0
        counts = self.refs[index] - 1
        if int(counts.min()) < 0:
            raise InvariantError(f"a free page was released: {index[counts < 0].tolist()}")
        self.refs[index] = counts
        freed = index[counts == 0]
        n = int(freed.size)
        self._stack[self.num_free : self.num_free + n] = freed
        self.num_free += n
        return n

    def free_pages(self) -> I32:
        """The free pages, the next to be given last (for tests and snapshots)."""
        return self._stack[: self.num_free].copy()

    def restore(self, free: I32, refs: I32) -> None:
        """Take over the state that ``free_pages`` and ``refs`` had."""
        self.num_free = int(free.size)
        self._stack[: self.num_free] = free
        self.refs[:] = refs

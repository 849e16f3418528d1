"""The page allocator against sets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InvariantError
from scheduler_proc.pages import PageAllocator

NUM_PAGES = 12


class AllocatorMachine(RuleBasedStateMachine):
    """``held`` counts the holders of each page."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.held: Counter[int] = Counter()

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def alloc(self, n: int) -> None:
        free = NUM_PAGES - len(self.held)
        pages = self.allocator.alloc(n)
        if n > free:
            assert pages is None
            return
        assert pages is not None and len(set(pages.tolist())) == n
        assert not set(pages.tolist()) & set(self.held)
        self.held.update(pages.tolist())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.allocator.retain(pages)
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        freed = self.allocator.release(pages)
        self.held.subtract(pages)
        assert freed == sum(self.held[page] == 0 for page in pages)
        self.held += Counter()

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def refuses_what_is_free(self, page: int) -> None:
        if page not in self.held:
            with pytest.raises(InvariantError, match=str(page)):
                self.allocator.release([page])
            with pytest.raises(InvariantError, match=str(page)):
                self.allocator.retain([page])

    @invariant()
    def counts_agree(self) -> None:
        assert {page: n for page, n in enumerate(self.allocator.refs.tolist()) if n} == dict(self.held)
        assert sorted(self.allocator.free_pages().tolist()) == sorted(set(range(NUM_PAGES)) - set(self.held))


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)

"""The page allocator's order and its refusals."""

from __future__ import annotations

import pytest

from common.errors import InvariantError
from scheduler_proc.pages import PageAllocator


def test_gives_pages_in_order_and_none_when_too_few_are_free() -> None:
    pages = PageAllocator(4)
    first = pages.alloc(3)
    assert first is not None and first.tolist() == [0, 1, 2]
    assert pages.alloc(2) is None
    assert pages.num_free == 1


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pages = PageAllocator(4)
    pages.alloc(2)
    pages.retain([1])
    assert pages.release([0, 1]) == 1
    assert pages.release([1]) == 1
    last = pages.alloc(1)
    assert last is not None and last.tolist() == [1], "the page freed last is given first"


def test_an_empty_request_needs_nothing() -> None:
    pages = PageAllocator(0)
    got = pages.alloc(0)
    assert got is not None and got.size == 0
    assert pages.release([]) == 0


def test_releasing_a_free_page_is_a_bug_and_names_it() -> None:
    with pytest.raises(InvariantError, match=r"\[2\]"):
        PageAllocator(4).release([2])

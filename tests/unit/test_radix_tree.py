"""The radix tree: exact pages, exact order of eviction."""

from __future__ import annotations

import pytest

from common.messages import pack_i32
from scheduler_proc.pages import PageAllocator
from scheduler_proc.radix import RadixTree

A, B, C, D = [1, 1], [2, 2], [3, 3], [4, 4]


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(PageAllocator(16), page_size=2)


def put(tree: RadixTree, *pages: list[int], salt: str = "") -> list[int]:
    """Insert as a finished request does; its pages."""
    own = tree.allocator.alloc(len(pages))
    assert own is not None
    tree.insert(salt, data(*pages), own)
    tree.allocator.release(own)
    return own.tolist()


def data(*pages: list[int]) -> bytes:
    return pack_i32([token for page in pages for token in page])


def cached(tree: RadixTree, *pages: list[int], salt: str = "") -> int:
    return tree.match(salt, data(*pages), len(pages)).num_pages


def test_match_is_in_whole_pages_and_obeys_the_limit(tree: RadixTree) -> None:
    put(tree, A, B, C)
    assert tree.match("", pack_i32([1, 1, 2, 2, 3]), 9).num_pages == 2
    assert tree.match("", pack_i32([1, 1, 2, 9, 3, 3]), 9).num_pages == 1
    assert tree.match("", data(A, B, C), 2).num_pages == 2
    assert tree.match("", pack_i32([1]), 9).num_pages == 0


def test_lock_returns_the_pages_and_splits_where_the_match_ends(tree: RadixTree) -> None:
    pages = put(tree, A, B, C)
    node, found = tree.lock(tree.match("", data(A, B, D), 3))
    assert found.tolist() == pages[:2]
    assert (tree.num_pages, tree.num_locked) == (3, 2)
    tree.unlock(node)
    assert tree.num_locked == 0


def test_a_duplicate_keeps_the_pages_of_the_tree(tree: RadixTree) -> None:
    first = put(tree, A, B)
    put(tree, A, B, C)
    _, found = tree.lock(tree.match("", data(A, B, C), 3))
    assert found.tolist()[:2] == first
    assert tree.num_pages == 3
    assert tree.allocator.num_free == 13


def test_evicts_leaf_before_shared_prefix(tree: RadixTree) -> None:
    put(tree, A, B)
    put(tree, A, C)
    assert tree.evict(1) == 1
    assert (cached(tree, A, B), cached(tree, A, C)) == (1, 2)
    assert tree.evict(1) == 1
    assert (cached(tree, A, B), cached(tree, A, C)) == (1, 1)
    assert tree.evict(5) == 1
    assert tree.num_nodes == 0


def test_evicts_the_least_recently_used_first(tree: RadixTree) -> None:
    for page in (A, B, C):
        put(tree, page)
    node, _ = tree.lock(tree.match("", data(A), 1))
    tree.unlock(node)
    tree.evict(1)
    assert [cached(tree, page) for page in (A, B, C)] == [1, 0, 1]
    tree.evict(1)
    assert [cached(tree, page) for page in (A, B, C)] == [1, 0, 0]


def test_a_long_leaf_loses_its_last_pages_first(tree: RadixTree) -> None:
    put(tree, A, B, C, D)
    assert tree.evict(2) == 2
    assert cached(tree, A, B, C, D) == 2


def test_what_is_locked_is_never_evicted(tree: RadixTree) -> None:
    put(tree, A, B)
    put(tree, A, C)
    node, _ = tree.lock(tree.match("", data(A, B), 2))
    assert tree.evict(16) == 1
    assert (cached(tree, A, B), cached(tree, A, C)) == (2, 1)
    tree.unlock(node)
    assert tree.evict(16) == 2


def test_pages_a_request_still_holds_leave_the_tree_but_are_not_free(tree: RadixTree) -> None:
    pages = tree.allocator.alloc(1)
    assert pages is not None
    tree.insert("", data(A), pages)
    assert tree.evict(1) == 0
    assert tree.num_pages == 0
    assert tree.allocator.release(pages) == 1


def test_namespaces_share_nothing_but_the_order_of_eviction(tree: RadixTree) -> None:
    put(tree, A, salt="one")
    put(tree, A, salt="two")
    assert cached(tree, A) == 0
    tree.evict(1)
    assert (cached(tree, A, salt="one"), cached(tree, A, salt="two")) == (0, 1)


def test_clear_spares_what_is_locked(tree: RadixTree) -> None:
    put(tree, A, B)
    put(tree, C)
    node, _ = tree.lock(tree.match("", data(A), 1))
    assert tree.clear() == 2
    assert (cached(tree, A, B), cached(tree, C)) == (1, 0)
    tree.unlock(node)


def test_disabled_it_keeps_nothing() -> None:
    tree = RadixTree(PageAllocator(4), page_size=2, enabled=False)
    put(tree, A)
    assert cached(tree, A) == 0
    assert tree.allocator.num_free == 4


def test_stale_entries_of_the_eviction_heap_are_cleaned_up(tree: RadixTree) -> None:
    put(tree, A)
    for _ in range(5000):
        node, _ = tree.lock(tree.match("", data(A), 1))
        tree.unlock(node)
    assert tree.num_heap_entries < 1500
    assert tree.evict(1) == 1

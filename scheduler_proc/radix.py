"""The prefix cache: a radix tree over token ids, in units of whole pages.

An edge holds the bytes of its tokens (int32, a multiple of the page size), so matching is a
comparison of memory and a child is found by the bytes of its first page. The idea of a radix tree over
KV pages with LRU eviction of leaves is SGLang's (RadixAttention, arXiv:2312.07104).

Namespaces (``cache_salt``) are separate roots that share one LRU order. Time is a counter of
operations, so that the tree does the same again when its inputs are replayed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_proc.pages import PageAllocator

I32 = NDArray[np.int32]
_EMPTY: I32 = np.zeros(0, dtype=np.int32)


class Node:
    """One edge of the tree and the node it leads to."""

    __slots__ = ("children", "key", "locks", "number", "pages", "parent", "salt", "stamp")

    def __init__(self, number: int, parent: Node | None, key: bytes, pages: I32, salt: str) -> None:
        self.number = number
        """Unique; orders nodes of equal age."""
        self.parent = parent
        self.key = key
        self.pages = pages
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        """Live requests that use this node or one below it."""
        self.stamp = 0
        """The tree's counter when the node was last used."""


@dataclass(frozen=True, slots=True)
class Match:
    """Where the longest cached prefix ends. Valid until the tree changes."""

    node: Node | None
    """Deepest node of which at least one page matched; None when nothing did."""
    num_pages: int
    """Pages matched in all."""
    num_in_node: int
    """Pages matched of ``node`` itself."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """What ``insert`` found and made."""

    node: Node | None
    """Ends exactly at the inserted sequence; None for an empty one."""
    num_existing: int
    """Leading pages that were in the tree already: of these the tree keeps its own."""


class RadixTree:
    """Cached prefixes. Holds one reference on each of its pages.

    ``num_pages`` are in the tree, ``num_locked`` of them under a live request. With ``enabled`` False
    nothing is ever found or kept.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, enabled: bool = True) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.enabled = enabled
        self.num_pages = 0
        self.num_locked = 0
        self.num_nodes = 0
        self.num_evicted_pages = 0
        self._page_bytes = 4 * page_size
        self._roots: dict[str, Node] = {}
        self.tick = 0
        self.next_number = 0
        self._heap: list[tuple[int, int, Node]] = []

    @property
    def num_evictable(self) -> int:
        """Pages that ``evict`` may take out (those a request shares stay in use, though)."""
        return self.num_pages - self.num_locked

    @property
    def num_heap_entries(self) -> int:
        """Candidates for eviction, outdated ones included."""
        return len(self._heap)

    # ------------------------------------------------------------------ lookup

    def match(self, salt: str, data: bytes, max_pages: int) -> Match:
        """Longest cached prefix of ``data`` (int32 bytes), at most ``max_pages``. Changes nothing."""
        node = self._roots.get(salt)
        if node is None:
            return Match(None, 0, 0)
        size = self._page_bytes
        limit = min(max_pages, len(data) // size) * size
        offset = 0
        while offset < limit:
            child = node.children.get(data[offset : offset + size])
            if child is None:
                break
            node = child
            end = offset + len(node.key)
            if end > limit or not data.startswith(node.key, offset):
                n = self._num_common_pages(node.key, data, offset, limit)
                return Match(node, offset // size + n, n)
            offset = end
        if offset == 0:
            return Match(None, 0, 0)
        return Match(node, offset // size, len(node.pages))

    def _num_common_pages(self, key: bytes, data: bytes, offset: int, limit: int) -> int:
        n = min(len(key), limit - offset)
        a = np.frombuffer(key, dtype="<i4", count=n // 4)
        b = np.frombuffer(data, dtype="<i4", count=n // 4, offset=offset)
        different = (a != b).argmax() if not np.array_equal(a, b) else n // 4
        return int(different) // self.page_size

    def lock(self, match: Match) -> tuple[Node | None, I32]:
        """Pin a match for a live request; returns the node to ``unlock`` later and the matched pages.

        Splits the last node when it matched in part. The caller retains the pages for itself.
        """
        node = match.node
        if node is None:
            return None, _EMPTY
        if match.num_in_node < len(node.pages):
            node = self._split(node, match.num_in_node)
        self.lock_node(node)
        parts = []
        at: Node | None = node
        while at is not None:
            parts.append(at.pages)
            at = at.parent
        parts.reverse()
        return node, np.concatenate(parts)

    def lock_node(self, node: Node) -> None:
        """Pin a node and all above it."""
        self.tick += 1
        at: Node | None = node
        while at is not None:
            if at.locks == 0:
                self.num_locked += len(at.pages)
            at.locks += 1
            at.stamp = self.tick
            at = at.parent

    def unlock(self, node: Node | None) -> None:
        """Undo one ``lock``: the node counts as used now."""
        if node is None:
            return
        self.tick += 1
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            at.stamp = self.tick
            if at.locks == 0:
                self.num_locked -= len(at.pages)
            at = at.parent
        self._offer(node)

    def pages_freed_by_unlock(self, node: Node | None) -> int:
        """Pages that would become evictable if one lock on ``node`` went."""
        n = 0
        while node is not None and node.locks == 1:
            n += len(node.pages)
            node = node.parent
        return n

    # ------------------------------------------------------------------ growth

    def insert(self, salt: str, data: bytes, pages: Sequence[int] | I32) -> Inserted:
        """Keep a prefix: ``len(pages)`` pages whose tokens are the beginning of ``data``.

        The tree takes a reference on each page it did not have a copy of; the caller keeps its own.
        """
        if not self.enabled or not len(pages):
            return Inserted(None, 0)
        self.tick += 1
        size = self._page_bytes
        end = len(pages) * size
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = self._new_node(None, b"", _EMPTY, salt)
        offset = 0
        while offset < end:
            child = node.children.get(data[offset : offset + size])
            if child is None:
                break
            if offset + len(child.key) > end or not data.startswith(child.key, offset):
                n = self._num_common_pages(child.key, data, offset, end)
                child = self._split(child, n)
            node = child
            node.stamp = self.tick
            offset += len(node.key)
        num_existing = offset // size
        if offset < end:
            own = np.array(pages[num_existing:], dtype=np.int32)
            self.allocator.retain(own)
            leaf = self._new_node(node, data[offset:end], own, salt)
            node.children[data[offset : offset + size]] = leaf
            leaf.stamp = self.tick
            self.num_pages += len(own)
            self._offer(leaf)
            node = leaf
        return Inserted(node, num_existing)

    def _new_node(self, parent: Node | None, key: bytes, pages: I32, salt: str) -> Node:
        node = Node(self.next_number, parent, key, pages, salt)
        self.next_number += 1
        self.num_nodes += 1
        return node

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut an edge after ``num_pages`` (0 < num_pages < its length); returns the new upper node.

        ``node`` stays the lower one, so that locks and heap entries that name it remain right.
        """
        size = self._page_bytes
        parent = node.parent
        upper = self._new_node(parent, node.key[: num_pages * size], node.pages[:num_pages], node.salt)
        upper.locks = node.locks
        upper.stamp = node.stamp
        if parent is not None:
            parent.children[upper.key[:size]] = upper
        node.key = node.key[num_pages * size :]
        node.pages = node.pages[num_pages:]
        node.parent = upper
        upper.children[node.key[:size]] = node
        return upper

    # ------------------------------------------------------------------ eviction

    def evict(self, num_pages: int) -> int:
        """Take least recently used, unlocked leaves out until ``num_pages`` became free.

        A leaf gives up its last pages first, so a long prefix shrinks instead of vanishing.
        Returns how many pages became free: fewer when no more can go.
        """
        freed = 0
        while freed < num_pages and self._heap:
            stamp, _, node = self._heap[0]
            if not self._is_leaf(node):
                heapq.heappop(self._heap)
                continue
            if stamp != node.stamp:
                heapq.heapreplace(self._heap, (node.stamp, node.number, node))
                continue
            n = min(len(node.pages), num_pages - freed)
            keep = len(node.pages) - n
            freed += self.allocator.release(node.pages[keep:])
            self.num_pages -= n
            self.num_evicted_pages += n
            if keep:
                node.pages = node.pages[:keep]
                node.key = node.key[: keep * self._page_bytes]
            else:
                heapq.heappop(self._heap)
                self._remove(node)
        return freed

    def _is_leaf(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None and len(node.pages) > 0

    def _offer(self, node: Node) -> None:
        """Remember a node that may be evicted; entries gone stale are sorted out when they come up."""
        if not self._is_leaf(node):
            return
        heapq.heappush(self._heap, (node.stamp, node.number, node))
        if len(self._heap) > 2 * self.num_nodes + 1024:
            live = {n.number: n for _, _, n in self._heap if self._is_leaf(n)}
            self._heap = [(n.stamp, n.number, n) for n in live.values()]
            heapq.heapify(self._heap)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None  # a root has no pages and is never offered
        del parent.children[node.key[: self._page_bytes]]
        node.parent = None
        node.pages = _EMPTY
        self.num_nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
            self.num_nodes -= 1
        else:
            self._offer(parent)

    def clear(self) -> int:
        """Take every unlocked page out; returns how many pages left the tree."""
        before = self.num_pages
        self.evict_all()
        return before - self.num_pages

    def evict_all(self) -> None:
        """Evict until only what is locked remains, pages still shared with live requests included."""
        while self.num_evictable and self._heap:
            self.evict(self.num_evictable)

    # ------------------------------------------------------------------ inspection

    def all_nodes(self) -> Iterator[Node]:
        """As ``nodes``, with the roots (which have no pages) first."""
        yield from self._roots.values()
        yield from self.nodes()

    def adopt(self, nodes: list[Node], tick: int, next_number: int, num_evicted_pages: int) -> None:
        """Take over nodes (parents first, roots included) and counters of another tree. For snapshots."""
        self.tick, self.next_number, self.num_evicted_pages = tick, next_number, num_evicted_pages
        for node in nodes:
            if node.parent is None:
                self._roots[node.salt] = node
            else:
                node.parent.children[node.key[: self._page_bytes]] = node
            self.num_nodes += 1
            self.num_pages += len(node.pages)
            self.num_locked += len(node.pages) if node.locks else 0
        for node in nodes:
            self._offer(node)

    def nodes(self) -> Iterator[Node]:
        """Every node with pages, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()][::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

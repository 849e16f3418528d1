"""The radix tree against a plain set of page-aligned prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.messages import pack_i32
from scheduler_proc.pages import PageAllocator
from scheduler_proc.radix import Node, RadixTree

PAGE = 2
NUM_PAGES = 24
IDS = st.lists(st.integers(0, 2), min_size=0, max_size=14)
SALT = st.sampled_from(["", "salt"])
Key = tuple[str, tuple[int, ...]]


class RadixMachine(RuleBasedStateMachine):
    """``model`` maps (salt, page-aligned prefix) to the id of its last page."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.tree = RadixTree(self.allocator, PAGE)
        self.model: dict[Key, int] = {}
        self.locked: list[tuple[Node | None, list[int], Key]] = []

    @staticmethod
    def prefixes(salt: str, ids: list[int]) -> list[Key]:
        return [(salt, tuple(ids[:n])) for n in range(PAGE, len(ids) + 1, PAGE)]

    def cached(self, salt: str, ids: list[int]) -> list[int]:
        pages = []
        for key in self.prefixes(salt, ids):
            if key not in self.model:
                break
            pages.append(self.model[key])
        return pages

    @rule(salt=SALT, ids=IDS)
    def insert(self, salt: str, ids: list[int]) -> None:
        """As a finishing request does: its pages, of which the tree keeps those it had no copy of."""
        num_pages = len(ids) // PAGE
        pages = self.allocator.alloc(num_pages)
        if pages is None:
            return
        expected = len(self.cached(salt, ids))
        found = self.tree.insert(salt, pack_i32(ids), pages)
        assert found.num_existing == (expected if num_pages else 0)
        for key, page in list(zip(self.prefixes(salt, ids), pages.tolist(), strict=True))[found.num_existing :]:
            self.model[key] = page
        self.allocator.release(pages)

    @rule(salt=SALT, ids=IDS, limit=st.integers(0, 8))
    def match(self, salt: str, ids: list[int], limit: int) -> None:
        match = self.tree.match(salt, pack_i32(ids), limit)
        assert match.num_pages == min(len(self.cached(salt, ids)), limit)

    @rule(salt=SALT, ids=IDS)
    def lock(self, salt: str, ids: list[int]) -> None:
        data = pack_i32(ids)
        match = self.tree.match(salt, data, len(ids))
        node, pages = self.tree.lock(match)
        self.allocator.retain(pages)
        assert pages.tolist() == self.cached(salt, ids)
        self.locked.append((node, pages.tolist(), (salt, tuple(ids[: match.num_pages * PAGE]))))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, pages, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)
        self.allocator.release(pages)

    @rule(n=st.integers(1, NUM_PAGES))
    def evict(self, n: int) -> None:
        evictable = self.tree.num_evictable
        freed = self.tree.evict(n)
        assert freed == min(n, evictable)
        gone = self.keys_of_tree()
        self.model = {key: page for key, page in self.model.items() if key in gone}
        for _, _, key in self.locked:
            assert all(prefix in self.model for prefix in self.prefixes(key[0], list(key[1])))

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        assert self.tree.num_evictable == 0
        present = self.keys_of_tree()
        self.model = {key: page for key, page in self.model.items() if key in present}

    def keys_of_tree(self) -> dict[Key, int]:
        keys: dict[Key, int] = {}
        for node in self.tree.nodes():
            ids: list[int] = []
            at: Node | None = node
            while at is not None:
                ids = np.frombuffer(at.key, dtype="<i4").tolist() + ids
                at = at.parent
            above = len(ids) // PAGE - len(node.pages)
            for i, page in enumerate(node.pages.tolist()):
                keys[(node.salt, tuple(ids[: (above + i + 1) * PAGE]))] = page
        return keys

    @invariant()
    def the_tree_is_the_model(self) -> None:
        assert self.keys_of_tree() == self.model
        assert self.tree.num_pages == len(self.model)

    @invariant()
    def every_count_is_the_number_of_holders(self) -> None:
        holders = np.zeros(NUM_PAGES, dtype=np.int32)
        for page in self.model.values():
            holders[page] += 1
        for _, pages, _ in self.locked:
            holders[pages] += 1
        assert holders.tolist() == self.allocator.refs.tolist()
        assert self.allocator.num_free == int((holders == 0).sum())

    @invariant()
    def locked_pages_are_those_below_a_lock(self) -> None:
        below = {prefix for _, _, (salt, ids) in self.locked for prefix in self.prefixes(salt, list(ids))}
        assert self.tree.num_locked == len(below)


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)

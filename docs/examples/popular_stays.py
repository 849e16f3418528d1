"""An eviction: least recently used, but each earlier use keeps a prefix for 200 operations of the tree longer.

python -m tools.simulate --policy-file docs/examples/popular_stays.py
"""

from collections import Counter

from scheduler_proc.pages import PageAllocator
from scheduler_proc.radix import Node, RadixTree

WORTH = 200
MOST = 50


class Tree(RadixTree):
    def __init__(self, allocator: PageAllocator, page_size: int, enabled: bool = True) -> None:
        super().__init__(allocator, page_size, enabled)
        self.uses: Counter[int] = Counter()

    def unlock(self, node: Node | None) -> None:
        super().unlock(node)
        while node is not None:
            self.uses[node.number] += 1
            node.stamp = self.tick + WORTH * min(self.uses[node.number], MOST)
            node = node.parent

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        self.uses[upper.number] = self.uses[node.number]
        return upper

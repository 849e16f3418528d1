"""A scheduling policy: the shortest prompt first, unless somebody has waited for more than two seconds.

python -m tools.simulate --policy-file docs/examples/shortest_first.py
"""

from collections.abc import Iterable

from scheduler_proc.queue import WaitingQueue
from scheduler_proc.radix import RadixTree
from scheduler_proc.request import Req

PATIENCE_S = 2.0


class Policy:
    preempts = False

    def order(self, queue: WaitingQueue, tree: RadixTree, now: float) -> Iterable[Req]:
        def key(req: Req) -> tuple[bool, float]:
            late = now - req.queued_at > PATIENCE_S
            return (not late, req.queued_at if late else len(req.ids))

        return sorted(queue, key=key)

"""Who gives way when pages run out."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_proc.request import Req, Status
from scheduler_proc.state import Pool


def victims(pool: Pool, keep: Iterable[Req] = ()) -> list[Req]:
    """Running requests, the first to be preempted first.

    Those inside a tool call come last whatever else holds; then lower rank (priority) first, then
    fewest output tokens (least work lost if its pages are evicted), then the latest arrival.
    """
    table = pool.table
    kept = set(map(id, keep))
    running = [req for req in table.taken() if req.status is Status.RUNNING and id(req) not in kept]

    def key(req: Req) -> tuple[bool, float, int, int]:
        return (req.in_tool_call, req.rank, table.known[req.slot] - req.prompt_len, -req.seq)

    running.sort(key=key)
    return running


def pages_given(pool: Pool, req: Req) -> int:
    """Pages that become available when this request leaves: its own, and cached ones it alone locks."""
    return len(req.pages) - req.tree_len // pool.page_size + pool.tree.pages_freed_by_unlock(req.node)


def pages_coming(pool: Pool) -> int:
    """Pages that become available once what is in flight has returned."""
    leaving = (req for req in pool.table.taken() if req.status in (Status.LEAVING, Status.ENDING))
    return sum(pages_given(pool, req) for req in leaving)

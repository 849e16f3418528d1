"""The turns of a request's life: admitted, preempted, finished, settled, forgotten.

The only place that changes a request's status and gives its pages back.
"""

from __future__ import annotations

from common.messages import ErrorInfo, Finish, RefusedRow
from scheduler_proc.request import Req, Status
from scheduler_proc.state import State


class Life:
    """Changes statuses; see ``request.py`` for the diagram."""

    def __init__(self, state: State) -> None:
        self.state = state

    def enqueue(self, req: Req) -> None:
        """A new request starts to wait."""
        self.state.reqs[req.rid] = req
        self.state.queue.add(req)

    def finish(self, req: Req, finish: Finish, *, silent: bool = False) -> None:
        """End a request, in whatever phase it is; the first ending wins.

        ``silent``: the detokenizer is told nothing (it ended the request itself, or nobody listens).
        """
        if req.finish is not None:
            return
        state = self.state
        req.finish = finish
        req.silent = silent
        if req.counted:
            state.metrics.finished(finish.reason)
        self.leave_prefix(req)
        state.suspects.pop(req.rid, None)
        if silent:
            req.finish_handed = True
            state.begins.pop(req.rid, None)
            state.loose.pop(req.rid, None)
        elif req.accepted:
            state.loose[req.rid] = req
        else:
            state.refused.append(RefusedRow(req.rid, req.attempt, req.gateway, finish))
            req.finish_handed = True
        self.forget(req)
        if req.status is Status.WAITING:
            state.queue.remove(req)
            req.become(Status.ENDED)
        else:
            req.become(Status.ENDING)
            self._stop_running(req)
            state.need_pool().table.plain[req.slot] = False  # what is in flight no longer counts
            self.settle(req)

    def fail(self, req: Req, status: int, message: str, *, code: str) -> None:
        """End a request with an error that its client sees; ``code`` is the metric's reason, too."""
        if req.finish is None and req.counted:
            self.state.metrics.failed(code)
        self.finish(req, Finish("error", None, ErrorInfo(status=status, message=message, code=code), message))

    def preempt(self, req: Req, why: str) -> None:
        """Take a running request's slot and pages, and let it wait again. No id of it is lost."""
        self.state.metrics.num_preemptions_total += 1
        self.state.preempted.append((req.rid, why))
        req.num_preemptions += 1
        self.leave_prefix(req)
        req.become(Status.LEAVING)
        self._stop_running(req)
        self.settle(req)

    def settle(self, req: Req) -> None:
        """Once no row is in flight: pages to the tree, slot back, and on to the next status."""
        if req.slot < 0 or self.state.need_pool().table.rows[req.slot]:
            return
        self.release(req)
        if req.status is Status.LEAVING:
            req.become(Status.WAITING)
            self.state.queue.add(req)
            if req.accepted:
                self.state.loose[req.rid] = req  # ids that were in flight have arrived
        else:
            req.become(Status.ENDED)

    def release(self, req: Req) -> None:
        """Keep what is computed in the tree, let go of the pages, give the slot back."""
        pool = self.state.need_pool()
        self._leave_group(req)
        self.keep_in_tree(req)
        pool.tree.unlock(req.node)
        pool.allocator.release(req.pages)
        req.node, req.tree_len, req.pages, req.scheduled_len = None, 0, [], 0
        pool.table.give_back(req)

    def keep_in_tree(self, req: Req) -> None:
        """Insert the full pages whose KV is computed. Moves the lock down when the pages are its own."""
        pool = self.state.need_pool()
        table, size = pool.table, pool.page_size
        num_pages = table.computed[req.slot] // size
        if num_pages * size <= req.tree_len or not pool.tree.enabled:
            return
        data = table.ids_up_to(req.slot, num_pages * size)
        found = pool.tree.insert(req.spec.cache_salt, data, req.pages[:num_pages])
        if found.node is not None and found.num_existing * size == req.tree_len:
            pool.tree.lock_node(found.node)
            pool.tree.unlock(req.node)
            req.node, req.tree_len = found.node, num_pages * size

    def forget(self, req: Req) -> None:
        """Drop the record once its ending was handed over: the rid is free. Its pages may still be in flight."""
        if req.finish_handed and self.state.reqs.get(req.rid) is req:
            del self.state.reqs[req.rid]

    def requeue_all(self) -> None:
        """The worker is gone with all pages: whoever ran waits, whoever was ending has ended."""
        pool = self.state.need_pool()
        for req in list(pool.table.taken()):
            self.leave_prefix(req)
            self._leave_group(req)
            pool.table.give_back(req)
            req.node, req.tree_len, req.pages, req.scheduled_len = None, 0, [], 0
            if req.finish is not None:
                req.become(Status.ENDED)
                continue
            req.become(Status.WAITING)
            self.state.queue.add(req)
            if req.accepted:
                self.state.loose[req.rid] = req
        self.state.pool = None

    def _stop_running(self, req: Req) -> None:
        table = self.state.need_pool().table
        table.running[req.slot] = table.decoding[req.slot] = table.streaming[req.slot] = False
        if req.accepted and not req.silent:
            self.state.loose[req.rid] = req

    def leave_prefix(self, req: Req) -> None:
        """Nobody needs to wait for its prefix any more."""
        if req.pending_key is not None:
            self.state.pending_prefixes.pop(req.pending_key, None)
            req.pending_key = None

    def _leave_group(self, req: Req) -> None:
        """Its pages can no longer be copied by others of its group."""
        if req.group_key is not None and self.state.leaders.get(req.group_key) is req:
            del self.state.leaders[req.group_key]

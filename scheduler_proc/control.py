"""Operations on the engine: flush, abort, info, profile, drain. Each is answered by one ControlReply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.messages import Control, ControlReply, ToWorker, WorkerControl, WorkerControlReply
from scheduler_proc.ingest import Ingest
from scheduler_proc.state import Pool, State
from scheduler_proc.status import server_info, shared_config

PROFILE_TIMEOUT_S = 30.0


@dataclass
class Controls:
    """Pending operations and the answers to be sent."""

    state: State
    ingest: Ingest
    generations: dict[str, int]
    replies: list[tuple[str, ControlReply]] = field(default_factory=list)
    to_worker: list[ToWorker] = field(default_factory=list)
    flushes: list[tuple[float, Control]] = field(default_factory=list)
    """(give up when, who asked)."""
    profiles: dict[str, tuple[float, Control]] = field(default_factory=dict)

    def control(self, message: Control, now: float) -> None:
        """Do it, or begin to."""
        match message.action:
            case "flush_cache":
                self.flushes.append((now + max(message.timeout_s, 0.0), message))
            case "abort":
                self._abort(message)
            case "abort_all":
                live = [req for req in self.state.reqs.values() if req.finish is None]
                for req in live:
                    self.ingest.end_early(req, "admin", "aborted by an operator")
                self._reply(message, 200, {"aborted": len(live)})
            case "info":
                self._reply(message, 200, server_info(self.state, self.generations))
            case "config":
                self._reply(message, 200, shared_config(self.state.config))
            case "drain":
                self.state.draining = True
                self._reply(message, 200, {"draining": True})
            case "start_profile" | "stop_profile":
                if self.state.pool is None:
                    self._reply(message, 503, {"error": "no worker is ready"})
                    return
                self.profiles[message.request_id] = (now + PROFILE_TIMEOUT_S, message)
                self.to_worker.append(
                    WorkerControl(request_id=message.request_id, action=message.action, directory=message.directory)
                )

    def _abort(self, message: Control) -> None:
        """End the request of that rid, or all of the call that has it as its group (several choices or prompts)."""
        asked = message.rid
        live = [
            req for req in self.state.reqs.values() if req.finish is None and asked in (req.rid, req.spec.group)
        ]
        if not live:
            self._reply(message, 404, {"error": f"no request {asked!r} is running or waiting"})
            return
        for req in live:
            self.ingest.end_early(req, "admin", "aborted by an operator")
        self._reply(message, 200, {"aborted": len(live)})

    def worker_reply(self, message: WorkerControlReply) -> None:
        """The worker started or stopped its profiler, or could not."""
        pending = self.profiles.pop(message.request_id, None)
        if pending is not None:
            self._reply(pending[1], 200 if message.ok else message.status, {"message": message.message})

    def settle(self, now: float) -> None:
        """Answer what has become possible, or has waited long enough. Called once a step, after scheduling."""
        if not (self.flushes or self.profiles):
            return
        pool = self.state.pool
        self._settle_flushes(pool, now)
        for request_id, (until, message) in list(self.profiles.items()):
            if now >= until or pool is None:
                del self.profiles[request_id]
                self._reply(message, 503, {"error": "the worker did not answer"})

    def _settle_flushes(self, pool: Pool | None, now: float) -> None:
        """Flush or refuse. A request that has its ending neither runs nor waits, but the batches it was in may still be
        on their way: they come back in a moment whatever anybody does, so that is waited for and not refused."""
        if not self.flushes:
            return
        num_waiting = len(self.state.queue)
        num_running = 0 if pool is None else sum(req.finish is None for req in pool.table.taken())
        returning = pool is not None and (pool.table.num_taken > 0 or bool(pool.in_flight))
        for until, message in self.flushes[:]:
            if not (num_waiting or num_running or returning):
                flushed = 0 if pool is None else pool.tree.clear()
                tokens = 0 if pool is None else flushed * pool.page_size
                self._reply(message, 200, {"flushed_pages": flushed, "flushed_tokens": tokens})
            elif now >= until and (num_waiting or num_running):
                words = f"the cache is in use: {num_running} requests run and {num_waiting} wait"
                self._reply(message, 409, {"error": words})
            else:
                continue
            self.flushes.remove((until, message))

    def next_deadline(self, now: float) -> float:
        """When ``settle`` has something to give up; infinity with nothing pending. A flush whose time is over and which
        is still here waits for a batch, not for the clock."""
        if not (self.flushes or self.profiles):
            return float("inf")
        times = [until for until, _ in self.flushes if until > now] + [until for until, _ in self.profiles.values()]
        return min(times, default=float("inf"))

    def _reply(self, message: Control, status: int, body: dict[str, Any]) -> None:
        self.replies.append((message.gateway, ControlReply(request_id=message.request_id, status=status, body=body)))

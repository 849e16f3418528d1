"""What each message of the inbox does to the scheduler's state."""

from __future__ import annotations

import heapq

from common.messages import (
    Abort,
    ErrorInfo,
    Finish,
    Fleet,
    RefusedRow,
    StopHit,
    Tokenized,
)
from scheduler_proc.gateways import Gateways
from scheduler_proc.life import Life
from scheduler_proc.request import Req, Status
from scheduler_proc.state import State

ANY_ATTEMPT = 1 << 30
"""Attempt of an answer to someone whose attempt we do not know; higher than any, so never stale."""
RETRY_AFTER_S = 1.0


class Ingest:
    """Requests in, aborts, stop hits, fleet changes; and the timers that belong to requests."""

    def __init__(self, state: State, life: Life, gateways: Gateways) -> None:
        self.state = state
        self.life = life
        self.gateways = gateways
        self.timers: list[tuple[float, int, str, str]] = []
        """(when, seq of the request, rid, kind): deadlines and queue timeouts."""

    # ------------------------------------------------------------------ requests

    def tokenized(self, message: Tokenized, now: float) -> None:
        """A request, new or sent again."""
        live = self.state.reqs.get(message.rid)
        if live is not None:
            self._again(live, message)
            return
        req = Req(self.state.next_seq, message, now)
        refusal = self._refusal(req)
        if refusal is not None:
            self._refuse(message, refusal)
            return
        self.state.next_seq += 1
        self.state.pacing.arrived = now
        self.state.metrics.num_requests_total += req.counted
        self.life.enqueue(req)
        self._start_timers(req, now)
        done = self._complete_already(req)
        if done is not None:
            req.cached_len = 0
            self.state.begins[req.rid] = req
            self.life.finish(req, done)

    def _again(self, live: Req, message: Tokenized) -> None:
        """The rid lives: a repeated message, a resubmission, or somebody else's choice of the same rid."""
        if live.gateway != message.gateway:
            words = f"request id {message.rid!r} is in use; choose another or leave it out"
            self._refuse(message, ErrorInfo(status=409, message=words, code="duplicate_request_id", param="rid"))
            return
        if message.attempt <= live.attempt:
            return
        live.attempt = message.attempt
        if live.accepted:
            self.state.begins[live.rid] = live
            self.state.loose[live.rid] = live
            if live.slot >= 0:
                self.state.need_pool().table.streaming[live.slot] = False

    def _refusal(self, req: Req) -> ErrorInfo | None:
        """Why a new request cannot be taken; None when it can."""
        state = self.state
        limit = state.config.scheduler.max_queued_requests
        free = 0 if state.pool is None else max(state.pool.max_running - state.pool.table.num_taken, 0)
        if req.prompt_len == 0:
            return ErrorInfo(status=400, message="the prompt is empty", param="prompt")
        if state.draining and req.attempt == 0:
            return ErrorInfo(status=503, message="the server is shutting down", retry_after_s=RETRY_AFTER_S)
        if len(state.queue) >= limit + free and req.attempt == 0:
            if req.counted:
                state.metrics.aborted("queue_full")
            words = f"the queue is full: {len(state.queue)} requests wait and --max-queued-requests is {limit}"
            return ErrorInfo(status=503, message=words, code="queue_full", retry_after_s=RETRY_AFTER_S)
        if state.pool is None:
            return None
        return self.misfit(req)

    def misfit(self, req: Req) -> ErrorInfo | None:
        """Why a request can never run on this worker; None when it can."""
        pool = self.state.need_pool()
        context_len = pool.ready.context_len
        if req.max_len > context_len:
            words = (
                f"{req.prompt_len} prompt tokens and max_tokens {req.max_len - req.prompt_len} are"
                f" {req.max_len} tokens; the context length is {context_len}"
            )
            return ErrorInfo(status=400, message=words, code="context_length_exceeded", param="max_tokens")
        if req.prompt_len > pool.max_tokens:
            words = (
                f"the prompt has {req.prompt_len} tokens and the KV cache holds {pool.max_tokens} in all;"
                " shorten the prompt or raise --max-total-tokens"
            )
            return ErrorInfo(status=400, message=words, code="context_length_exceeded", param="prompt")
        return None

    def _complete_already(self, req: Req) -> Finish | None:
        """A resubmission whose ids are all there, or a request for no tokens at all."""
        outputs = req.ids[req.prompt_len :]
        if len(outputs):
            last = outputs[-1]
            if last in req.stop_ids:
                return Finish("stop", last)
        if len(req.ids) >= req.max_len and req.prompt_logprobs_left == 0:
            return Finish("length")
        return None

    def _refuse(self, message: Tokenized, error: ErrorInfo) -> None:
        finish = Finish("error", None, error, error.message)
        self.state.refused.append(RefusedRow(message.rid, message.attempt, message.gateway, finish))

    # ------------------------------------------------------------------ endings from outside

    def abort(self, message: Abort) -> None:
        """The client is gone, or somebody asked. Repeated by the gateway until it hears of the end."""
        req = self.state.reqs.get(message.rid)
        if req is None or req.gateway != message.gateway:
            finish = Finish("abort", message="unknown request")
            self.state.refused.append(RefusedRow(message.rid, ANY_ATTEMPT, message.gateway, finish))
        elif req.finish is None:
            self.end_early(req, "client", message.reason)

    def end_early(self, req: Req, cause: str, words: str) -> None:
        """Abort a live request; ``cause`` is the metric's."""
        if req.counted:
            self.state.metrics.aborted(cause)
        self.life.finish(req, Finish("abort", message=words))

    def stop_hit(self, message: StopHit) -> None:
        """The detokenizer ended it at output ``index``; what was generated beyond does not count."""
        req = self.state.reqs.get(message.rid)
        if req is None or message.attempt != req.attempt or req.finish is not None:
            return
        self.life.finish(req, Finish("stop", message.stop), silent=True)

    # ------------------------------------------------------------------ timers

    def _start_timers(self, req: Req, now: float) -> None:
        if req.spec.deadline is not None:
            heapq.heappush(self.timers, (req.spec.deadline, req.seq, req.rid, "deadline"))
        wait_s = self.state.config.scheduler.queue_timeout_s
        if wait_s > 0:
            heapq.heappush(self.timers, (now + wait_s, req.seq, req.rid, "queue_timeout"))

    def expire(self, now: float) -> None:
        """End requests that are past their deadline or have waited too long."""
        while self.timers and self.timers[0][0] <= now:
            _, seq, rid, kind = heapq.heappop(self.timers)
            req = self.state.reqs.get(rid)
            if req is None or req.seq != seq or req.finish is not None:
                continue
            if kind == "queue_timeout":
                if not req.accepted:
                    wait_s = self.state.config.scheduler.queue_timeout_s
                    words = f"waited {wait_s:g} s in the queue, the longest that --queue-timeout-s allows"
                    self._end_timed(req, kind, 503, words)
            else:
                self._end_timed(req, kind, 504, "the request's deadline has passed")

    def _end_timed(self, req: Req, cause: str, status: int, words: str) -> None:
        if req.accepted:
            self.end_early(req, cause, words)
            return
        if req.counted:
            self.state.metrics.aborted(cause)
        error = ErrorInfo(status=status, message=words, code=cause, retry_after_s=RETRY_AFTER_S)
        self.life.finish(req, Finish("error", None, error, words))

    # ------------------------------------------------------------------ fleet

    def fleet(self, message: Fleet, generations: dict[str, int]) -> bool:
        """Update ``generations`` in place; True when a worker has been replaced."""
        self.state.draining = self.state.draining or message.draining
        self.state.metrics.num_bad_frames_total = message.num_bad_frames
        changed = {k for k, v in message.generations.items() if generations.get(k) != v}
        generations.update(message.generations)
        if any(name.startswith(("tokenizer", "detokenizer")) for name in changed):
            self.gateways.resend_addresses()
        worker = message.generations.get("worker-0", -1)
        return self.state.pool is not None and worker > self.state.worker_generation

    def waiting_misfits(self) -> None:
        """A worker (again) ready: end who can never run on it."""
        for req in self.state.queue.snapshot():
            error = self.misfit(req)
            if error is None or req.status is not Status.WAITING:
                continue
            if req.accepted:
                self.life.finish(req, Finish("length", message=error.message))
            else:
                self.life.finish(req, Finish("error", None, error, error.message))

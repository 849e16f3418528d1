"""The tokenizer's state between messages: which requests are being prepared beside the loop.

Short prompts are prepared where they arrive. A grammar that is not known yet, or a very long text, goes to
a helper thread, and requests behind it go on. Order matters for one rid only: an ``Abort`` that
finds its request still being prepared takes it out, and is forwarded; the scheduler then answers it as
unknown, which is that request's one ending.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from common.errors import RequestError, raise_if_starved
from common.messages import (
    Abort,
    DetokenizeIds,
    ErrorInfo,
    GatewayAddress,
    Generate,
    Rejected,
    TextReply,
    Tokenized,
    TokenizerReady,
    TokenizeText,
)
from tokenizer_proc.grammar_check import GRAMMAR_TIMEOUT_S, grammar_error
from tokenizer_proc.outbox import Outbox
from tokenizer_proc.prepare import Preparer

log = logging.getLogger(__name__)

MAX_JOBS = 512
"""Most requests prepared beside the loop; more are refused with 503."""

Work = Generate | TokenizeText | DetokenizeIds
Result = Tokenized | Rejected | TextReply


@dataclass
class Job:
    """A request being prepared by a helper thread."""

    message: Work
    started: float = 0.0
    """When a thread took it up (the clock's time); 0 while it waits for one."""


class TokenizerServer:
    """Handles every message of the tokenizer's inbox. ``wake`` is called from helper threads."""

    def __init__(
        self,
        preparer: Preparer,
        outbox: Outbox,
        ready: TokenizerReady,
        texts: Executor,
        grammars: Executor,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._preparer = preparer
        self._outbox = outbox
        self._ready = ready
        self._texts = texts
        self._grammars = grammars
        self._wake = wake
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._done: deque[tuple[str, Job, Result]] = deque()
        self._starved: MemoryError | None = None
        self.num_handled = 0

    @property
    def num_jobs(self) -> int:
        """Requests being prepared beside the loop."""
        return len(self._jobs)

    def handle(self, message: Work | Abort | GatewayAddress) -> None:
        """Take in one message."""
        self.num_handled += 1
        if isinstance(message, Generate):
            self._generate(message)
        elif isinstance(message, Abort):
            self._jobs.pop(message.rid, None)
            self._outbox.to_scheduler(message)
        elif isinstance(message, GatewayAddress):
            self._address(message)
        else:
            self._meet(message.gateway)
            self._start(f"\0{message.gateway}\0{message.request_id}", message)

    def collect(self) -> None:
        """Hand out what the helper threads finished, and refuse what took too long. Raises MemoryError when one of
        them could not go on for want of memory."""
        if self._starved is not None:
            raise self._starved
        while self._done:
            key, job, result = self._done.popleft()
            if self._jobs.get(key) is job:  # else it was aborted, replaced or refused meanwhile
                del self._jobs[key]
                self._hand_out(job.message, result)
        now = self._clock()
        for key, job in list(self._jobs.items()):
            message = job.message
            if not isinstance(message, Generate) or message.grammar is None or not job.started:
                continue
            if now - job.started > GRAMMAR_TIMEOUT_S:
                del self._jobs[key]
                words = f"compiling it takes longer than {GRAMMAR_TIMEOUT_S:g} s; make it simpler"
                self._hand_out(message, _refusal(message, grammar_error(message.grammar, words).info))

    def _generate(self, message: Generate) -> None:
        self._meet(message.gateway)
        running = self._jobs.get(message.rid)
        if running is not None and isinstance(running.message, Generate):
            same = running.message.gateway == message.gateway
            if same and message.attempt <= running.message.attempt:
                return  # repeated
            if not same:
                error = ErrorInfo(status=409, message=f"request id {message.rid!r} is in use", param="rid")
                self._hand_out(message, _refusal(message, error))
                return
            del self._jobs[message.rid]
        self._start(message.rid, message)

    def _start(self, key: str, message: Work) -> None:
        """Prepare now, or beside the loop."""
        try:
            slow = self._preparer.is_slow(message)
        except Exception:  # judged again, and answered, where it is prepared
            slow = False
        if not slow:
            self._hand_out(message, self._prepare(message))
            return
        if len(self._jobs) >= MAX_JOBS:
            error = ErrorInfo(
                status=503,
                message=f"{MAX_JOBS} grammars and long prompts are being prepared: try again",
                code="overloaded",
                retry_after_s=1.0,
            )
            self._hand_out(message, _refusal(message, error))
            return
        job = Job(message)
        self._jobs[key] = job
        pool = self._grammars if isinstance(message, Generate) and message.grammar else self._texts
        pool.submit(self._run, key, job)

    def _run(self, key: str, job: Job) -> None:
        """In a helper thread."""
        job.started = self._clock()
        if self._jobs.get(key) is not job:
            return  # aborted or replaced while it waited
        try:
            self._done.append((key, job, self._prepare(job.message)))
        except MemoryError as error:
            self._starved = error  # an exception that ends a helper thread's work ends nothing else
        self._wake()

    def _prepare(self, message: Work) -> Result:
        try:
            if isinstance(message, Generate):
                return self._preparer.prepare(message)
            if isinstance(message, TokenizeText):
                return self._preparer.tokenize(message)
            return self._preparer.detokenize(message)
        except RequestError as error:
            return _refusal(message, error.info)
        except Exception as error:  # one request must not end the process; ours to find in the log
            raise_if_starved(error)
            log.exception("a request could not be prepared")
            return _refusal(message, ErrorInfo(status=500, message=f"tokenizing failed: {error}"))

    def _hand_out(self, message: Work, result: Result) -> None:
        if isinstance(result, Tokenized):
            self._outbox.to_scheduler(result)
        else:
            self._outbox.to_gateway(message.gateway, result)

    def _meet(self, gateway: str) -> None:
        if not self._outbox.knows(gateway):
            self._outbox.open_gateway(gateway)
            self._outbox.to_gateway(gateway, self._ready)

    def _address(self, message: GatewayAddress) -> None:
        if message.gone:
            # What is being prepared goes on: it may be the successor's, and the scheduler knows whose lease runs.
            self._outbox.close_gateway(message.gateway)
            return
        self._outbox.open_gateway(message.gateway, message.address)
        self._outbox.to_gateway(message.gateway, self._ready)


def _refusal(message: Work, error: ErrorInfo) -> Rejected | TextReply:
    if isinstance(message, Generate):
        return Rejected(rid=message.rid, attempt=message.attempt, error=error)
    return TextReply(request_id=message.request_id, error=error)

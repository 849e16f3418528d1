"""The gateway's record of one open generation, and of the HTTP exchange it belongs to.

``OpenRequest`` is what makes recovery possible: it holds the parameters, every token id and the
number of characters delivered, so that the request can be submitted again to an engine that knows
nothing of it, and whatever arrives twice is recognised by its index and offset.

``Exchange`` is one HTTP request and its reply: one or several generations (``n`` choices, several
prompts) whose deltas are collected until the writing task takes them. While a client reads slowly
the deltas pile up here, up to a bound in bytes, and nobody else is held up.

A stream whose task has nothing to do but to wait gives ``wait`` a sink: what comes is then written where it
arrives, without a task being woken, which costs several times what writing does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from common.messages import Finish, Generate, TextRow, TokenLogprob

_DELTA_OVERHEAD_BYTES = 160
_LOGPROB_BYTES = 96
DEADLINE_GRACE_S = 1.0
"""What the scheduler has to end a request in that nobody else needs to watch."""


class Delta(msgspec.Struct, gc=False):
    """What is new of one choice, after everything already delivered was dropped."""

    choice: int
    text: str
    ids: bytes
    """int32."""
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    finish: Finish | None
    starts: bytes = b""
    """See ``TextRow.starts``."""


class OpenRequest:
    """One rid from its submission until its ending arrived.

    ``generate`` is the message as first submitted (attempt 0). The engine client is the only writer.
    """

    __slots__ = (
        "abort_at",
        "abort_reason",
        "aborting",
        "accepted",
        "attempt",
        "cached_tokens",
        "choice",
        "completion_tokens",
        "discard_output",
        "exchange",
        "finish",
        "generate",
        "heard",
        "ids",
        "internal",
        "last_write",
        "num_gaps",
        "prompt_logprobs_known",
        "prompt_tokens",
        "text_len",
        "tokenizer",
        "unsent",
    )

    def __init__(
        self,
        generate: Generate,
        exchange: Exchange,
        choice: int,
        *,
        discard_output: bool = False,
        internal: bool = False,
    ) -> None:
        self.generate = generate
        self.exchange = exchange
        self.choice = choice
        self.discard_output = discard_output
        """The one token generated is not shown: ``max_new_tokens`` 0 asks for the prompt to be computed and no more."""
        self.internal = internal
        """A health check: no traffic of a client's."""
        self.tokenizer = 0
        self.attempt = 0
        self.ids = bytearray()
        self.text_len = 0
        self.accepted = False
        self.prompt_logprobs_known = False
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.finish: Finish | None = None
        self.aborting = False
        self.abort_at = 0.0
        self.abort_reason = ""
        self.unsent = False
        """The channel was full; the next tick sends the current attempt."""
        self.last_write = 0.0
        self.num_gaps = 0
        self.heard = False
        """Something of the current attempt has come back: the tokenizer has handed it on."""

    @property
    def rid(self) -> str:
        """The id the engine knows the generation by."""
        return self.generate.rid

    @property
    def num_ids(self) -> int:
        """Output ids received so far."""
        return len(self.ids) // 4

    def is_overdue(self, now: float) -> bool:
        """Past its deadline and never heard of by a scheduler, which would have ended it. ``now``: time.time()."""
        deadline = self.generate.deadline
        return deadline is not None and not self.accepted and now > deadline + DEADLINE_GRACE_S

    def message(self) -> Generate:
        """The message that (re)submits the current attempt."""
        if self.attempt == 0:
            return self.generate
        return msgspec.structs.replace(self.generate, attempt=self.attempt, output_ids=bytes(self.ids))

    def has_gap(self, row: TextRow) -> bool:
        """Whether something before this row never arrived."""
        return bool(row.ids and row.index > self.num_ids) or bool(row.text and row.text_offset > self.text_len)

    def apply_next(self, row: TextRow) -> Delta | None:
        """``apply`` for nearly every row there is: more text, exactly where the last row ended.

        None for any other row, and nothing is changed then.
        """
        if (
            row.text_offset != self.text_len
            or 4 * row.index != len(self.ids)
            or not row.ids
            or row.finish is not None
            or row.prompt_logprobs
            or not self.accepted
            or self.discard_output
        ):
            return None
        self.text_len += len(row.text)
        self.ids += row.ids
        self.completion_tokens = max(row.completion_tokens, self.completion_tokens, len(self.ids) // 4)
        return Delta(self.choice, row.text, row.ids, row.logprobs, [], None, row.starts)

    def apply(self, row: TextRow) -> Delta | None:
        """Take in a row of the current attempt; the part that is new, or None when there is none.

        The counts of the first acceptance are kept: a resubmission finds other cached pages, and the
        client's usage must not change for it.
        """
        if row.accepted is not None and not self.accepted:
            self.accepted = True
            self.prompt_tokens, self.cached_tokens = row.accepted
        text, ids, logprobs, starts = row.text, row.ids, row.logprobs, row.starts
        if text and (known := self.text_len - row.text_offset) > 0:
            text = text[known:]
        if ids and (known := self.num_ids - row.index) > 0:
            ids, logprobs, starts = ids[4 * known :], logprobs[known:], starts[4 * known :]
        self.text_len += len(text)
        self.ids += ids
        finish = row.finish
        if finish is not None or row.completion_tokens > self.completion_tokens:
            self.completion_tokens = max(row.completion_tokens, self.num_ids)
        if self.discard_output:
            text, ids, logprobs, starts = "", b"", [], b""
            self.completion_tokens = 0
            if finish is not None and finish.reason == "stop":
                finish = Finish(reason="length")
        self.finish = finish
        # They come once an attempt, all together, and have no index.
        prompt_logprobs = [] if self.prompt_logprobs_known else row.prompt_logprobs
        self.prompt_logprobs_known = self.prompt_logprobs_known or bool(prompt_logprobs)
        if not (text or ids or finish is not None or prompt_logprobs):
            return None
        return Delta(self.choice, text, ids, logprobs, prompt_logprobs, finish, starts)


class Exchange:
    """One HTTP request's generations and what of them waits to be written.

    ``limit_bytes`` bounds what waits; past it ``cut_off`` is called once and the client is gone.
    """

    def __init__(self, received: float, limit_bytes: int) -> None:
        self.received = received
        """time.monotonic() at which the request arrived."""
        self.records: list[OpenRequest] = []
        self.ended = False
        """Some generation has its ending (of whatever kind)."""
        self.gone = False
        """The client left, or was cut off."""
        self.sending_since = 0.0
        """time.monotonic() since when a write to the client is unfinished; 0: none is."""
        self.cut_off: Callable[[], None] | None = None
        self.prompt_param = "prompt"
        """The field of the request that the prompts came in."""
        self._limit_bytes = limit_bytes
        self._pending: list[Delta] = []
        self._pending_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[], bool] | None = None

    @property
    def finished(self) -> bool:
        """Every generation has its ending."""
        return all(record.finish is not None for record in self.records)

    def push(self, delta: Delta) -> None:
        """Add a delta and wake the writing task."""
        self.add(delta)
        self.wake()

    def add(self, delta: Delta) -> None:
        """Add a delta; ``deliver`` is to follow. Cuts off a client that is too far behind."""
        self._pending.append(delta)
        if delta.finish is not None:
            self.ended = True
        self._pending_bytes += _DELTA_OVERHEAD_BYTES + len(delta.text)
        if delta.logprobs:
            self._pending_bytes += _LOGPROB_BYTES * sum(1 + len(item.top) for item in delta.logprobs)
        if self._pending_bytes > self._limit_bytes and self.sending_since and not self.gone:
            self.leave()
            if self.cut_off is not None:
                self.cut_off()

    def deliver(self) -> None:
        """What was added is all there is of this step: it is written here, or the writing task is woken.

        The task itself has to write whatever ends a stream, and while it writes or could not, nobody else does.
        """
        if self._sink is None or self.ended or self.gone or not self._sink():
            self.wake()

    def take(self) -> list[Delta]:
        """Everything new since the last call, oldest first."""
        deltas, self._pending = self._pending, []
        self._pending_bytes = 0
        return deltas

    def leave(self) -> None:
        """The client is gone: nothing more will be written."""
        self.gone = True
        self.wake()

    def wake(self) -> None:
        """Let the writing task look again."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = self._sink = None
            if not waiter.done():  # else its task was cancelled
                waiter.set_result(None)

    async def wait(self, sink: Callable[[], bool] | None = None) -> None:
        """Sleep until there is a delta, an acceptance, or the client is gone.

        ``sink``, called meanwhile for each step's deltas, takes and writes them; False: the task is to do it.
        """
        if not self._pending and not self.gone:
            self._waiter = asyncio.get_running_loop().create_future()
            self._sink = sink
            try:
                await self._waiter
            finally:
                self._sink = None

    async def wait_change(self) -> None:
        """Sleep until ``wake``."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

"""Answer one HTTP request: submit, wait for acceptance, then write whole or streamed.

No header goes out before the engine has accepted the request, so every refusal keeps its status
code. With several generations the first acceptance starts a grace time in which a refusal of
another (a second prompt that is too long) still becomes the status; generations that merely wait
in the queue do not hold up the others beyond it.

A stream is one write per step. Where the server lets us (``WRITER_SCOPE_KEY``) it goes straight to the
connection from where the step's text arrives; the stream's task writes its beginning, its end and
whatever comes while the client reads too slowly, because a task can wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from common.errors import RequestError
from common.messages import ErrorInfo
from common.trace import Written
from gateway.engine import Engine
from gateway.errors import error_json, error_response
from gateway.request import Delta, Exchange

ACCEPT_GRACE_S = 1.0
WRITER_SCOPE_KEY = "quintet.writer"
"""ASGI scope entry: a ``ConnectionWriter`` (see ``server.py``); without one the task writes everything."""
ABORT_SCOPE_KEY = "quintet.abort_connection"
"""ASGI scope entry: a callable that ends the connection at once (see ``server.py``)."""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Formatter(Protocol):
    """One protocol's way of writing a reply. One instance per HTTP request."""

    def opening(self) -> bytes:
        """First bytes of a stream, written on acceptance (may be empty)."""

    def chunk(self, deltas: list[Delta]) -> bytes:
        """The deltas of one step as bytes of the stream (may be empty)."""

    def closing(self) -> bytes:
        """Last bytes of a stream."""

    def whole(self, deltas: list[Delta]) -> bytes:
        """The JSON body of a reply that is not streamed, from all its deltas."""


class ConnectionWriter(Protocol):
    """Writes to the connection of a response that has begun, beneath the server's ``send``."""

    @property
    def is_open(self) -> bool:
        """Something can be written now, and the client is not behind with what was."""

    def write(self, body: bytes) -> None:
        """Part of the body; only while ``is_open``."""


class EngineReply(Response):
    """An ASGI response that runs an exchange through the engine and writes what comes."""

    def __init__(self, engine: Engine, exchange: Exchange, formatter: Formatter, *, stream: bool) -> None:
        super().__init__()
        self._engine = engine
        self._exchange = exchange
        self._formatter = formatter
        self._stream = stream
        self._ready: list[Delta] = []
        self._writer: ConnectionWriter | None = None
        self._failure: Exception | None = None
        """What went wrong where no task could raise it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the exchange. However this ends, what still runs of it is aborted."""
        exchange = self._exchange
        exchange.cut_off = self._cutter(scope)
        self._writer = scope.get(WRITER_SCOPE_KEY)
        watcher = asyncio.ensure_future(_watch(receive, exchange))
        try:
            self._engine.submit(exchange)
            if error := await self._accepted():
                await error_response(error)(scope, receive, send)
            elif exchange.gone:
                return
            elif self._stream:
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                await self._write_stream(send)
            else:
                await self._write_whole(scope, receive, send)
        except RequestError as refused:
            await error_response(refused.info)(scope, receive, send)
        finally:
            watcher.cancel()
            self._engine.release(exchange)

    def _cutter(self, scope: Scope) -> Callable[[], None]:
        abort_connection = scope.get(ABORT_SCOPE_KEY)

        def cut() -> None:
            self._engine.metrics.num_cut_off += 1
            if abort_connection is not None:
                abort_connection()

        return cut

    def _error(self, deltas: list[Delta]) -> ErrorInfo | None:
        """The first error among the endings, with the prompt's field as the client knows it."""
        error = first_error(deltas)
        if error is not None and error.param == "prompt":  # the engine's word for whatever the ids came from
            return msgspec.structs.replace(error, param=self._exchange.prompt_param)
        return error

    async def _accepted(self) -> ErrorInfo | None:
        """Wait until headers may go out; the error that goes out instead, if one."""
        exchange = self._exchange
        deadline: float | None = None
        while not exchange.gone:
            self._ready += exchange.take()
            if error := self._error(self._ready):
                return error
            num_waiting = sum(not record.accepted and record.finish is None for record in exchange.records)
            if num_waiting == 0:
                unstarted = [record for record in exchange.records if not record.accepted]
                if len(unstarted) == len(exchange.records):
                    return _aborted_before_start(unstarted[0].finish.message if unstarted[0].finish else "")
                return None
            if num_waiting < len(exchange.records) and deadline is None:
                deadline = time.monotonic() + ACCEPT_GRACE_S
            try:
                async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                    await exchange.wait_change()
            except TimeoutError:
                return None
        return None

    async def _write_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        new = self._ready
        while True:
            self._observe(new, time.monotonic())
            if error := self._error(self._ready):
                await error_response(error)(scope, receive, send)
                return
            if exchange.gone:
                return
            if exchange.finished:
                break
            await exchange.wait()
            new = exchange.take()
            self._ready += new
        body = self._formatter.whole(self._ready)
        await Response(body, media_type="application/json")(scope, receive, send)
        self._observe_end()

    async def _write_stream(self, send: Send) -> None:
        exchange, formatter = self._exchange, self._formatter
        deltas, self._ready = self._ready, []
        body = formatter.opening()
        sink = None if self._writer is None else self._write_now
        while not exchange.gone:
            deltas += exchange.take()
            done = False
            if exchange.ended:
                if error := self._error(deltas):
                    await self._send(send, body + b"data: " + error_json(error) + b"\n\n", time.monotonic(), more=False)
                    return
                done = exchange.finished
            body += formatter.chunk(deltas)
            if done:
                body += formatter.closing()
            now = time.monotonic()
            if body:
                await self._send(send, body, now, more=not done)
            self._observe(deltas, now)
            if done:
                self._observe_end()
                return
            body, deltas = b"", []
            await exchange.wait(sink)
            if self._failure is not None:
                raise self._failure

    def _write_now(self) -> bool:
        """Write a step's deltas from where they arrived; False: nothing was, the task has to see to it."""
        if self._writer is None or not self._writer.is_open:
            return False
        deltas = self._exchange.take()
        try:
            body = self._formatter.chunk(deltas)
        except Exception as error:  # this stream's fault alone: other streams' text arrives in the same call
            self._failure = error
            return False
        if body:
            self._writer.write(body)
        self._observe(deltas, time.monotonic())
        return True

    async def _send(self, send: Send, body: bytes, now: float, *, more: bool) -> None:
        self._exchange.sending_since = now
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._exchange.sending_since = 0.0

    def _observe(self, deltas: list[Delta], now: float) -> None:
        metrics, exchange = self._engine.metrics, self._exchange
        for delta in deltas:
            record = exchange.records[delta.choice]
            if record.internal or not (delta.text or delta.ids):
                continue
            if record.last_write:
                metrics.itl.observe(now - record.last_write)
            else:
                metrics.ttft.observe(now - exchange.received)
                if self._engine.trace is not None:
                    self._engine.trace.write(Written(time.time(), record.rid))
            record.last_write = now

    def _observe_end(self) -> None:
        if not self._exchange.records[0].internal:
            self._engine.metrics.e2e.observe(time.monotonic() - self._exchange.received)


def first_error(deltas: list[Delta]) -> ErrorInfo | None:
    """The first error among the endings, if any."""
    for delta in deltas:
        finish = delta.finish
        if finish is not None and finish.error is not None:
            return finish.error
        if finish is not None and finish.reason == "error":
            return ErrorInfo(status=500, message=finish.message or "the request failed inside the server")
    return None


def _aborted_before_start(message: str) -> ErrorInfo:
    return ErrorInfo(status=503, message=message or "the request was aborted before it ran", code="aborted")


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Tell the exchange when the client disconnects."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.leave()
            return

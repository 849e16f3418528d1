"""uvicorn, with the bounds an open port needs and without its signal handlers.

* A connection must send a request's headers within ``HEADER_TIMEOUT_S``, and no more than ``MAX_HEADER_BYTES`` of them.
* Above ``max_connections`` a request is answered 503 and its connection closed; above twice that
  a connection is closed unread.
* The reply can end the connection at once (a client that does not read).
* Pipelined requests: all of them hear that their client left, also the one that runs.
* The middle of a streamed body can be written without the layers of ``send``.
* Clients of HTTP/1.0 and those that offer to switch protocols are served (see ``old_clients.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Generator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.config import HttpConfig
from common.errors import ConfigError
from common.messages import ErrorInfo
from gateway.edge import OVER_LIMIT_SCOPE_KEY
from gateway.errors import error_json
from gateway.old_clients import head_without_offer, unframed
from gateway.respond import ABORT_SCOPE_KEY, WRITER_SCOPE_KEY

HEADER_TIMEOUT_S = 30.0
MAX_HEADER_BYTES = 64 << 10
"""Of a request's target and headers together; more are 431. httptools would take any number in."""
KEEP_ALIVE_S = 75
"""An idle connection is kept this long between requests."""
UNREAD_TIMEOUT_S = 75
"""The kernel gives a connection up whose peer takes nothing of what was written for this long."""
BACKLOG = 2048
MAX_PIPELINED = 8
"""Requests that may wait on one connection for the one before them; more end the connection."""


class ChunkWriter:
    """Writes chunks of one response's body: what the cycle's ``send`` does with a body that goes on.

    Not before the headers are out, and only where the body is chunked (HTTP/1.1). The end is for ``send``.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Headers are out, the end is not, the client is there and keeps up."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
            and not cycle.transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        """One chunk; not empty (an empty chunk would end the body)."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class _HeadTooLarge(Exception):
    """Raised in a callback of the parser, which stops there."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with a header deadline and a bound on connections."""

    max_connections = 0
    """Set by a subclass made per server (see ``make_server``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # uvicorn's line holds the query, and a query may hold a key; see edge.py
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        """Read of a head that is not complete."""
        self._offering = b""
        """The method of a request that offers to switch protocols, until it is parsed again."""
        self._cycles: list[RequestResponseCycle] = []
        """Requests of the connection that are not answered yet; uvicorn remembers the latest only."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self.max_connections:
            transport.abort()
            return
        client = transport.get_extra_info("socket")
        if client is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_TIMEOUT_S)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self._stop_header_timer()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests. One that offers to switch protocols is parsed again without the offer."""
        self._unset_keepalive_if_required()
        in_head = self._header_timer is not None
        while data:
            try:
                self.parser.feed_data(data)
                if in_head and self._header_timer is not None:
                    self._num_head_bytes += len(data)
                    if self._num_head_bytes > MAX_HEADER_BYTES:
                        self._refuse_head()
            except httptools.HttpParserUpgrade as offer:
                head = head_without_offer(self._offering, self.url, self.scope["http_version"], self.headers)
                self._offering = b""
                self.parser = httptools.HttpRequestParser(self)
                data = head + data[offer.args[0] :]
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _HeadTooLarge):
                    self._refuse_head()
                else:
                    self.send_400_response("Invalid HTTP request received.")
                return
            else:
                return

    def on_message_begin(self) -> None:
        """A request begins on the connection."""
        super().on_message_begin()
        self.scope[ABORT_SCOPE_KEY] = self.transport.abort  # type: ignore[literal-required]
        if len(self.connections) > self.max_connections:
            self.scope[OVER_LIMIT_SCOPE_KEY] = True  # type: ignore[literal-required]
        if self._header_timer is None:
            self._start_header_timer()

    def on_headers_complete(self) -> None:
        """A request's headers are all there."""
        self._num_head_bytes = 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            raise _HeadTooLarge
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offering = self.parser.get_method()  # the parser goes no further: see ``data_received``
            self.scope["http_version"] = self.parser.get_http_version()
            return
        self._stop_header_timer()
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        self.scope[WRITER_SCOPE_KEY] = ChunkWriter(self.cycle)  # type: ignore[literal-required]
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
        elif self.pipeline:
            # uvicorn stops reading here, and whoever does not read does not see the client leave.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """A request's body is all there."""
        if not self._offering:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _refuse_head(self) -> None:
        words = f"the request's headers are larger than {MAX_HEADER_BYTES} bytes"
        body = error_json(ErrorInfo(status=431, message=words, code="headers_too_large"))
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
        self.transport.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server; the process's own signal handlers stay as they are."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: the gateway drains first and then sets ``should_exit``."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end; once a second the Date header is brought up to date."""
        while not await self.on_tick(0):
            try:
                async with asyncio.timeout(1.0):
                    await self._exit.wait()
            except TimeoutError:
                pass

    def request_exit(self) -> None:
        """Close the port and let ``serve`` return."""
        self.should_exit = True
        self._exit.set()

    @property
    def num_connections(self) -> int:
        """Open client connections."""
        return len(self.server_state.connections)


def make_server(app: Callable[..., Any], http: HttpConfig) -> Server:
    """A server for an ASGI app; started with ``serve(sockets=[...])``."""
    protocol = type("_Protocol", (BoundedProtocol,), {"max_connections": http.max_connections})
    return Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            backlog=BACKLOG,
        )
    )


def listen(http: HttpConfig) -> socket.socket:
    """Bind the server's port. Several gateways share it: the kernel spreads connections over them.

    Raises:
        ConfigError: the address cannot be bound; the message names it and the way out.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            http.host or None, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {http.host!r}: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if http.gateways > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        words = "is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise ConfigError(f"{http.host}:{http.port}: {words}; stop that server or choose another --port") from None
    listener.setblocking(False)
    return listener

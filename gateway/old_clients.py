"""What HTTP/1 allows a client and uvicorn does not provide for: version 1.0, and offers to switch protocols.

* HTTP/1.0 knows no chunks (ApacheBench speaks it, and nginx to its upstreams unless told otherwise). A body whose
  length is not known beforehand goes out as it is, and the end of the connection is its end.
* ``Upgrade: h2c`` is an offer that a server may leave alone (RFC 9110, 7.8). Java's HttpClient makes it with every
  request to an ``http://`` address. httptools ends its work at the headers of such a request, and the body was lost
  (uvicorn issue 2722); so the request is parsed again without the offer.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_OFFER = frozenset({b"upgrade", b"http2-settings"})


def unframed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """``app`` for a client of HTTP/1.0: a body without a Content-Length is not framed in chunks."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # what uvicorn counts is never missing
            await send(message)

        await app(scope, receive, send_plain)

    return serve


def head_without_offer(
    method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """The head of a request that offered to switch protocols, as if it had not."""
    lines = [method + b" " + url + b" HTTP/" + version.encode()]
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(token for part in value.split(b",") if (token := part.strip()).lower() not in _OFFER)
        if value and name not in _OFFER:
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])

"""What every HTTP request passes before it reaches a route: an outermost, plain ASGI layer.

Request id in and out, keys, body size by its header, the bound on connections, CORS, and one line
of access log that never holds a query, a header or a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.config import HttpConfig
from common.messages import ErrorInfo
from gateway.errors import error_response
from gateway.metrics import GatewayMetrics

log = logging.getLogger("gateway.access")

OVER_LIMIT_SCOPE_KEY = "quintet.over_limit"
REQUEST_ID_SCOPE_KEY = "quintet.request_id"

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ping"})
"""Answered without a key: load balancers have none."""
QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Asked every few seconds by machines: logged at level debug."""
ADMIN_PATHS = frozenset({"/flush_cache", "/abort_request", "/start_profile", "/stop_profile"})

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


LINGER_S = 2.0
LINGER_FACTOR = 4
"""Of a body above the limit so many times the limit are read, and so long, before it is refused."""


class Edge:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, http: HttpConfig, metrics: GatewayMetrics) -> None:
        self._app = app
        if http.cors_origin:
            self._app = CORSMiddleware(
                app,
                allow_origins=http.cors_origin,
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        self._cors = bool(http.cors_origin)
        self._max_bytes = http.max_request_bytes
        self._metrics = metrics
        self._keys = [key.encode() for key in http.api_key]
        self._admin_keys = [key.encode() for key in http.admin_api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        started = time.monotonic()
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16).encode()
        scope[REQUEST_ID_SCOPE_KEY] = request_id.decode()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            refused = self._refuse(scope, headers)
            if refused is None:
                await self._app(scope, receive, send_with_id)
            else:
                error, extra = refused
                if error.status == 413 and b"expect" not in headers:
                    await drop_body(receive, LINGER_FACTOR * self._max_bytes)
                await error_response(error, extra)(scope, receive, send_with_id)
        finally:
            self._metrics.count_reply(status or 499)
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            if log.isEnabledFor(level):
                client = scope.get("client")
                log.log(
                    level,
                    "%s %s %s %d %.1f ms %s",
                    client[0] if client else "-",
                    scope["method"],
                    scope.get("raw_path", b"").decode("latin-1"),  # still percent-encoded: no line breaks
                    status or 499,
                    1000 * (time.monotonic() - started),
                    request_id.decode(),
                    extra={"request_id": request_id.decode()},
                )

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[ErrorInfo, dict[str, str]] | None:
        if scope.get(OVER_LIMIT_SCOPE_KEY):
            error = ErrorInfo(status=503, message="too many open connections", code="overloaded", retry_after_s=1)
            return error, {"Connection": "close"}
        if self._cors and scope["method"] == "OPTIONS":
            return None
        if scope["path"] not in OPEN_PATHS and (denied := self._check_key(scope["path"], headers)):
            return denied, {"WWW-Authenticate": "Bearer"} if denied.status == 401 else {}
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_bytes:
            return too_large(self._max_bytes), {}
        return None

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> ErrorInfo | None:
        admin = path in ADMIN_PATHS
        wanted = self._admin_keys if admin and self._admin_keys else [*self._keys, *self._admin_keys]
        if not wanted or (not admin and not self._keys):
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else b""
        # Every key is compared, in constant time, so that the answer's time tells nothing.
        if sum(hmac.compare_digest(given, key) for key in wanted):
            return None
        if admin and self._admin_keys and sum(hmac.compare_digest(given, key) for key in self._keys):
            return ErrorInfo(status=403, message="this endpoint needs an admin key", code="insufficient_permissions")
        words = "Incorrect API key provided" if given else "No API key provided: send 'Authorization: Bearer <key>'"
        return ErrorInfo(status=401, message=words, code="invalid_api_key")


async def drop_body(receive: Receive, most: int) -> None:
    """Read what a client sends that nobody wants, up to ``most`` bytes and ``LINGER_S``, and forget it.

    A client that still writes when its connection is closed has the answer reset before it reads it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return


def too_large(limit: int) -> ErrorInfo:
    """The refusal of a body above ``limit`` bytes."""
    return ErrorInfo(
        status=413,
        message=f"the request body is larger than {limit} bytes (--max-request-bytes)",
        code="request_too_large",
    )

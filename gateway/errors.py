"""How an error looks to a client: OpenAI's envelope, its types and its status codes."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response

from common.messages import ErrorInfo

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    """OpenAI's word for the kind of error behind a status."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """The envelope as a JSON-able dict: ``{"error": {message, type, param, code}}``."""
    return {
        "error": {"message": info.message, "type": error_type(info.status), "param": info.param, "code": info.code}
    }


def error_json(info: ErrorInfo) -> bytes:
    """The envelope as JSON."""
    return orjson.dumps(error_body(info))


def error_response(info: ErrorInfo, headers: dict[str, str] | None = None) -> Response:
    """The whole HTTP answer, with ``Retry-After`` where waiting helps, as it does with every 429 and 503.

    After a 413 the connection ends: what is left of the body may have no end, and nobody wants it.
    """
    headers = dict(headers or {})
    if info.status == 413:
        headers["Connection"] = "close"
    retry_after_s = info.retry_after_s
    if retry_after_s is None and info.status in (429, 503):
        retry_after_s = 1.0
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(retry_after_s)))
    return Response(error_json(info), status_code=info.status, headers=headers, media_type="application/json")

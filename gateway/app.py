"""The FastAPI application: routes, and every error in OpenAI's envelope."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from common.errors import RequestError
from common.messages import ErrorInfo
from gateway import control
from gateway.errors import error_response
from gateway.metrics import Exposition
from gateway.protocols import native_generate, openai_chat, openai_completions, openai_models, tokenize
from gateway.protocols.common import Deps

log = logging.getLogger(__name__)

Handler = Callable[[Request, Deps], Awaitable[Response]]

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}


class Application(FastAPI):
    """FastAPI with the body schemas, which the routes name, in the served OpenAPI document."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        super().__init__(title="Quintet", version="0.1.0", redirect_slashes=False)
        self._body_schemas = schemas

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        document.setdefault("components", {}).setdefault("schemas", {}).update(self._body_schemas)
        return document


def make_app(deps: Deps, exposition: Exposition) -> FastAPI:
    """The application over one engine client."""
    schemas: dict[str, Any] = {"Error": _ERROR_SCHEMA}
    app = Application(schemas)

    def post(path: str, handler: Handler, body: type[BaseModel]) -> None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        request_body = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}},
        }
        _route(app, "POST", path, handler, deps, (400, 401, 403, 404, 408, 409, 413, 500, 503, 504), request_body)

    def get(path: str, handler: Handler, statuses: tuple[int, ...] = (401, 503)) -> None:
        _route(app, "GET", path, handler, deps, statuses, None)

    post("/v1/chat/completions", openai_chat.chat_completions, openai_chat.ChatBody)
    post("/v1/completions", openai_completions.completions, openai_completions.CompletionBody)
    post("/generate", native_generate.generate, native_generate.GenerateBody)
    post("/tokenize", tokenize.tokenize, tokenize.TokenizeBody)
    post("/detokenize", tokenize.detokenize, tokenize.DetokenizeBody)
    get("/v1/models", openai_models.list_models)
    get("/v1/models/{model:path}", openai_models.get_model, (401, 404, 503))
    get("/health", control.health, (503,))
    get("/health_generate", control.health_generate, (503,))
    get("/get_server_info", control.server_info)
    get("/get_model_info", control.model_info)
    get("/metrics", control.metrics_handler(exposition), (400, 401))
    post("/abort_request", control.abort_request, control.AbortBody)
    for method in ("GET", "POST"):
        _route(app, method, "/flush_cache", control.flush_cache, deps, (400, 401, 403, 409, 503), None)
        _route(app, method, "/stop_profile", control.stop_profile, deps, (400, 401, 403, 409, 503), None)
    post("/start_profile", control.start_profile, control.ProfileBody)

    _add_error_handlers(app)
    return app


def _route(
    app: FastAPI,
    method: str,
    path: str,
    handler: Handler,
    deps: Deps,
    statuses: tuple[int, ...],
    request_body: dict[str, Any] | None,
) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(request, deps)

    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    extra: dict[str, Any] = {}
    if request_body is not None:
        extra["requestBody"] = request_body
    if "{model" in path:
        extra["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_class=Response,
        responses={status: {"description": "Error", "content": error} for status in statuses},
        openapi_extra=extra or None,
        operation_id=method.lower() + path.partition(":")[0].replace("/", "_").replace("{", "by_"),
        summary=(handler.__doc__ or path).splitlines()[0],
        name=path,
    )


def _add_error_handlers(app: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        info = error.info if isinstance(error, RequestError) else _internal(error)
        # What is still to come of a body that was too slow would keep the connection, one of a bounded number.
        return error_response(info, {"Connection": "close"} if info.status == 408 else None)

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(getattr(error, "headers", None) or {})
        if status == 404:
            words = f"there is no {request.method} {request.url.path} here"
        elif status == 405:
            words = f"{request.method} is not allowed for {request.url.path}"
        else:
            words = str(getattr(error, "detail", error))
        code = "not_found" if status == 404 else None
        return error_response(ErrorInfo(status=status, message=words, code=code), headers)

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def unexpected(_: Request, error: Exception) -> Response:
        return error_response(_internal(error))

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, unexpected)


def _internal(error: Exception) -> ErrorInfo:
    if isinstance(error, MemoryError):  # see ``main.end_if_starved``
        asyncio.get_running_loop().call_exception_handler({"message": "a request failed", "exception": error})
    log.error("a request failed inside the gateway", exc_info=error)
    return ErrorInfo(status=500, message="the request failed inside the gateway")

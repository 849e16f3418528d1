"""Health, metrics, information, and the endpoints that change the engine's state."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson
from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from common.errors import RequestError
from common.messages import (
    HEALTH_RID_PREFIX,
    ControlReply,
    ErrorInfo,
    Generate,
    IdsPrompt,
    SamplingParams,
    TextParams,
    pack_i32,
)
from gateway.errors import error_response
from gateway.fields import Body
from gateway.metrics import PREFIX, PREFIXES, Exposition
from gateway.protocols.common import Deps, parse, read_json
from gateway.request import Exchange, OpenRequest

"""Requests of /health_generate; nobody counts them as traffic."""
HEALTH_TIMEOUT_S = 20.0
ABORT_WAIT_S = 10.0
"""How long /abort_request waits for the end of a request that is open in its own gateway."""
_HEALTH_PRIORITY = 2**31 - 1


class AbortBody(Body):
    """``/abort_request``: one rid, or all."""

    rid: str | None = Field(default=None, min_length=1, max_length=256)
    abort_all: bool | None = None


class ProfileBody(Body):
    """``/start_profile``."""

    output_dir: str | None = None


async def health(_: Request, deps: Deps) -> Response:
    """Whether every part of the engine answers."""
    try:
        deps.engine.check_available()
    except RequestError as error:
        return error_response(error.info)
    return _json({"status": "ok"})


async def health_generate(request: Request, deps: Deps) -> Response:
    """Generate one real token. Under load any token that comes meanwhile proves the same."""
    engine = deps.engine
    try:
        engine.check_available()
    except RequestError as error:
        return error_response(error.info)
    started = time.monotonic()
    exchange = Exchange(started, deps.config.http.stream_buffer_bytes)
    generate = Generate(
        rid=HEALTH_RID_PREFIX + secrets.token_hex(12),
        gateway=engine.gateway,
        prompt=IdsPrompt(ids=pack_i32([0])),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        text=TextParams(),
        priority=_HEALTH_PRIORITY,
        received=time.time(),
    )
    exchange.records.append(OpenRequest(generate, exchange, 0, internal=True))
    try:
        engine.submit(exchange)
        while time.monotonic() < started + HEALTH_TIMEOUT_S:
            finish = exchange.records[0].finish
            if finish is not None and finish.reason in ("error", "abort"):
                break
            if finish is not None or engine.last_output > started:
                return _json({"status": "ok"})
            await _pause(exchange)
    except RequestError as error:
        return error_response(error.info)
    finally:
        engine.release(exchange, "health check answered")
    words = f"no token within {HEALTH_TIMEOUT_S:g} s"
    finish = exchange.records[0].finish
    if finish is not None:
        words = finish.error.message if finish.error is not None else finish.message or "the health check was aborted"
    return error_response(ErrorInfo(status=503, message=words, code="unhealthy"))


async def _pause(exchange: Exchange) -> None:
    """Sleep until the exchange changes, at most a moment (another request's token may have come)."""
    try:
        async with asyncio.timeout(0.1):
            await exchange.wait_change()
    except TimeoutError:
        pass


def metrics_handler(exposition: Exposition) -> Callable[[Request, Deps], Awaitable[Response]]:
    """The handler of ``/metrics``."""

    async def metrics(request: Request, deps: Deps) -> Response:
        """Prometheus text."""
        prefix = request.query_params.get("prefix", PREFIX)
        if prefix not in PREFIXES:
            words = f"prefix {prefix[:40]!r} is none of {' and '.join(map(repr, PREFIXES))}"
            return error_response(ErrorInfo(status=400, message=words, param="prefix"))
        deps.engine.update_gauges()
        body = exposition.render(deps.engine.fleet.status, prefix)
        return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics


async def server_info(_: Request, deps: Deps) -> Response:
    """Configuration (without keys), model and engine state."""
    config = msgspec.to_builtins(deps.config)
    for name in ("api_key", "admin_api_key"):
        config["http"][name] = len(config["http"][name])
    engine = deps.engine
    status = engine.fleet.status
    model = msgspec.to_builtins(engine.model) if engine.model is not None else None
    state = msgspec.to_builtins(status) if status is not None else None
    if state is not None:
        state.pop("metrics", None)
        state.pop("histograms", None)
    scheduler: dict[str, Any] = {}
    if engine.fleet.is_fresh(time.monotonic()):
        scheduler = (await engine.questions.control("info", wait_s=5.0)).body
    return _json(
        {
            "version": "0.1.0",
            "gateway": engine.gateway,
            "served_model_names": deps.served,
            "config": config,
            "model": model,
            "engine": state,
            "scheduler": scheduler,
            "internal_states": [scheduler],  # where SGLang's load generators look
        }
    )


async def model_info(_: Request, deps: Deps) -> Response:
    """The model in SGLang's words."""
    return _json({"model_path": deps.config.model.model or deps.served[0], "is_generation": True})


async def flush_cache(request: Request, deps: Deps) -> Response:
    """Empty the prefix cache; 409 while requests run, unless ``?timeout=`` says how long to wait for idleness."""
    given = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = -1.0
    if not 0 <= timeout_s <= 600:
        raise RequestError(f"'timeout' must be 0 to 600 seconds, not {given!r}", param="timeout")
    return await _control(deps, "flush_cache", wait_s=30.0 + timeout_s, timeout_s=timeout_s)


async def abort_request(request: Request, deps: Deps) -> Response:
    """End one request by its rid (a call by its id), or all; whichever gateway holds them."""
    body = parse(AbortBody, await read_json(request, deps.config.http.max_request_bytes))
    if bool(body.abort_all) == (body.rid is not None):
        raise RequestError("send either 'rid' or 'abort_all': true", param="rid")
    if body.abort_all:
        return await _control(deps, "abort_all")
    return await _abort(deps, body.rid or "")


async def _abort(deps: Deps, rid: str) -> Response:
    """Repeat the order while something of the rid is open here: it may still be on its way through the tokenizer."""
    give_up = time.monotonic() + ABORT_WAIT_S
    num_aborted = 0
    while True:
        reply = await deps.engine.questions.control("abort", rid=rid)
        num_aborted += int(reply.body.get("aborted", 0))
        if not deps.engine.has_open(rid) or reply.status not in (200, 404) or time.monotonic() > give_up:
            break
        await asyncio.sleep(0.05)
    return _json({"aborted": num_aborted}) if num_aborted else _answer("abort", reply)


async def start_profile(request: Request, deps: Deps) -> Response:
    """Begin a torch profiler trace of the worker."""
    body = parse(ProfileBody, await read_json(request, deps.config.http.max_request_bytes))
    return await _control(deps, "start_profile", directory=body.output_dir or "")


async def stop_profile(_: Request, deps: Deps) -> Response:
    """End the trace and write it."""
    return await _control(deps, "stop_profile", wait_s=120.0)


async def _control(deps: Deps, action: str, **fields: Any) -> Response:
    return _answer(action, await deps.engine.questions.control(action, **fields))


def _answer(action: str, reply: ControlReply) -> Response:
    if reply.status >= 400:
        words = str(reply.body.get("message") or reply.body.get("error") or f"{action} failed")
        return error_response(ErrorInfo(status=reply.status, message=words))
    return Response(orjson.dumps(reply.body), status_code=reply.status, media_type="application/json")


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")

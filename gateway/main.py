"""The gateway process: bind the port, run uvicorn and the engine client on one loop, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from functools import partial
from typing import Any

import uvloop

from common.errors import ConfigError
from common.messages import ErrorInfo
from common.process import EXIT_FAILED, ProcessContext
from gateway.app import make_app
from gateway.edge import Edge
from gateway.engine import Engine
from gateway.metrics import Exposition, GatewayMetrics
from gateway.output import ToolSupport
from gateway.protocols.common import Deps
from gateway.reasoning.registry import format_of
from gateway.server import Server, listen, make_server
from gateway.tool_parsers.registry import resolve_name

log = logging.getLogger(__name__)

PUBLISH_S = 2.0
_TIMER_S = 0.001
"""The event loop's timers count so: one may go off as much too early."""
CUT_OFF = ErrorInfo(status=503, message="the server is shutting down", code="draining", retry_after_s=5)


def main(context: ProcessContext) -> None:
    """Serve until SIGTERM, then drain. Raises ConfigError when the port cannot be bound."""
    listener = listen(context.config.http)
    gateway = Gateway(context)
    # What is loaded now stays for good: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(gateway.run(listener))


class Gateway:
    """One gateway: the engine client, the HTTP server, and the housekeeping between them."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        metrics = GatewayMetrics(context.name)
        self._exposition = Exposition(None if context.label else context.run_dir, metrics)
        self._metrics = metrics
        self.engine = Engine(context.channels, context.config, context.name, metrics, context.generation)
        self.engine.trace = context.trace
        self._wake = asyncio.Event()
        """Set when the process is asked to stop."""
        if context.config.model.tool_call_parser not in ("", "auto"):
            resolve_name(context.config.model.tool_call_parser)  # an unknown one ends the start
        if name := context.config.model.reasoning_parser:
            try:
                format_of(name)
            except ValueError as error:
                raise ConfigError(f"--reasoning-parser: {error}") from None
        deps = Deps(self.engine, context.config, time.time(), ToolSupport())
        self.server: Server = make_server(Edge(make_app(deps, self._exposition), context.config.http, metrics),
                                          context.config.http)  # fmt: skip

    async def run(self, listener: object) -> None:
        """Serve on a bound socket until the context is stopping and what runs has finished."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(end_if_starved)
        self._context.on_stop(partial(_set_in, loop, self._wake))
        loop.add_reader(self.engine.fileno(), self.engine.drain)
        self.engine.send_lease()
        serving = asyncio.ensure_future(self.server.serve(sockets=[listener]))  # type: ignore[list-item]
        try:
            await self._housekeeping(serving)
        finally:
            self.server.request_exit()
            await serving
            loop.remove_reader(self.engine.fileno())
            self.engine.drain()
            self.engine.send_lease(closing=True)

    async def _housekeeping(self, serving: asyncio.Future[None]) -> None:
        """Tick, beat and publish until it is time to end."""
        context, engine = self._context, self.engine
        drain_until: float | None = None
        next_publish = 0.0
        while not serving.done():
            now = time.monotonic()
            engine.tick(now)
            context.beat(ready=self.server.started, progress=engine.num_turns, detail=f"{len(engine.open)} open")
            self._metrics.num_connections = self.server.num_connections
            if now >= next_publish:
                next_publish = now + PUBLISH_S
                engine.update_gauges()
                self._exposition.publish()
            if context.stopping and drain_until is None:
                engine.draining = True
                drain_until = now + context.config.runtime.drain_seconds
                log.info("draining: %d requests open", len(engine.exchanges))
            is_over = context.num_stop_requests > 1 or (drain_until is not None and now >= drain_until)
            if drain_until is not None and (not engine.exchanges or is_over):
                if engine.exchanges:
                    log.warning("the drain time is over with %d requests open; they are cut off", len(engine.exchanges))
                    engine.fail_all(CUT_OFF)
                return
            await self._rest(min(engine.tick_in_s(now), context.beat_in_s))

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + _TIMER_S):
                await self._wake.wait()
        self._wake.clear()


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():  # a signal may come after the end
        loop.call_soon_threadsafe(event.set)


def end_if_starved(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The loop's exception handler. It would log the error of a callback and go on; but when memory runs out in one,
    what that callback had taken from a channel is lost, and streams would wait for it for ever. So the process ends,
    and clients connect to its successor."""
    if isinstance(context.get("exception"), MemoryError):
        log.critical("out of memory: %s", context.get("message", ""))
        os._exit(EXIT_FAILED)
    loop.default_exception_handler(context)

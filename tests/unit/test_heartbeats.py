"""When a process tells the supervisor that it lives, and how long its loop may sleep for that."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.channels import Channels
from common.config import HttpConfig, ServerConfig
from common.messages import Heartbeat
from common.process import EARLY_S, HEARTBEAT_S, ProcessContext
from gateway.engine import LEASE_S, TICK_S, Engine
from gateway.main import Gateway
from gateway.metrics import GatewayMetrics
from gateway.request import Exchange
from gateway.server import listen
from worker_proc.loop import HeartbeatThread, Pulse


class _Heart:
    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []

    def send(self, beat: Heartbeat) -> bool:
        self.beats.append(beat)
        return True


def context_in(folder: Path, role: str = "worker", config: ServerConfig | None = None) -> tuple[ProcessContext, _Heart]:
    heart = _Heart()
    context = ProcessContext(role, 0, 0, config or ServerConfig(), folder, Channels(folder))
    context._heart = heart  # type: ignore[assignment]
    return context, heart


def test_a_heartbeat_goes_out_when_due_or_shortly_before_or_when_readiness_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, heart = context_in(tmp_path)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("common.process.time", SimpleNamespace(monotonic=lambda: clock.now))

    def at(now: float, *, ready: bool = True) -> int:
        clock.now = now
        context.beat(ready=ready, progress=1)
        return len(heart.beats)

    assert context.beat_in_s == 0.0
    assert at(100.0) == 1
    assert context.beat_in_s == HEARTBEAT_S
    assert at(100.0 + HEARTBEAT_S - 2 * EARLY_S) == 1
    assert abs(context.beat_in_s - 2 * EARLY_S) < 1e-9
    assert at(100.0 + HEARTBEAT_S - EARLY_S / 2) == 2, "whoever wakes so early is not woken again"
    assert at(100.0 + HEARTBEAT_S, ready=False) == 3
    context.channels.close()


def test_the_workers_thread_wakes_for_heartbeats_alone_once_it_is_ready(tmp_path: Path) -> None:
    context, heart = context_in(tmp_path)
    pulse = Pulse()
    thread = HeartbeatThread(context, pulse)
    waits: list[float] = []

    def wait(timeout_s: float) -> None:
        waits.append(timeout_s)
        pulse.ready = True
        if len(waits) == 2:
            stop.set()

    stop = threading.Event()
    thread._stop = SimpleNamespace(is_set=stop.is_set, wait=wait)  # type: ignore[assignment]
    thread._run()
    assert waits[0] == HEARTBEAT_S / 2, "being ready is told soon"
    assert HEARTBEAT_S / 2 < waits[1] <= HEARTBEAT_S
    assert [beat.ready for beat in heart.beats] == [False, True]
    context.channels.close()


def test_a_gateway_with_nothing_open_sleeps_until_its_next_lease(tmp_path: Path) -> None:
    channels = Channels(tmp_path)
    engine = Engine(channels, ServerConfig(), "gateway-0", GatewayMetrics("gateway-0"))
    assert engine.tick_in_s(100.0) == 0.0
    engine.tick(100.0)
    assert engine.tick_in_s(100.0) == LEASE_S
    assert engine.tick_in_s(100.0 + LEASE_S + 1) == 0.0
    engine.exchanges.add(Exchange(100.0, 1 << 20))
    assert engine.tick_in_s(100.0) == TICK_S
    channels.close()


def test_a_gateway_that_sleeps_hears_at_once_that_it_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.process.HEARTBEAT_S", 600.0)
    monkeypatch.setattr("gateway.engine.LEASE_S", 600.0)
    context, _ = context_in(tmp_path, "gateway", ServerConfig(http=HttpConfig(port=0)))
    gateway = Gateway(context)

    async def serve() -> None:
        running = asyncio.ensure_future(gateway.run(listen(context.config.http)))
        while not gateway.server.started:
            await asyncio.sleep(0)
        context.request_stop()
        async with asyncio.timeout(30.0):
            await running

    asyncio.run(serve())
    context.request_stop()  # the loop is gone: a late signal finds nobody to wake
    context.channels.close()

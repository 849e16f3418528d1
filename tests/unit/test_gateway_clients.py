"""Clients that leave, that read slowly, that do not read at all; health under load; drain."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from common.config import HttpConfig, RuntimeConfig, ServerConfig
from gateway import engine as engine_module
from tests.unit.gateway_live import CHAT, Live, events, eventually, joined, live_gateway


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway(lambda _: Script(endless=True), stream_buffer_bytes=20_000) as pair:
        yield pair


STREAM: dict[str, Any] = {"messages": CHAT, "stream": True}
WHOLE: dict[str, Any] = {"messages": CHAT}


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_a_client_that_leaves_is_aborted(live: Live, body: dict[str, Any]) -> None:
    aborts = len(live.engine.aborts)
    connection = live.raw(body)
    eventually(lambda: any(record.num_ids for record in live.open.values()), "it runs")
    connection.close()
    eventually(lambda: not live.open, "the ending")
    assert [abort.reason for abort in live.engine.aborts[aborts:]] == ["client disconnected"]


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_a_client_that_leaves_before_acceptance_is_aborted(live: Live, body: dict[str, Any]) -> None:
    with live.script(lambda _: Script(silent=True)):
        connection = live.raw(body)
        eventually(lambda: live.arrived, "it is with the engine")
        connection.close()
        eventually(lambda: not live.open, "the ending")


def test_leaving_aborts_every_choice(live: Live) -> None:
    aborts = len(live.engine.aborts)
    connection = live.raw({**STREAM, "n": 3})
    eventually(lambda: len(live.open) == 3)
    connection.close()
    eventually(lambda: not live.open)
    assert len({abort.rid for abort in live.engine.aborts[aborts:]}) == 3


def test_abort_is_repeated_until_the_ending(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ABORT_REPEAT_S", 0.05)
    aborts = len(live.engine.aborts)
    live.engine.ignore_aborts = True
    connection = live.raw(STREAM)
    eventually(lambda: any(record.num_ids for record in live.open.values()))
    connection.close()
    eventually(lambda: len(live.engine.aborts) >= aborts + 3, "the third abort")
    assert live.open
    live.engine.ignore_aborts = False
    eventually(lambda: not live.open, "the ending")


def test_a_reader_that_stops_is_cut_off_and_delays_nobody(live: Live) -> None:
    cut = live.gateway.gateway.engine.metrics.num_cut_off
    big = Script(endless=True, pieces=("x" * 4096,), per_step=8)
    with live.script(lambda _: big):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.gateway.port))
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        eventually(lambda: live.arrived, "it is with the engine")
    with live.script(lambda _: Script()):
        while live.gateway.gateway.engine.metrics.num_cut_off == cut:
            assert live.chat().json()["choices"][0]["message"]["content"] == "Hello world"
    eventually(lambda: not live.open, "it is aborted")
    eventually(lambda: live.gateway.gateway.server.num_connections <= 2, "its connection is closed")
    connection.close()


def test_a_slow_reader_within_the_bound_gets_everything(live: Live) -> None:
    pieces = tuple(f"{i:06d}," for i in range(100))
    with live.script(lambda _: Script(pieces=pieces)):
        connection = live.raw(STREAM)
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(100)
        connection.close()
    for i in range(100):
        assert b"%06d," % i in data


def test_whole_replies_are_not_bounded_by_the_stream_buffer(live: Live) -> None:
    with live.script(lambda _: Script(pieces=("y" * 1000,) * 100)):
        assert len(live.chat().json()["choices"][0]["message"]["content"]) == 100_000


def test_health_generate_is_true_under_load_and_counts_nothing(live: Live) -> None:
    metrics = live.gateway.gateway.engine.metrics
    connection = live.raw(STREAM)
    eventually(lambda: any(record.num_ids for record in live.open.values()))
    before = sum(metrics.ttft.counts)
    with live.script(lambda _: Script(silent=True)):
        assert live.client.get("/health_generate").status_code == 200
    assert sum(metrics.ttft.counts) == before
    connection.close()
    eventually(lambda: not live.open)
    with live.script(lambda _: Script()):
        assert live.client.get("/health_generate").status_code == 200
        assert live.engine.generates[-1].sampling.max_tokens == 1
    assert sum(metrics.ttft.counts) == before


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    pieces = tuple(f"<{i}>" for i in range(4))
    with live_gateway(lambda _: Script(pieces=pieces)) as pair:
        pair.engine.auto = False
        found: list[str] = []
        body = {"messages": CHAT, "stream": True}
        reader = threading.Thread(target=lambda: found.append(pair.post("/v1/chat/completions", body).text))
        reader.start()
        eventually(lambda: pair.arrived, "it is with the engine")
        pair.engine.step()
        pair.gateway.stop()
        eventually(lambda: pair.client.get("/health").status_code == 503, "it drains")
        refused = pair.chat()
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        pair.engine.step(3)
        reader.join(10)
        assert joined(events(found[0])) == "".join(pieces)
        pair.gateway.join()
        eventually(lambda: pair.engine.leases[-1].closing, "the last lease")


def test_drain_ends_when_its_time_is_over() -> None:
    config = ServerConfig(http=HttpConfig(port=0), runtime=RuntimeConfig(drain_seconds=0.2))
    with live_gateway(lambda _: Script(endless=True), config=config) as pair:
        connection = pair.raw(STREAM)
        eventually(lambda: pair.arrived, "it is with the engine")
        started = time.monotonic()
        pair.gateway.stop()
        pair.gateway.join()
        assert time.monotonic() - started >= 0.2
        eventually(lambda: bool(pair.engine.aborts), "what was cut off is aborted")
        connection.close()

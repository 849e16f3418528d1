"""Where a stream's bytes are written: straight to the connection, by its task when that is full; each on its own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.fake_engine import Script
from common.messages import Generate
from gateway.protocols.openai_chat_reply import ChatFormatter
from gateway.request import Delta, Exchange
from gateway.respond import EngineReply
from tests.unit.gateway_live import CHAT, Live, Stream, events, eventually, joined, live_gateway

STREAM: dict[str, Any] = {"messages": CHAT, "stream": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway(stream_buffer_bytes=64 << 20) as pair:
        yield pair


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while more := connection.recv(65536):
        data += more
    return data


def connect(live: Live, head: str, body: dict[str, Any], receive_buffer: int = 0) -> socket.socket:
    """A request on a bare connection; returns when the engine has it."""
    seen = len(live.engine.generates)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", live.gateway.port))
    data = json.dumps(body).encode()
    connection.sendall(f"{head}\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    eventually(lambda: len(live.engine.generates) > seen, "the request arrives")
    return connection


def chunks_of(body: bytes) -> list[bytes]:
    """The chunks of a chunked body."""
    found = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        found.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        body = rest[length + 2 :]
    return found


def watch_writes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step's deltas were written where they arrived."""
    found: list[bool] = []
    write_now = EngineReply._write_now

    def watched(self: EngineReply) -> bool:
        found.append(write_now(self))
        return found[-1]

    monkeypatch.setattr(EngineReply, "_write_now", watched)
    return found


def test_every_step_is_one_chunk_and_wakes_no_task(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = tuple(f"<{i}>" for i in range(6))
    writes, wakes = watch_writes(monkeypatch), []
    wake = Exchange.wake
    monkeypatch.setattr(Exchange, "wake", lambda self: (wakes.append(bool(self.records[0].num_ids)), wake(self))[1])
    with live.script(lambda _: Script(pieces=pieces), auto=False):
        connection = connect(live, "POST /v1/chat/completions HTTP/1.1\r\nConnection: close", STREAM)
        for number in range(1, 7):
            eventually(lambda: not live.open or next(iter(live.open.values())).exchange._waiter is not None)
            live.engine.step()
            eventually(lambda seen=number: not live.open or next(iter(live.open.values())).num_ids == seen)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b" 200 " in head
    texts = [[joined(events(chunk.decode()))] for chunk in chunks_of(body) if chunk]
    assert [text for [text] in texts if text] == list(pieces)
    assert writes == [True] * 4  # the first comes with the headers, the last with the end: the task writes those
    assert wakes.count(True) == 2


def test_a_reader_that_pauses_gets_every_byte_in_order(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = tuple(f"{i:06d}" + "x" * 20_000 for i in range(600))
    writes = watch_writes(monkeypatch)
    with live.script(lambda _: Script(pieces=pieces), auto=False):
        connection = connect(live, "POST /v1/chat/completions HTTP/1.1\r\nConnection: close", STREAM, 65536)
        num_steps = 0
        while False not in writes:
            live.engine.step()
            num_steps += 1
            eventually(lambda seen=num_steps: next(iter(live.open.values())).num_ids == seen)
        live.engine.step(5)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_to_end, connection)
            live.engine.auto = True
            _, _, body = reading.result(20).partition(b"\r\n\r\n")
    found = b"".join(chunks_of(body)).decode()
    assert joined(events(found)) == "".join(pieces)
    assert True in writes


def test_a_failure_in_one_stream_ends_that_stream_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = ChatFormatter.chunk

    def broken(self: ChatFormatter, deltas: list[Delta]) -> bytes:
        if any("bad" in delta.text for delta in deltas):
            raise ValueError("this stream is broken")
        return chunk(self, deltas)

    monkeypatch.setattr(ChatFormatter, "chunk", broken)

    def script(generate: Generate) -> Script:
        return Script(pieces=("a", "b", "bad", "c", "d") if generate.sampling.seed == 1 else tuple("abcde"))

    with live.script(script, auto=False):
        bad = connect(live, "POST /v1/chat/completions HTTP/1.1", {**STREAM, "seed": 1})
        good = Stream(live, seed=2)
        live.engine.step(5)
        assert joined(good.chunks()) == "abcde"
        cut = read_to_end(bad)
    assert b'"b"' in cut and b'"c"' not in cut and b"[DONE]" not in cut
    eventually(lambda: not live.open, "it is aborted")

"""Where a stream's bytes are written: straight to the connection, by its task when that is full; each on its own."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from common.messages import Finish, Generate, SamplingParams, TextParams, TextPrompt
from gateway.metrics import GatewayMetrics
from gateway.protocols.openai_chat_reply import ChatFormatter
from gateway.request import Delta, Exchange, OpenRequest
from gateway.respond import WRITER_SCOPE_KEY, EngineReply
from tests.unit.gateway_live import CHAT, Live, Stream, events, eventually, joined, live_gateway

STREAM: dict[str, Any] = {"messages": CHAT, "stream": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while more := connection.recv(65536):
        data += more
    return data


def connect(live: Live, head: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare connection; returns when the engine has it."""
    seen = len(live.engine.generates)
    connection = socket.socket()
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


class Connection:
    """A connection that is full while ``full``: as ``ConnectionWriter``, and as the server's ``send``."""

    def __init__(self) -> None:
        self.full = False
        self.written: list[tuple[str, str]] = []
        """(who wrote, the text)."""
        self.room = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return not self.full

    def write(self, body: bytes) -> None:
        self.written.append(("writer", joined(events(body.decode()))))

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            while self.full:
                self.room.clear()
                await self.room.wait()
            self.written.append(("task", joined(events(message["body"].decode()))))

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError


class AcceptingEngine:
    """What ``EngineReply`` needs of the engine client; every request is accepted at once."""

    def __init__(self) -> None:
        self.metrics, self.trace = GatewayMetrics("gateway-0"), None

    def submit(self, exchange: Exchange) -> None:
        for record in exchange.records:
            record.accepted = True

    def release(self, exchange: Exchange) -> None:
        pass


def test_a_reader_that_pauses_gets_everything_in_order() -> None:
    async def scenario() -> list[tuple[str, str]]:
        exchange, connection = Exchange(0.0, 1 << 20), Connection()
        generate = Generate(rid="r", gateway="gateway-0", prompt=TextPrompt(text="hi"), sampling=SamplingParams(),
                            text=TextParams())  # fmt: skip
        exchange.records.append(OpenRequest(generate, exchange, 0))
        formatter = ChatFormatter("r", "m", exchange, [None], logprobs=False, include_usage=False,
                                  continuous_usage=False)  # fmt: skip
        reply = EngineReply(AcceptingEngine(), exchange, formatter, stream=True)  # type: ignore[arg-type]
        scope = {WRITER_SCOPE_KEY: connection}
        task = asyncio.ensure_future(reply(scope, connection.receive, connection.send))  # type: ignore[arg-type]

        async def step(text: str) -> None:
            exchange.add(Delta(0, text, b"aaaa", [], [], None))
            exchange.deliver()
            for _ in range(5):
                await asyncio.sleep(0)

        await asyncio.sleep(0)
        for text in ("1", "2", "3"):
            await step(text)
        connection.full = True
        await step("4")
        assert exchange.sending_since, "the task waits for room"
        for text in ("5", "6"):
            await step(text)
        connection.full = False
        connection.room.set()
        await step("7")
        await step("8")
        exchange.records[0].finish = Finish("stop")
        exchange.push(Delta(0, "9", b"aaaa", [], [], Finish("stop")))
        await asyncio.wait_for(task, 5)
        return connection.written

    written = asyncio.run(scenario())
    assert "".join(text for _, text in written) == "123456789"
    assert [who for who, text in written if text in ("2", "3", "4", "8", "9")] == [
        "writer", "writer", "task", "writer", "task",
    ]  # fmt: skip


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

"""Every bound of the gateway refuses what is beyond it, at once, in words a client can act on; nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from common.config import HttpConfig, RuntimeConfig, ServerConfig
from common.messages import ErrorInfo, Finish
from gateway import engine as engine_module
from gateway import server as server_module
from gateway.errors import error_response
from gateway.fields import MAX_LOGIT_BIAS, MAX_STOP_IDS
from gateway.grammar import MAX_GRAMMAR_BYTES
from gateway.protocols import common
from gateway.protocols.chat_messages import MAX_MESSAGES
from gateway.protocols.common import MAX_GENERATIONS
from gateway.protocols.tokenize import MAX_IDS, MAX_TEXTS
from gateway.tool_parsers.grammar import MAX_TOOLS
from tests.unit.gateway_live import CHAT, Live, eventually, live_gateway

LARGE = "x" * MAX_GRAMMAR_BYTES
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway(stream_buffer_bytes=64 << 20) as pair:
        yield pair


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(count)]


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (CHAT_PATH, {"messages": CHAT * (MAX_MESSAGES + 1)}, MAX_MESSAGES),
        (CHAT_PATH, {"messages": CHAT, "tools": tools(MAX_TOOLS + 1), "tool_choice": "required"}, MAX_TOOLS),
        (CHAT_PATH, {"messages": CHAT, "json_schema": {"enum": [LARGE]}}, MAX_GRAMMAR_BYTES),
        (CHAT_PATH, {"messages": CHAT, "regex": LARGE + "x"}, MAX_GRAMMAR_BYTES),
        (CHAT_PATH, {"messages": CHAT, "choice": [LARGE]}, MAX_GRAMMAR_BYTES),
        (CHAT_PATH, {"messages": CHAT, "stop_token_ids": [1] * (MAX_STOP_IDS + 1)}, MAX_STOP_IDS),
        (CHAT_PATH, {"messages": CHAT, "logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}}, MAX_LOGIT_BIAS),
        ("/v1/completions", {"prompt": ["x"] * (MAX_GENERATIONS + 1)}, MAX_GENERATIONS),
        ("/generate", {"text": ["x"] * (MAX_GENERATIONS + 1)}, MAX_GENERATIONS),
        ("/tokenize", {"prompt": ["x"] * (MAX_TEXTS + 1)}, MAX_TEXTS),
        ("/detokenize", {"tokens": [[1]] * (MAX_TEXTS + 1)}, MAX_TEXTS),
        ("/detokenize", {"tokens": [1] * (MAX_IDS + 1)}, MAX_IDS),
        ("/detokenize", {"tokens": [[1] * (MAX_IDS // 2), [1] * (MAX_IDS // 2 + 1)]}, MAX_IDS),
    ],
    ids=lambda value: f"{next(reversed(value))}" if isinstance(value, dict) else None,
)
def test_a_request_for_more_than_the_bound_is_400_and_names_it(
    live: Live, path: str, body: dict[str, Any], limit: int
) -> None:
    seen = len(live.engine.generates)
    response = live.post(path, body)
    assert response.status_code == 400, response.text[:500]
    assert str(limit) in response.json()["error"]["message"]
    assert len(live.engine.generates) == seen and not live.open


@pytest.mark.parametrize("status", [429, 503])
def test_every_refusal_that_time_mends_says_when_to_come_again(status: int) -> None:
    assert error_response(ErrorInfo(status=status, message="full")).headers["retry-after"] == "1"
    assert error_response(ErrorInfo(status=status, message="full", retry_after_s=2.6)).headers["retry-after"] == "3"
    assert "retry-after" not in error_response(ErrorInfo(status=400, message="bad")).headers


def test_refusals_without_a_time_of_their_own_have_one(live: Live) -> None:
    for script in (
        Script(rejected=ErrorInfo(status=503, message="overloaded")),
        Script(refused=Finish("error", error=ErrorInfo(status=503, message="the queue is full"))),
        Script(refused=Finish("abort", message="aborted before it ran")),
    ):
        with live.script(lambda _, script=script: script):  # type: ignore[misc]
            response = live.chat()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1"), response.text


def test_who_still_waits_when_the_drain_is_over_is_told_when_to_come_again() -> None:
    config = ServerConfig(http=HttpConfig(port=0), runtime=RuntimeConfig(drain_seconds=0.1))
    with live_gateway(lambda _: Script(silent=True), config=config) as pair:
        connection = pair.raw({"messages": CHAT})
        eventually(lambda: bool(pair.open), "it waits")
        pair.gateway.stop()
        pair.gateway.join()
        head = connection.recv(65536).lower()
        connection.close()
    assert head.startswith(b"http/1.1 503") and b"\r\nretry-after: 5\r\n" in head


def test_a_body_that_does_not_come_is_408_and_its_connection_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "BODY_TIMEOUT_S", 0.1)
    with live_gateway() as pair, socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=10) as connection:
        connection.sendall(f'POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{"mess'.encode())
        answer = b""
        while more := connection.recv(65536):  # to the end of the connection
            answer += more
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.1 s" in answer
        assert pair.chat().status_code == 200


def test_connections_far_above_the_bound_are_closed_unread() -> None:
    with live_gateway(max_connections=2) as pair, contextlib.ExitStack() as held:
        pair.client.close()  # whose connection would be one of them
        for _ in range(4):
            held.enter_context(socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=10))
        eventually(lambda: pair.gateway.gateway.server.num_connections == 4, "they are open")
        fifth = held.enter_context(socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=10))
        with contextlib.suppress(ConnectionError):
            fifth.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert fifth.recv(100) == b""
        assert pair.gateway.gateway.server.num_connections == 4


def test_the_kernel_gives_up_a_peer_that_acknowledges_nothing(live: Live) -> None:
    assert live.chat().status_code == 200
    for protocol in live.gateway.gateway.server.server_state.connections:
        client = protocol.transport.get_extra_info("socket")
        waits_ms = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert waits_ms == 1000 * server_module.UNREAD_TIMEOUT_S


def test_a_reader_that_takes_nothing_for_long_is_cut_off_below_the_bytes_bound(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "STALL_S", 0.2)
    before = live.gateway.gateway.engine.metrics.num_cut_off
    much = Script(pieces=("x" * 65536,) * 200)  # more than the kernel takes, less than --stream-buffer-bytes
    with live.script(lambda _: much):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.gateway.port))
        body = json.dumps({"messages": CHAT, "stream": True}).encode()
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        eventually(lambda: live.gateway.gateway.engine.metrics.num_cut_off > before, "it is cut off")
    assert live.chat().status_code == 200
    connection.close()

"""Clients of HTTP/1.0, and clients that offer to switch protocols with every request, as Java's do."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from tests.unit.gateway_live import CHAT, Live, events, eventually, joined, live_gateway

OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
"""What java.net.http.HttpClient sends with a request to an ``http://`` address."""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


def post(body: dict[str, Any], version: str = "1.1", headers: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of a chat completion."""
    data = json.dumps({"messages": CHAT, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n".encode()
    return head + headers + b"\r\n", data


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.gateway.port), timeout=20)


def ask(live: Live, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer; the server closes the connection behind it."""
    with connect(live) as connection:
        connection.sendall(request)
        data = b""
        while more := connection.recv(65536):
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("kept", [b"", b"Connection: keep-alive\r\n"])
def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(live: Live, kept: bytes) -> None:
    pieces = tuple(f"<{i}>" for i in range(50))
    with live.script(lambda _: Script(pieces=pieces)):
        head, body = ask(live, b"".join(post({"stream": True}, "1.0", kept)))
    assert b" 200 " in head and b"connection: close" in head
    assert b"transfer-encoding" not in head and b"content-length" not in head
    found = events(body.decode())  # nothing but events
    assert joined(found) == "".join(pieces) and found[-1] == "[DONE]"


def test_whole_answers_and_errors_to_http_1_0_have_their_length(live: Live) -> None:
    for fields, status in (({}, b"200"), ({"stream": True, "temperature": 9}, b"400")):
        head, body = ask(live, b"".join(post(fields, "1.0")))
        assert b" %b " % status in head and b"content-length: %d" % len(body) in head
        assert b"transfer-encoding" not in head and json.loads(body)


def test_a_client_of_http_1_0_that_leaves_is_aborted(live: Live) -> None:
    with live.script(lambda _: Script(endless=True)):
        with connect(live) as connection:
            connection.sendall(b"".join(post({"stream": True}, "1.0")))
            assert connection.recv(100)
        eventually(lambda: not live.open, "it is aborted")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 60, "head", -1])
def test_an_offer_to_switch_protocols_is_left_alone_and_the_body_is_read(live: Live, stream: bool, cut: Any) -> None:
    head, data = post({"stream": stream}, headers=OFFER)
    request = head + data
    at = len(head) if cut == "head" else cut
    connection = http.client.HTTPConnection("127.0.0.1", live.gateway.port, timeout=20)
    connection.connect()
    for _ in range(2):  # the connection is kept, and the next request on it is read, too
        connection.sock.sendall(request[:at])
        connection.sock.sendall(request[at:])
        with http.client.HTTPResponse(connection.sock) as reply:
            reply.begin()
            text = reply.read().decode()
            assert reply.status == 200, text
        if stream:
            assert joined(events(text)) == "Hello world"
        else:
            assert json.loads(text)["choices"][0]["message"]["content"] == "Hello world"
    connection.close()


def test_an_offer_with_a_chunked_body_and_other_tokens_in_its_connection_header(live: Live) -> None:
    data = json.dumps({"messages": CHAT}).encode()
    offer = OFFER.replace(b"Connection: Upgrade", b"Connection: close, Upgrade")
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (data[:7], data[7:])) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + offer + b"\r\n"
    answer, text = ask(live, head + body)
    assert b" 200 " in answer and b"connection: close" in answer
    assert json.loads(text)["choices"][0]["message"]["content"] == "Hello world"


def test_an_offer_behind_a_pipelined_request(live: Live) -> None:
    head, data = post({}, headers=OFFER.replace(b"Connection: Upgrade", b"Connection: close, Upgrade"))
    _, text = ask(live, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + head + data)
    assert b'"status":"ok"' in text and b"Hello world" in text


def test_an_offer_of_websockets_gets_the_plain_answer(live: Live) -> None:
    offer = b"Connection: close, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n"
    head, body = ask(live, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n")
    assert b" 200 " in head and json.loads(body)["object"] == "list"


def test_garbage_behind_an_offer_is_400_and_harms_nobody(live: Live) -> None:
    answer, _ = ask(live, b"".join(post({}, headers=OFFER)) + b"garbage\r\n\r\n")
    assert b" 400 " in answer
    assert live.chat().status_code == 200

"""Keys, CORS, request ids, logs without secrets, connections, headers: before any route."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.fake_engine import Script
from common.messages import ControlReply, Finish, TextBatch, TextRow
from gateway import server
from tests.unit.gateway_live import CHAT, Live, eventually, live_gateway

ADMIN = ["/flush_cache", "/start_profile", "/stop_profile", "/abort_request"]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Live]:
    keys: dict[str, Any] = {"api_key": ["key-one", "key-two"], "admin_api_key": ["root"]}
    with live_gateway(**keys, cors_origin=["https://ok.example"]) as pair:
        yield pair


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"Authorization": "Bearer"}, {"Authorization": "Basic key-one"}, bearer("key-on")]
)
def test_without_a_key_everything_but_health_is_401(keyed: Live, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/get_server_info", "/openapi.json", "/nothing"):
        response = keyed.client.get(path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert keyed.post("/v1/chat/completions", {"messages": CHAT}, headers=headers).status_code == 401
    assert keyed.client.get("/health", headers=headers).status_code == 200
    assert keyed.client.get("/health_generate", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["key-one", "key-two", "root"])
def test_each_key_opens(keyed: Live, key: str) -> None:
    assert keyed.client.get("/v1/models", headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("path", ADMIN)
def test_admin_endpoints_need_an_admin_key(keyed: Live, path: str) -> None:
    body = {"rid": "x"} if path == "/abort_request" else {}
    assert keyed.post(path, body).status_code == 401
    assert keyed.post(path, body, headers=bearer("key-one")).status_code == 403
    assert keyed.post(path, body, headers=bearer("root")).status_code == 200


def test_admin_key_alone_leaves_the_rest_open() -> None:
    with live_gateway(admin_api_key=["root"]) as pair:
        assert pair.chat().status_code == 200
        assert pair.client.get("/flush_cache").status_code == 401


def test_keys_are_never_shown(keyed: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        text = keyed.client.get("/get_server_info?api_key=key-two", headers=bearer("key-one")).text
    ours = [record.getMessage() for record in caplog.records if record.name.split(".")[0] not in ("httpx", "httpcore")]
    assert any("/get_server_info" in line for line in ours)
    for secret in ("key-one", "key-two", '"root"'):
        assert secret not in text
        assert not any(secret in line for line in ours)


def test_cors_only_for_named_origins(keyed: Live, live: Live) -> None:
    preflight = {"Origin": "https://ok.example", "Access-Control-Request-Method": "POST"}
    response = keyed.client.options("/v1/chat/completions", headers=preflight)
    assert response.headers["access-control-allow-origin"] == "https://ok.example"
    response = keyed.client.get("/v1/models", headers={**bearer("key-one"), "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers
    response = live.client.get("/v1/models", headers={"Origin": "https://ok.example"})
    assert "access-control-allow-origin" not in response.headers


def test_request_id_goes_in_and_out(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        response = live.client.get("/v1/models", headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert "abc-1" in caplog.text
    drawn = live.client.get("/v1/models").headers["x-request-id"]
    assert len(drawn) == 32
    assert live.client.get("/v1/models", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"] != "x" * 200
    assert live.chat(stream=True).headers["x-request-id"]


def test_log_line_cannot_be_forged(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        live.client.get("/x%0Aforged%20line")
    assert "\nforged" not in caplog.text


def test_connections_above_the_bound_get_503() -> None:
    with live_gateway(max_connections=3) as pair:
        held = [socket.create_connection(("127.0.0.1", pair.gateway.port)) for _ in range(3)]
        eventually(lambda: pair.client.get("/health").status_code == 503, "it is full")
        response = pair.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["connection"] == "close"
        for connection in held:
            connection.close()
        eventually(lambda: pair.chat().status_code == 200, "room again")


def test_headers_that_do_not_come_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.1)
    with live_gateway() as pair:
        connection = socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=10)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost:")
        try:
            assert connection.recv(100) == b""
        except ConnectionResetError:
            pass
        connection.close()
        assert pair.chat().status_code == 200


def refusal(connection: socket.socket) -> bytes:
    """What a connection is told before it is closed; a reset on what it still sends is no matter."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            answer += more
    connection.close()
    return answer


@pytest.mark.parametrize("where", ["a header", "many headers", "the target"])
@pytest.mark.parametrize("is_complete", [True, False])
def test_headers_above_the_bound_are_431(live: Live, where: str, is_complete: bool) -> None:
    size = server.MAX_HEADER_BYTES
    head = {
        "a header": b"GET /health HTTP/1.1\r\nX-A: " + b"a" * size,
        "many headers": b"GET /health HTTP/1.1\r\n" + b"X-A: 0123456789\r\n" * (size // 12),
        "the target": b"GET /health?" + b"a" * size + b" HTTP/1.1",
    }[where]
    connection = socket.create_connection(("127.0.0.1", live.gateway.port), timeout=10)
    connection.sendall(head[:-100])
    if is_complete:
        connection.sendall(head[-100:] + b"\r\n\r\n")
    else:
        for _ in range(300):  # what is refused is not taken in for ever
            with contextlib.suppress(ConnectionError):
                connection.sendall(head[:1].replace(b"G", b"b") * 4096)
    answer = refusal(connection)
    assert not answer or (b" 431 " in answer and b"headers_too_large" in answer)
    assert answer or not is_complete, "a client that goes on sending may miss the answer"
    eventually(lambda: live.gateway.gateway.server.num_connections <= 2, "it is closed")
    assert live.chat().status_code == 200


def test_headers_within_the_bound_are_taken_in_any_pieces(live: Live) -> None:
    value = b"a" * (server.MAX_HEADER_BYTES - 4096)
    with socket.create_connection(("127.0.0.1", live.gateway.port), timeout=10) as connection:
        for _ in range(2):
            request = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + value + b"\r\n\r\n"
            for at in range(0, len(request), 7001):
                connection.sendall(request[at : at + 7001])
            assert b" 200 " in connection.recv(65536)


def test_garbage_on_the_port_is_400_and_harms_nobody(live: Live) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        connection = socket.create_connection(("127.0.0.1", live.gateway.port), timeout=10)
        connection.sendall(garbage)
        assert b"400" in connection.recv(1000)
        connection.close()
    assert live.chat().status_code == 200


def test_control_endpoints_reach_the_scheduler(live: Live) -> None:
    assert live.post("/abort_request", {"rid": "r9"}).status_code == 200
    assert (live.engine.controls[-1].action, live.engine.controls[-1].rid) == ("abort", "r9")
    assert live.post("/abort_request", {"abort_all": True}).status_code == 200
    assert live.engine.controls[-1].action == "abort_all"
    assert live.post("/abort_request", {}).status_code == 400
    assert live.client.post("/flush_cache?timeout=2").status_code == 200
    assert (live.engine.controls[-1].action, live.engine.controls[-1].timeout_s) == ("flush_cache", 2.0)
    assert live.client.post("/flush_cache?timeout=x").status_code == 400
    assert live.post("/start_profile", {"output_dir": "/tmp/p"}).status_code == 200
    assert (live.engine.controls[-1].action, live.engine.controls[-1].directory) == ("start_profile", "/tmp/p")
    assert live.client.post("/stop_profile").status_code == 200


def test_a_refused_control_keeps_its_status_and_words(live: Live) -> None:
    live.engine.control_replies["flush_cache"] = ControlReply(request_id="", status=409, body={"message": "2 run"})
    response = live.client.post("/flush_cache")
    live.engine.control_replies.clear()
    assert response.status_code == 409
    assert response.json()["error"]["message"] == "2 run"


def test_served_openapi_document_describes_the_bodies(live: Live) -> None:
    document = live.client.get("/openapi.json").json()
    operation = document["paths"]["/v1/chat/completions"]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "messages" in document["components"]["schemas"][name]["properties"]
    assert {"200", "400", "401", "413", "503"} <= set(operation["responses"])


def test_abort_finds_a_request_that_is_still_on_its_way_to_the_scheduler(live: Live) -> None:
    live.engine.control_replies["abort"] = ControlReply(request_id="", status=404, body={"error": "no request"})
    assert live.post("/abort_request", {"rid": "mine"}).status_code == 404
    with live.script(lambda _: Script(silent=True)), ThreadPoolExecutor(2) as pool:
        running = pool.submit(live.post, "/generate", {"text": "a", "rid": "mine", "sampling_params": {"n": 2}})
        eventually(lambda: len(live.open) == 2, "it is open")
        num_asked = len(live.engine.controls)
        aborting = pool.submit(live.post, "/abort_request", {"rid": "mine"})
        eventually(lambda: len(live.engine.controls) > num_asked + 1, "asked again")
        live.engine.control_replies["abort"] = ControlReply(request_id="", status=200, body={"aborted": 2})
        eventually(lambda: len(live.engine.controls) > num_asked + 3, "asked until it has ended")
        ended = Finish(reason="abort", message="by an operator")
        rows = [TextRow(f"mine-{i}", 0, 0, b"", 0, "", finish=ended) for i in range(2)]
        live.engine.send(TextBatch(detokenizer_generation=0, rows=rows))
        assert aborting.result(20).json()["aborted"] >= 2
        assert running.result(20).status_code == 503
    del live.engine.control_replies["abort"]


def test_a_client_that_leaves_ends_the_request_that_runs_before_pipelined_ones(live: Live) -> None:
    with live.script(lambda _: Script(endless=True)):
        seen = len(live.engine.generates)
        connection = live.raw({"messages": CHAT})
        data = json.dumps({"messages": CHAT}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
        connection.sendall(head + data)
        eventually(lambda: len(live.engine.generates) > seen, "the first runs")
        connection.close()
        eventually(lambda: not live.open, "it is aborted")
        assert len(live.engine.generates) == seen + 1


def test_pipelined_requests_are_answered_in_order_and_are_bounded(live: Live) -> None:
    one = b"GET /v1/models/%d HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.gateway.port), timeout=10) as connection:
        connection.sendall(b"".join(one % i for i in range(3)))
        answer = b""
        while answer.count(b"does not exist") < 3:
            answer += connection.recv(65536)
        assert [answer.find(b"'%d'" % i) for i in range(3)] == sorted(answer.find(b"'%d'" % i) for i in range(3))
    with socket.create_connection(("127.0.0.1", live.gateway.port), timeout=10) as connection:
        connection.sendall(b"".join(one % i for i in range(server.MAX_PIPELINED + 5)))
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass

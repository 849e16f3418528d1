"""What a bad request gets: OpenAI's envelope, the right status, the parameter named; nobody else harmed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from common.messages import ErrorInfo, Finish, Generate, Message
from gateway.protocols.numbers import MAX_BYTES
from tests.unit.gateway_live import CHAT, Live, Stream, eventually, live_gateway


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


CASES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": "1"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**30}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": 1}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", None]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [None]}, "stop_token_ids"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"priority": 1.5}, "priority"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"timeout": 0}, "timeout"),
    ({"stream": "true"}, "stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"prediction": {}}, "prediction"),
    ({"made_up": 1}, "made_up"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), CASES)
def test_bad_chat_field_is_400_and_named(live: Live, fields: dict[str, Any], param: str) -> None:
    seen = len(live.engine.generates)
    for stream in (False, True):
        response = live.chat(**{"stream": stream, **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
    assert len(live.engine.generates) == seen


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 128, "prompt": ["x"] * 9}, "n"),
        ({"messages": CHAT}, "messages"),
    ],
)
def test_bad_completion_field_is_400_and_named(live: Live, fields: dict[str, Any], param: str) -> None:
    response = live.complete(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}],}',
        b'{"temperature": NaN,}',
        b'{"\\ud800": NaN}',
        b"NaN",
        b'{"temperature": NaN, "padding": "' + b" " * MAX_BYTES + b'"}',
        b'{"a":' * 10_000 + b"NaN" + b"}" * 10_000,
        b"[" * 100_000,
    ],
)
def test_body_that_is_no_json_object_is_400(live: Live, body: bytes) -> None:
    response = live.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": %s, "top_p": NaN}', "temperature"),
        ('{"seed": 10, "messages": [{"role": "user"}, {"content": [1, %s]}]}', "messages[1].content[1]"),
        ('{"logit_bias": {"7": %s}}', "logit_bias.7"),
    ],
)
def test_a_number_that_is_none_is_400_and_its_field_named(live: Live, number: str, body: str, param: str) -> None:
    response = live.client.post("/v1/chat/completions", content=body % number)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert f"'{param}' must be a finite number" in error["message"]


def test_missing_field_is_named(live: Live) -> None:
    error = live.post("/v1/chat/completions", {}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/nothing"])
def test_unknown_endpoint_is_404_in_the_envelope(live: Live, path: str) -> None:
    response = live.post(path, {})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_wrong_method_is_405_in_the_envelope(live: Live) -> None:
    response = live.client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "error" in response.json()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_far_more_than_the_limit_reads_the_refusal(chunked: bool) -> None:
    with live_gateway(max_request_bytes=8 << 20) as pair:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * (24 << 20)}]}).encode()
        with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=10) as connection:
            length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
            if chunked:
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n"
            connection.sendall(head.encode() + body)  # all of it, before anything is read
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_without_end_ends_with_its_connection() -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with (
        live_gateway(max_request_bytes=1 << 20) as pair,
        socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=10) as connection,
    ):
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(2000):  # 125 MiB, more than sockets hold
                connection.sendall(chunk)


def test_body_above_the_limit_is_413() -> None:
    with live_gateway(max_request_bytes=2000) as pair:
        assert pair.chat(messages=[{"role": "user", "content": "x" * 3000}]).status_code == 413

        def chunks() -> Iterator[bytes]:
            yield from [b" " * 500] * 6

        assert pair.client.post("/v1/chat/completions", content=chunks()).status_code == 413
        assert pair.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_tokenizer_keeps_its_status(live: Live, stream: bool) -> None:
    error = ErrorInfo(status=400, message="too long: 9 > 8", code="context_length_exceeded", param="messages")
    with live.script(lambda _: Script(rejected=error)):
        response = live.chat(stream=stream)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "too long: 9 > 8",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_scheduler_keeps_its_status(live: Live, stream: bool) -> None:
    full = Finish(reason="error", error=ErrorInfo(status=503, message="queue full", retry_after_s=2))
    with live.script(lambda _: Script(refused=full)):
        response = live.chat(stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/completions", {"prompt": "hi"}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/generate", {"text": "hi"}, "text"),
        ("/generate", {"input_ids": [1, 2]}, "input_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_engine_refuses_is_named_as_its_endpoint_names_it(
    live: Live, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    error = ErrorInfo(status=400, message="too long", code="context_length_exceeded", param="prompt")
    with live.script(lambda _: Script(refused=Finish(reason="error", error=error))):
        response = live.post(path, {**body, "stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_an_id_outside_the_vocabulary_is_named_as_its_endpoint_names_it(live: Live) -> None:
    assert live.post("/generate", {"input_ids": [1000]}).json()["error"]["param"] == "input_ids"


def test_one_bad_prompt_of_several_refuses_the_call_before_the_stream(live: Live) -> None:
    error = ErrorInfo(status=400, message="too long", param="prompt")
    with live.script(lambda generate: Script(rejected=error) if generate.rid.endswith("-1") else Script(endless=True)):
        response = live.complete(prompt=["a", "b"], stream=True)
    assert response.status_code == 400
    eventually(lambda: not live.open, "the other prompt is aborted")


def test_error_in_mid_stream_is_an_event_and_ends_it(live: Live) -> None:
    failure = Finish(reason="error", error=ErrorInfo(status=500, message="the worker refused it"))
    with live.script(lambda _: Script(finish=failure), auto=False):
        stream = Stream(live)
        live.engine.step()
        eventually(lambda: [record.num_ids for record in live.open.values()] == [1])
        live.engine.step(2)
        last = stream.chunks()[-1]
        assert last["error"]["message"] == "the worker refused it"
        assert last["error"]["type"] == "server_error"
    with live.script(lambda _: Script(finish=failure)):
        assert live.chat().status_code == 500


def test_abort_before_it_ran_is_503(live: Live) -> None:
    with live.script(lambda _: Script(refused=Finish(reason="abort", message="waited too long"))):
        response = live.chat()
    assert response.status_code == 503
    assert "waited too long" in response.text


def test_not_ready_is_503_with_retry_after() -> None:
    with live_gateway(engine_options={"ready": False}) as pair:
        for response in (pair.chat(), pair.client.get("/health"), pair.client.get("/health_generate")):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"


def test_draining_engine_is_503() -> None:
    with live_gateway() as pair:
        pair.engine.draining = True
        eventually(lambda: pair.client.get("/health").status_code == 503)
        assert pair.chat().json()["error"]["code"] == "draining"


def test_duplicate_rid_is_refused(live: Live) -> None:
    with live.script(lambda _: Script(endless=True)), live.client.stream(
        "POST", "/generate", json={"text": "a", "rid": "mine", "stream": True}
    ) as response:
        received = response.iter_raw()  # kept: the connection closes when it is collected
        next(received)
        refused = live.post("/generate", {"text": "a", "rid": "mine"})
        assert refused.status_code == 409
        assert refused.json()["error"]["param"] == "rid"
    eventually(lambda: not live.open)


def test_stream_options_need_a_stream(live: Live) -> None:
    response = live.chat(stream_options={"include_usage": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def test_full_tokenizer_channel_is_503_and_later_prompts_wait(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = live.gateway.gateway.engine._tokenizers[0]
    with monkeypatch.context() as patch:
        patch.setattr(sender, "send", lambda message: False)
        response = live.chat()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "overloaded"
        assert not live.open
        assert live.post("/tokenize", {"prompt": "x"}).status_code == 503
    send = sender.send
    taken: list[Message] = []

    def only_first(message: Message) -> bool:
        if isinstance(message, Generate) and len(taken) == 1:
            taken.append(message)
            return False  # the second of three does not fit just now
        taken.append(message)
        return send(message)

    monkeypatch.setattr(sender, "send", only_first)
    body = live.complete(prompt=["a", "b", "c"]).json()
    assert [choice["text"] for choice in body["choices"]] == ["Hello world"] * 3

"""The official openai client, sync and async, against a gateway with a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from bench.fake_engine import Script
from common.messages import ErrorInfo, Finish
from tests.unit.gateway_live import CHAT, Live, eventually, live_gateway

MODEL = "SmolLM2-135M-Instruct"
MESSAGES: Any = CHAT


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway(api_key=["secret"], engine_options={"tool_parser": "hermes"}) as pair:
        yield pair


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0, timeout=20) as one:
        yield one


def test_chat_whole_and_streamed_are_equal(client: Any) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, seed=1)
    assert whole.choices[0].message.content == "Hello world"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == 10
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_stream_helper_accumulates(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=CHAT, n=2, logprobs=True, top_logprobs=1) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello world"] * 2
    logprobs = final.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [item.token for item in logprobs.content] == ["Hel", "lo", " world"]


def test_completions(client: Any) -> None:
    whole = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1, echo=True)
    assert [choice.text[0] for choice in whole.choices] == ["a", "a", "b", "b"]
    assert whole.choices[0].logprobs is not None
    streamed = client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Hello world"


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own_classes(live: Live, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    full = ErrorInfo(status=503, message="full", retry_after_s=1)
    with live.script(lambda _: Script(rejected=full)), pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=CHAT)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_mid_stream_error_raises(live: Live, client: Any) -> None:
    failure = Finish(reason="error", error=ErrorInfo(status=500, message="broken row"))
    with live.script(lambda _: Script(pieces=("a",) * 50, finish=failure)):
        live.engine.auto = False
        seen = len(live.engine.generates)

        def drive() -> None:
            eventually(lambda: len(live.engine.generates) > seen)
            live.engine.step()
            eventually(lambda: all(record.num_ids for record in live.open.values()))
            live.engine.auto = True

        driver = threading.Thread(target=drive)
        driver.start()
        with pytest.raises(openai.APIError, match="broken row"):
            list(client.chat.completions.create(model=MODEL, messages=CHAT, stream=True))
        driver.join()


def test_closing_a_stream_aborts_it(live: Live, client: Any) -> None:
    with live.script(lambda _: Script(endless=True)):
        stream = client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
        next(iter(stream))
        stream.close()
        eventually(lambda: not live.open, "it is aborted")


def test_tools(live: Live, client: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    with live.script(lambda _: Script(pieces=tuple(text))):
        whole = client.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool])
        with client.chat.completions.stream(model=MODEL, messages=CHAT, tools=[tool]) as stream:
            final = stream.get_final_completion()
    for reply in (whole, final):
        assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = reply.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')


class Answer(BaseModel):
    value: int


def test_parse_sends_a_schema_and_reads_the_model_back(live: Live, client: Any) -> None:
    with live.script(lambda _: Script(pieces=('{"value"', ": 4}"))):
        reply = client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(value=4)
    grammar = live.engine.generates[-1].grammar
    assert grammar is not None and grammar.kind == "json_schema"


def test_async_client_runs_many_streams_at_once(live: Live) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0, timeout=30) as client:

            async def one() -> str:
                stream: Any = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[one() for _ in range(32)])

    assert asyncio.run(run()) == ["Hello world"] * 32

"""LangChain and instructor against a gateway with a fake engine. Skipped where they are not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from bench.fake_engine import Script
from tests.unit.gateway_live import Live, live_gateway

MODEL = "SmolLM2-135M-Instruct"
CALL = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway(engine_options={"tool_parser": "hermes"}) as pair:
        yield pair


def called(name: str, arguments: str) -> Script:
    return Script(pieces=tuple(CALL.replace("NAME", name).replace("ARGUMENTS", arguments)))


class User(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture
def chat_openai(live: Live) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(model=MODEL, base_url=f"{live.url}/v1", api_key="none", temperature=0, max_retries=0)


def test_langchain_invoke_and_stream(chat_openai: Any) -> None:
    reply = chat_openai.invoke([("system", "be brief"), ("human", "hi")])
    assert reply.content == "Hello world"
    assert reply.usage_metadata["total_tokens"] == 10
    assert "".join(chunk.content for chunk in chat_openai.stream("hi")) == "Hello world"


def test_langchain_async(chat_openai: Any) -> None:
    async def run() -> tuple[str, str]:
        reply = await chat_openai.ainvoke("hi")
        return reply.content, "".join([chunk.content async for chunk in chat_openai.astream("hi")])

    assert asyncio.run(run()) == ("Hello world", "Hello world")


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_tools(live: Live, chat_openai: Any, stream: bool) -> None:
    bound = chat_openai.bind_tools([User])
    with live.script(lambda _: called("User", '{"name": "Ann", "age": 3}')):
        if stream:
            pieces = list(bound.stream("hi"))
            reply = pieces[0]
            for piece in pieces[1:]:
                reply = reply + piece
        else:
            reply = bound.invoke("hi")
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("User", {"name": "Ann", "age": 3})]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structured_output(live: Live, chat_openai: Any, method: str) -> None:
    structured = chat_openai.with_structured_output(User, method=method)
    json_text = '{"name": "Ann", "age": 3}'
    script = called("User", json_text) if method == "function_calling" else Script(pieces=tuple(json_text))
    with live.script(lambda _: script):
        assert structured.invoke("hi") == User(name="Ann", age=3)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_instructor(live: Live, mode: str, asynchronous: bool) -> None:
    instructor = pytest.importorskip("instructor")
    json_text = '{"name": "Ann", "age": 3}'
    script = called("User", json_text) if mode == "TOOLS" else Script(pieces=tuple(json_text))
    kind = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    client = instructor.from_openai(
        kind(base_url=f"{live.url}/v1", api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )

    def create() -> Any:
        return client.chat.completions.create(
            model=MODEL, response_model=User, messages=[{"role": "user", "content": "Ann is 3"}], max_retries=0
        )

    async def run() -> Any:
        return await create()

    with live.script(lambda _: script):
        user = asyncio.run(run()) if asynchronous else create()
    assert user.model_dump() == {"name": "Ann", "age": 3}

"""The default model through the clients: answers that mean something, tools that get called, seeds that repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.integration.server import Server

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(900)]
MODEL = "SmolLM2-135M-Instruct"


class City(BaseModel):
    """A city."""

    name: str
    country: Literal["France", "Germany", "Japan"]


@tool
def weather(place: Literal["Paris", "Tokyo"]) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = Server(["--max-total-tokens", "16384"])
    try:
        yield one.wait_ready(600)
    finally:
        one.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def test_structured_answers_through_each_client(server: Server, client: Any) -> None:
    question = "Paris is the capital of France. Name the city and its country as JSON."
    messages: Any = [{"role": "user", "content": question}]
    arguments = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 60}
    parsed = client.chat.completions.parse(**arguments, response_format=City).choices[0].message.parsed
    assert parsed == City(name="Paris", country="France")
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert patched.chat.completions.create(**arguments, response_model=City, max_retries=0).country == "France"
    chat = ChatOpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key=SecretStr("none"), temperature=0, timeout=120)
    found: Any = chat.with_structured_output(City, method="json_schema").invoke(question)
    assert found.country == "France"


def test_a_tool_is_called_and_its_result_is_used(server: Server) -> None:
    chat = ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key=SecretStr("none"), temperature=0, timeout=120,
        max_completion_tokens=60,
    )  # fmt: skip
    messages: list[Any] = [("human", "What is the weather in Tokyo?")]
    call = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke(messages)
    assert [one["args"] for one in call.tool_calls] == [{"place": "Tokyo"}]
    messages += [call, weather.invoke(call.tool_calls[0])]
    answer = chat.bind_tools([weather], tool_choice="none").invoke(messages)
    assert "sunny" in str(answer.content).lower()


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(server: Server, client: Any) -> None:
    if "path cpu-fast" not in server.log:
        pytest.skip("this machine has no batch-invariant path for bfloat16")

    def ask(seed: int) -> str:
        messages: Any = [{"role": "user", "content": "Tell me about the sea."}]
        arguments = {"model": MODEL, "messages": messages, "max_tokens": 40, "temperature": 1, "seed": seed}
        reply = client.chat.completions.create(**arguments, logprobs=True)
        return json.dumps(reply.choices[0].to_dict(), sort_keys=True)

    alone = [ask(seed) for seed in range(3)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12)))[:3] == alone

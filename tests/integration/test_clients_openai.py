"""The official openai client, sync and async, against a live server with a model that knows nothing.

A random model at temperature 1 says anything, so whatever has to be valid (schemas, tool calls) is
valid because the server made it so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.server import Server

pytestmark = pytest.mark.integration
MESSAGES: Any = [{"role": "user", "content": "Where is the station?"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 1, "seed": 5}
NO_END: dict[str, Any] = {"ignore_eos": True}
SPECIAL_END = 2
"""The id of <|im_end|>."""


class Colour(StrEnum):
    red = "red"
    blue = "blue"


class Item(BaseModel):
    name: str = Field(max_length=8)
    colour: Colour
    count: int = Field(ge=0, le=99)


class Order(BaseModel):
    """An order."""

    kind: Literal["order", "offer"]
    items: list[Item] = Field(max_length=2)
    paid: bool
    note: str | None = Field(max_length=6)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "é", "🙂"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "multiply")
]


@pytest.fixture(scope="module")
def client(session_server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{session_server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


@pytest.fixture
def async_client(session_server: Server) -> Any:
    return openai.AsyncOpenAI(base_url=f"{session_server.url}/v1", api_key="none", max_retries=0, timeout=60)


def said(client: Any, extra: dict[str, Any] | None = None, **more: Any) -> str:
    """The text of one whole chat reply; ``extra`` are fields the client has no argument for."""
    reply = client.chat.completions.create(**{**CHAT, **more}, extra_body={**NO_END, **(extra or {})})
    return reply.choices[0].message.content  # type: ignore[no-any-return]


# ------------------------------------------------------------------ whole, streamed, sync, async


def test_chat_streamed_is_chat_whole_with_every_parameter_at_once(client: Any) -> None:
    arguments: dict[str, Any] = {
        **CHAT, "n": 3, "top_p": 0.95, "presence_penalty": 0.3, "frequency_penalty": 0.2, "stop": ["zzzz"],
        "logit_bias": {"9": -5}, "logprobs": True, "top_logprobs": 2, "user": "ann", "metadata": {"a": "b"},
        "extra_body": {
            **NO_END, "top_k": 200, "min_p": 0.001, "repetition_penalty": 1.05, "min_tokens": 3, "priority": 1,
            "stop_token_ids": [7], "include_stop_str_in_output": True, "skip_special_tokens": False,
            "cache_salt": "me", "add_generation_prompt": True, "chat_template_kwargs": {"x": 1},
        },
    }  # fmt: skip
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        streamed = [item for one in own if one.logprobs for item in one.logprobs.content]
        assert [item.bytes for item in streamed] == [item.bytes for item in choice.logprobs.content]
        np.testing.assert_allclose(
            [item.logprob for item in streamed], [item.logprob for item in choice.logprobs.content], atol=1e-4
        )
    assert len({choice.message.content for choice in whole.choices}) == 3


def test_async_streams_at_once_equal_the_whole_replies(client: Any, async_client: Any) -> None:
    async def one(seed: int) -> str:
        stream = await async_client.chat.completions.create(**{**CHAT, "seed": seed}, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with async_client:
            whole = await async_client.chat.completions.create(**{**CHAT, "seed": 0})
            texts = await asyncio.gather(*[one(seed) for seed in range(16)])
            return [whole.choices[0].message.content, *texts]

    first, *texts = asyncio.run(run())
    assert texts[0] == first
    assert texts[7] == client.chat.completions.create(**{**CHAT, "seed": 7}).choices[0].message.content


def test_completions_of_every_kind_of_prompt(client: Any) -> None:
    for prompt, num in (("ab", 1), (["ab", "to be"], 2), ([70, 71], 1), ([[70, 71], [72]], 2)):
        arguments: dict[str, Any] = {
            "model": "tiny", "prompt": prompt, "n": 2, "max_tokens": 6, "seed": 1, "logprobs": 1, "echo": True,
            "extra_body": NO_END,
        }  # fmt: skip
        whole = client.completions.create(**arguments)
        assert [choice.index for choice in whole.choices] == list(range(2 * num))
        texts = [""] * (2 * num)
        for chunk in client.completions.create(**arguments, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]
        assert whole.usage.completion_tokens == 12 * num


def test_the_stream_helper_and_continuous_usage(client: Any) -> None:
    with client.chat.completions.stream(**CHAT, stop=said(client)[10:12], extra_body=NO_END) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == said(client)[: len(final.choices[0].message.content)] != ""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options, extra_body=NO_END))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 24


def test_models_and_errors_are_the_clients_own_classes(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for call in (
        lambda: client.models.retrieve("other"),
        lambda: client.embeddings.create(model="tiny", input="x"),
        lambda: client.responses.create(model="tiny", input="x"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError) as bad:
        said(client, temperature=9)
    assert bad.value.param == "temperature"


# ------------------------------------------------------------------ each parameter does something


def test_filters_that_leave_one_token_are_greedy(client: Any) -> None:
    greedy = said(client, temperature=0)
    assert said(client) != greedy
    assert said(client, {"top_k": 1}) == greedy
    assert said(client, {"min_p": 1.0}) == greedy
    assert said(client, top_p=1e-6) == greedy


def test_a_seed_decides_and_choice_zero_has_the_seed_itself(client: Any) -> None:
    assert said(client) == said(client)
    assert said(client, seed=6) != said(client)
    several = client.chat.completions.create(**CHAT, n=3, extra_body=NO_END)
    again = client.chat.completions.create(**CHAT, n=3, extra_body=NO_END)
    texts = [choice.message.content for choice in several.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] == said(client) and len(set(texts)) == 3


def test_biases_and_penalties_steer_the_tokens(client: Any) -> None:
    arguments = {**CHAT, "temperature": 0, "logprobs": True, "max_tokens": 12}

    def tokens(extra: dict[str, Any] | None = None, **more: Any) -> list[str]:
        reply = client.chat.completions.create(**{**arguments, **more}, extra_body={**NO_END, **(extra or {})})
        return [item.token for item in reply.choices[0].logprobs.content]

    assert len(set(tokens(logit_bias={"70": 100}))) == 1
    (forced,) = set(tokens(logit_bias={"70": 100}))
    assert forced not in tokens(logit_bias={"70": -100})
    assert len(set(tokens(logit_bias={"70": 50, "71": 50}, frequency_penalty=2, temperature=1))) > 1
    among = {str(i): 99 for i in range(70, 90)}
    assert len(set(tokens({"repetition_penalty": 2.0}, logit_bias=among))) > len(set(tokens(logit_bias=among)))
    assert len(set(tokens(presence_penalty=2, logit_bias=among))) > len(set(tokens(logit_bias=among)))


def test_lengths_ends_and_stops(client: Any) -> None:
    def reply(extra: dict[str, Any] | None = None, **more: Any) -> Any:
        return client.chat.completions.create(**{**CHAT, **more}, extra_body=extra or {})

    ends = {"logit_bias": {str(SPECIAL_END): 100}, "temperature": 0}
    ended = reply(**ends)
    assert (ended.choices[0].finish_reason, ended.choices[0].message.content) == ("stop", "")
    at_least = reply({"min_tokens": 5}, **ends)
    assert at_least.choices[0].finish_reason == "stop" and at_least.usage.completion_tokens == 6
    ignored = reply({"ignore_eos": True, "skip_special_tokens": False}, **ends)
    assert ignored.choices[0].message.content == "<|im_end|>" * 24
    assert reply({"ignore_eos": True}, **ends).choices[0].message.content == ""
    assert reply(NO_END, max_tokens=openai.omit, max_completion_tokens=3).usage.completion_tokens == 3
    text = said(client)
    stop = text[6:8]
    cut = text[: text.index(stop)]
    assert said(client, stop=stop) == cut
    assert said(client, stop=["never", stop]) == cut
    assert said(client, {"include_stop_str_in_output": True}, stop=stop) == cut + stop
    assert reply({"stop_token_ids": [70]}, logit_bias={"70": 100}).choices[0].finish_reason == "stop"


def test_chat_logprobs_have_the_bytes_of_the_text(client: Any) -> None:
    reply = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, extra_body=NO_END)
    items = reply.choices[0].logprobs.content
    assert len(items) == 24 and all(len(item.top_logprobs) == 3 and item.logprob <= 0 for item in items)
    data = b"".join(bytes(item.bytes) for item in items)
    assert data.decode("utf-8", "replace") == reply.choices[0].message.content


def test_a_salt_keeps_caches_apart(client: Any) -> None:
    def cached(salt: str) -> int:
        arguments = {**CHAT, "messages": [{"role": "user", "content": "salt and pepper " * 8}], "max_tokens": 2}
        reply = client.chat.completions.create(**arguments, extra_body={"cache_salt": salt})
        return reply.usage.prompt_tokens_details.cached_tokens  # type: ignore[no-any-return]

    assert cached("first") == 0 and cached("first") > 0 and cached("second") == 0


def test_the_final_message_is_continued(client: Any) -> None:
    prefix = "It is over"
    messages = [*MESSAGES, {"role": "assistant", "content": prefix}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    text = said(client, extra, messages=messages)
    prompt = f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n{prefix}"
    arguments = {"model": "tiny", "max_tokens": 24, "temperature": 1, "seed": 5, "extra_body": NO_END}
    assert client.completions.create(prompt=prompt, **arguments).choices[0].text == text


# ------------------------------------------------------------------ structured output and tools


def test_parse_gives_pydantic_models_from_a_model_that_knows_nothing(client: Any) -> None:
    arguments = {**CHAT, "max_tokens": 200, "n": 4}
    reply = client.chat.completions.parse(**arguments, response_format=Order)
    assert all(isinstance(choice.message.parsed, Order) for choice in reply.choices)
    with client.chat.completions.stream(**arguments, response_format=Order) as stream:
        final = stream.get_final_completion()
    assert [one.message.parsed for one in final.choices] == [one.message.parsed for one in reply.choices]


def test_async_parse(async_client: Any) -> None:
    async def run() -> Any:
        async with async_client:
            return await async_client.chat.completions.parse(**{**CHAT, "max_tokens": 200}, response_format=Order)

    assert isinstance(asyncio.run(run()).choices[0].message.parsed, Order)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "multiply"}}])
def test_a_forced_tool_call_is_valid_whole_and_streamed(client: Any, choice: Any) -> None:
    arguments = {**CHAT, "max_tokens": 120, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**arguments)
    with client.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion()
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls
    (other,) = streamed.choices[0].message.tool_calls
    assert (other.function.name, other.function.arguments) == (call.function.name, call.function.arguments)
    values = json.loads(call.function.arguments)
    assert set(values) == {"a", "b"} and 0 <= values["a"] <= 9 and values["b"] in ("x", "é", "🙂")
    assert call.function.name == "multiply" or choice == "required"
    messages = [
        *MESSAGES, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "12"},
    ]  # fmt: skip
    after = client.chat.completions.create(**{**CHAT, "messages": messages, "tools": TOOLS, "tool_choice": "none"})
    assert after.choices[0].message.tool_calls is None

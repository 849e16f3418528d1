"""instructor against a live server with a model that knows nothing: valid at the first attempt, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.integration.server import Server

pytestmark = pytest.mark.integration


class Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a random model adds keys of its own, as the schema lets it


class Address(Exact):
    street: str = Field(max_length=8)
    number: int = Field(ge=1, le=99)


class User(Exact):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    role: Literal["admin", "guest"]
    addresses: list[Address] = Field(max_length=2)


REQUEST: dict[str, Any] = {
    "model": "tiny", "response_model": User, "messages": [{"role": "user", "content": "Ann is 3"}],
    "max_retries": 0, "max_tokens": 300, "temperature": 1, "seed": 1,
}  # fmt: skip


def patched(server: Server, kind: Any, mode: str) -> Any:
    client = kind(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_comes_back_sync_and_async(session_server: Server, mode: str) -> None:
    user = patched(session_server, openai.OpenAI, mode).chat.completions.create(**REQUEST)
    assert isinstance(user, User)

    async def run() -> Any:
        return await patched(session_server, openai.AsyncOpenAI, mode).chat.completions.create(**REQUEST)

    assert asyncio.run(run()).model_dump() == user.model_dump()


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_partial_models_grow_to_a_valid_one(session_server: Server, mode: str) -> None:
    client = patched(session_server, openai.OpenAI, mode)
    request = {key: value for key, value in REQUEST.items() if key not in ("max_retries",)}
    partials = list(client.chat.completions.create_partial(**request))
    assert len(partials) > 1
    assert User.model_validate(partials[-1].model_dump())


def test_the_raw_completion_comes_with_it(session_server: Server) -> None:
    client = patched(session_server, openai.OpenAI, "JSON_SCHEMA")
    request = {**REQUEST, "messages": [{"role": "user", "content": "Bo"}]}
    user, completion = client.chat.completions.create_with_completion(**request)
    assert completion.choices[0].finish_reason == "stop"
    assert User.model_validate_json(completion.choices[0].message.content).model_dump() == user.model_dump()

"""The default model, fetched and converted as for a new user, through the official client."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from openai import OpenAI

from tests.integration.server import Server

# The first run on a machine downloads, converts and compiles.
pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(900)]


def test_the_capital_of_france_streamed_and_whole(server: Callable[..., Server]) -> None:
    one = server("--dtype", "auto", model="", wait=False).wait_ready(600)
    client = OpenAI(base_url=one.url + "/v1", api_key="none", max_retries=0)
    question = {"role": "user", "content": "What is the capital of France?"}
    arguments = {"model": "SmolLM2-135M-Instruct", "messages": [question], "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**arguments)
    assert "Paris" in whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    command = next(line.strip() for line in one.log.splitlines() if line.strip().startswith("curl "))
    assert one.url in command

"""A plain client of the API for tests with real processes: whole, streamed, and what was assembled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass
class Assembled:
    """What a client has when its stream is over. Equal when every byte, ending and count is."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    """Without the number of cached tokens, which is a matter of speed."""


def completion_body(prompt: str, **more: Any) -> dict[str, Any]:
    """A body for ``/v1/completions`` that runs to its last token unless ``more`` says otherwise."""
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 64, "ignore_eos": True, **more}


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    """One whole request."""
    return httpx.post(url + path, json=body, timeout=TIMEOUT_S)


def events(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream, checked for the form of server-sent events and the ``[DONE]`` at the end."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    done = False
    with httpx.stream("POST", url + path, json=body, timeout=TIMEOUT_S) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line or line.startswith(":"):
                continue
            assert line.startswith("data: ") and not done, line
            if line == "data: [DONE]":
                done = True
                continue
            yield json.loads(line[6:])
    assert done, "the stream ended without [DONE]"


def stream(
    url: str, body: dict[str, Any], path: str = "/v1/completions", on_event: Callable[[int], None] | None = None
) -> Assembled:
    """Read a stream to its end. ``on_event(n)`` is called after the n-th event, from 1."""
    out = Assembled()
    for number, event in enumerate(events(url, path, body), start=1):
        if "error" in event:
            raise AssertionError(f"the stream failed: {event}")
        for choice in event["choices"]:
            out.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            out.finish_reason = choice["finish_reason"] or out.finish_reason
        if usage := event.get("usage"):
            out.usage = {key: value for key, value in usage.items() if isinstance(value, int)}
        if on_event is not None:
            on_event(number)
    return out

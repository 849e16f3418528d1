"""``POST /v1/chat/completions``: the reply, whole and streamed, as OpenAI writes it.

A streamed chunk is a prefix and a suffix made once per choice around the JSON of the new text, so
that a token costs one string encoding.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from common.messages import TokenLogprob
from gateway.output import ChoiceOutput
from gateway.protocols.common import by_choice, usage, why
from gateway.request import Delta, Exchange
from gateway.tool_parsers.base import Event, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart, collect

DONE = b"data: [DONE]\n\n"


class ChatFormatter:
    """Writes one call's reply."""

    def __init__(
        self,
        call_id: str,
        model: str,
        exchange: Exchange,
        outputs: list[ChoiceOutput | None],
        *,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._exchange = exchange
        self._outputs = outputs
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._head = {"id": call_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        head = orjson.dumps(self._head)[:-1]
        self._prefixes = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (head, index)
            for index in range(len(exchange.records))
        ]
        null_usage = b',"usage":null' if include_usage else b""
        self._suffix = b'},"logprobs":null,"finish_reason":null}]' + null_usage + b"}\n\n"
        self._plain = not logprobs and not continuous_usage and not any(outputs)

    def opening(self) -> bytes:
        """The chunks that carry the role."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event(index, delta) for index in range(len(self._exchange.records)))

    def chunk(self, deltas: list[Delta]) -> bytes:
        """The deltas of a step."""
        pieces: list[bytes] = []
        for delta in deltas:
            if self._plain:
                if delta.text:
                    pieces += (self._prefixes[delta.choice], orjson.dumps(delta.text), self._suffix)
            else:
                pieces += self._events(delta)
            if delta.finish is not None:
                pieces.append(self._event(delta.choice, {}, finish=self._reason(delta.choice)))
        return b"".join(pieces)

    def closing(self) -> bytes:
        """The usage, if asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        event = {**self._head, "choices": [], "usage": self._usage()}
        return b"data: " + orjson.dumps(event) + b"\n\n" + DONE

    def whole(self, deltas: list[Delta]) -> bytes:
        """The body of a reply that is not streamed."""
        choices = []
        for index, own in enumerate(by_choice(deltas, len(self._exchange.records))):
            logprobs = [item for delta in own for item in delta.logprobs]
            choices.append(
                {
                    "index": index,
                    "message": self._message(index, own),
                    "logprobs": chat_logprobs(logprobs) if self._logprobs else None,
                    "finish_reason": self._reason(index),
                    **why(self._exchange.records[index].finish),
                }
            )
        return orjson.dumps(
            {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        )

    def _usage(self) -> dict[str, Any]:
        reasoning = [output.reasoning_tokens for output in self._outputs if output and output.tells_reasoning]
        return usage(self._exchange, len(self._exchange.records), sum(reasoning) if reasoning else None)

    def _reason(self, index: int) -> str | None:
        """OpenAI's word for the ending; ``abort`` (an operator or a deadline) has none and stays as it is."""
        finish, output = self._exchange.records[index].finish, self._outputs[index]
        if finish is None:
            return None
        called = output is not None and output.num_calls > 0 and finish.reason == "stop"
        return "tool_calls" if called else finish.reason

    def _parse(self, delta: Delta) -> list[Event]:
        output = self._outputs[delta.choice]
        if output is None:
            return [TextDelta(delta.text)] if delta.text else []
        return output.feed(delta.text, delta.starts, last=delta.finish is not None)

    def _events(self, delta: Delta) -> list[bytes]:
        """The chunks of a delta; its log-probabilities go with the first."""
        bodies = [_stream_body(event) for event in self._parse(delta)]
        logprobs = chat_logprobs(delta.logprobs) if self._logprobs and delta.logprobs else None
        if logprobs is not None and not bodies:
            bodies = [{"content": ""}]
        return [
            self._event(delta.choice, body, logprobs=logprobs if position == 0 else None)
            for position, body in enumerate(bodies)
        ]

    def _message(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        events = [event for delta in deltas for event in self._parse(delta)]
        thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        content, calls = collect(events)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        if thought:
            message["reasoning_content"] = thought
        return message

    def _event(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            choice |= why(self._exchange.records[index].finish)
        event: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._continuous:
            event["usage"] = self._usage()
        elif self._include_usage:
            event["usage"] = None
        return b"data: " + orjson.dumps(event) + b"\n\n"


def _stream_body(event: Event) -> dict[str, Any]:
    """An event as the ``delta`` of a chunk."""
    match event:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_logprobs(items: list[TokenLogprob]) -> dict[str, Any]:
    """The chat form: each token with its bytes and the most likely others."""
    return {
        "content": [
            {
                "token": item.token,
                "logprob": json_logprob(item.logprob),
                "bytes": list(item.data),
                "top_logprobs": [
                    {"token": token, "logprob": json_logprob(logprob), "bytes": list(data)}
                    for token, data, logprob in item.top
                ],
            }
            for item in items
        ],
        "refusal": None,
    }


def json_logprob(value: float | None) -> float | None:
    """JSON has no infinity; OpenAI writes -9999.0 for a token that cannot be. None: there is no value."""
    return None if value is None else max(value, -9999.0)

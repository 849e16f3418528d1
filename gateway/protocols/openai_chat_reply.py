"""``POST /v1/chat/completions``: the reply, whole and streamed, as OpenAI writes it.

A streamed chunk is a prefix and a suffix made once per choice around the JSON of the new text, so
that a token costs one string encoding.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from common.messages import Finish, TokenLogprob
from gateway.protocols.common import by_choice, usage
from gateway.request import Delta, Exchange

DONE = b"data: [DONE]\n\n"


class ChatFormatter:
    """Writes one call's reply."""

    def __init__(
        self,
        call_id: str,
        model: str,
        exchange: Exchange,
        *,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._exchange = exchange
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
        self._plain = not logprobs and not continuous_usage

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
            elif delta.text or delta.logprobs:
                logprobs = chat_logprobs(delta.logprobs) if self._logprobs else None
                pieces.append(self._event(delta.choice, {"content": delta.text}, logprobs=logprobs))
            if delta.finish is not None:
                pieces.append(self._event(delta.choice, {}, finish=_reason(delta.finish)))
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
            record = self._exchange.records[index]
            logprobs = [item for delta in own for item in delta.logprobs]
            choices.append(
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": "".join(delta.text for delta in own),
                        "refusal": None,
                    },
                    "logprobs": chat_logprobs(logprobs) if self._logprobs else None,
                    "finish_reason": _reason(record.finish),
                }
            )
        return orjson.dumps(
            {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        )

    def _usage(self) -> dict[str, Any]:
        return usage(self._exchange, len(self._exchange.records))

    def _event(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None
    ) -> bytes:
        event: dict[str, Any] = {
            **self._head,
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}],
        }
        if self._continuous:
            event["usage"] = self._usage()
        elif self._include_usage:
            event["usage"] = None
        return b"data: " + orjson.dumps(event) + b"\n\n"


def _reason(finish: Finish | None) -> str | None:
    return None if finish is None else finish.reason


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


def json_logprob(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999.0 for a token that cannot be."""
    return max(value, -9999.0)

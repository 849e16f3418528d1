"""``POST /generate``: the reply, whole and streamed, as SGLang writes it.

Every event of a stream repeats the text so far.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from common.messages import TokenLogprob, unpack_i32
from gateway.protocols.common import by_choice
from gateway.protocols.openai_chat_reply import DONE, json_logprob
from gateway.request import Delta, Exchange


@dataclass(frozen=True, slots=True)
class LogprobAsk:
    """What one prompt's reply says of log-probabilities."""

    wanted: bool = False
    start: int = -1
    """The first position of the prompt that has one; -1: the output alone has."""
    num_top: int = 0


class NativeFormatter:
    """Writes one call's reply."""

    def __init__(self, exchange: Exchange, asks: Sequence[LogprobAsk], *, several: bool, with_text: bool) -> None:
        """``asks``: one for each of the exchange's generations."""
        self._exchange = exchange
        self._asks = asks
        self._several = several
        self._with_text = with_text
        num = len(exchange.records)
        self._texts = [""] * num
        self._outputs: list[list[Any]] = [[] for _ in range(num)]
        self._tops: list[list[Any]] = [[] for _ in range(num)]
        self._inputs: list[list[Any]] = [[] for _ in range(num)]
        self._input_tops: list[list[Any]] = [[] for _ in range(num)]

    def opening(self) -> bytes:
        """Nothing: the first event carries text."""
        return b""

    def chunk(self, deltas: list[Delta]) -> bytes:
        """One event per choice that has something new."""
        pieces = []
        for index, own in enumerate(by_choice(deltas, len(self._exchange.records))):
            if own:
                self._take(index, own)
                pieces.append(b"data: " + orjson.dumps(self._state(index)) + b"\n\n")
        return b"".join(pieces)

    def closing(self) -> bytes:
        """The end mark."""
        return DONE

    def whole(self, deltas: list[Delta]) -> bytes:
        """One object, or a list for several prompts or choices."""
        for index, own in enumerate(by_choice(deltas, len(self._exchange.records))):
            self._take(index, own)
        states = [self._state(index) for index in range(len(self._exchange.records))]
        return orjson.dumps(states if self._several else states[0])

    def _take(self, index: int, deltas: list[Delta]) -> None:
        start = self._asks[index].start
        for delta in deltas:
            self._texts[index] += delta.text
            for item in delta.prompt_logprobs[start:] if start >= 0 else ():
                self._inputs[index].append(self._entry(item))
                self._input_tops[index].append(self._top(item))
            for item in delta.logprobs:
                self._outputs[index].append(self._entry(item))
                self._tops[index].append(self._top(item))

    def _entry(self, item: TokenLogprob) -> list[Any]:
        """(log-probability, id, text): SGLang's triple, its text null unless asked for."""
        return [json_logprob(item.logprob), item.token_id, item.token if self._with_text else None]

    def _top(self, item: TokenLogprob) -> list[list[Any]] | None:
        """The triples of the most likely tokens; None where none were asked for or there is no distribution."""
        ids = unpack_i32(item.top_ids).tolist()
        return [
            [json_logprob(logprob), token_id, token if self._with_text else None]
            for token_id, (token, _, logprob) in zip(ids, item.top, strict=True)
        ] or None

    def _state(self, index: int) -> dict[str, Any]:
        record = self._exchange.records[index]
        finish = record.finish
        reason: dict[str, Any] | None = None
        if finish is not None:
            reason = {"type": finish.reason}
            if finish.reason == "length":
                reason["length"] = record.completion_tokens
            elif finish.matched is not None:
                reason["matched"] = finish.matched
            if finish.message:
                reason["message"] = finish.message
        meta: dict[str, Any] = {
            "id": record.rid,
            "finish_reason": reason,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "e2e_latency": time.monotonic() - self._exchange.received,
        }
        ask = self._asks[index]
        if ask.wanted:
            meta["output_token_logprobs"] = self._outputs[index]
            meta["output_top_logprobs"] = self._tops[index]
            if ask.start >= 0:
                meta["input_token_logprobs"] = self._inputs[index]
                meta["input_top_logprobs"] = self._input_tops[index]
        state: dict[str, Any] = {
            "text": self._texts[index],
            "output_ids": [] if record.discard_output else unpack_i32(bytes(record.ids)).tolist(),
            "meta_info": meta,
        }
        if self._several:
            state["index"] = index
        return state

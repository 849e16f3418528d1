"""``POST /v1/completions``: the reply, whole and streamed, as OpenAI writes it."""

from __future__ import annotations

import codecs
import time
from typing import Any

import orjson

from common.messages import TokenLogprob, unpack_i32
from gateway.protocols.common import by_choice, usage, why
from gateway.protocols.openai_chat_reply import DONE, json_logprob
from gateway.request import Delta, Exchange


class CompletionFormatter:
    """Writes one call's reply. ``echo`` holds each prompt's text, or nothing when it is not asked for."""

    def __init__(
        self,
        call_id: str,
        model: str,
        exchange: Exchange,
        *,
        n: int,
        echo: list[str],
        logprobs: int | None,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._exchange = exchange
        self._n = n
        self._echo = echo
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._head = {"id": call_id, "object": "text_completion", "created": int(time.time()), "model": model}
        num = len(exchange.records)
        self._tables = [LogprobTable(echo[i // n] if echo else "", logprobs or 0) for i in range(num)]
        self._echoed = [not echo] * num
        head = orjson.dumps(self._head)[:-1]
        self._prefixes = [b'data: %b,"choices":[{"index":%d,"text":' % (head, index) for index in range(num)]
        null_usage = b',"usage":null' if include_usage else b""
        self._suffix = b',"logprobs":null,"finish_reason":null}]' + null_usage + b"}\n\n"
        self._plain = logprobs is None and not continuous_usage and not echo

    def opening(self) -> bytes:
        """The echoed prompts that need no log-probabilities; nothing otherwise."""
        if not self._echo or self._logprobs is not None:
            return b""
        pieces = []
        for index in range(len(self._exchange.records)):
            self._echoed[index] = True
            pieces.append(self._event(index, self._echo[index // self._n], None, None))
        return b"".join(pieces)

    def chunk(self, deltas: list[Delta]) -> bytes:
        """The deltas of a step."""
        pieces: list[bytes] = []
        for delta in deltas:
            index, finish = delta.choice, delta.finish
            if self._plain and finish is None:
                if delta.text:
                    pieces += (self._prefixes[index], orjson.dumps(delta.text), self._suffix)
                continue
            text = delta.text
            if not self._echoed[index] and (delta.prompt_logprobs or finish is not None):
                self._echoed[index] = True
                text = self._echo[index // self._n] + text
            table = None
            if self._logprobs is not None:
                table = self._tables[index].take(delta)
            if text or delta.logprobs or finish is not None:
                pieces.append(self._event(index, text, table, None if finish is None else finish.reason))
        return b"".join(pieces)

    def closing(self) -> bytes:
        """The usage, if asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": self._usage()}) + b"\n\n" + DONE

    def whole(self, deltas: list[Delta]) -> bytes:
        """The body of a reply that is not streamed."""
        choices = []
        for index, own in enumerate(by_choice(deltas, len(self._exchange.records))):
            text = "".join(delta.text for delta in own)
            table = None
            if self._logprobs is not None:
                table = empty_table()
                for delta in own:
                    for key, values in self._tables[index].take(delta).items():
                        table[key] += values
            finish = self._exchange.records[index].finish
            choices.append(
                {
                    "index": index,
                    "text": (self._echo[index // self._n] if self._echo else "") + text,
                    "logprobs": table,
                    "finish_reason": None if finish is None else finish.reason,
                    **why(finish),
                }
            )
        return orjson.dumps({**self._head, "choices": choices, "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        return usage(self._exchange, self._n)

    def _event(self, index: int, text: str, logprobs: Any, finish: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            choice |= why(self._exchange.records[index].finish)
        event: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._continuous:
            event["usage"] = self._usage()
        elif self._include_usage:
            event["usage"] = None
        return b"data: " + orjson.dumps(event) + b"\n\n"


def empty_table() -> dict[str, list[Any]]:
    """The completions form of log-probabilities, without tokens."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class LogprobTable:
    """Log-probabilities of one choice in the completions form.

    ``text_offset`` is the number of characters of the reply's text before each token: a token that
    ends within a character begins where that character does, and one that the text does not show takes no
    room. For the output the detokenizer says so (``TextRow.starts``).
    """

    def __init__(self, prompt_text: str, num_top: int) -> None:
        self._prompt_text = prompt_text
        self._num_top = num_top

    def take(self, delta: Delta) -> dict[str, list[Any]]:
        """The table of a delta's tokens (of the prompt first, where they came with it)."""
        table = empty_table()
        if delta.prompt_logprobs:
            self._add_prompt(table, delta.prompt_logprobs)
        for item, start in zip(delta.logprobs, unpack_i32(delta.starts).tolist(), strict=True):
            self._add(table, item, len(self._prompt_text) + start)
        return table

    def _add_prompt(self, table: dict[str, list[Any]], items: list[TokenLogprob]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        known = [item for item in items if item.logprob is not None]
        num_chars = len(b"".join(item.data for item in known).decode("utf-8", "replace"))
        # The first token has no distribution, so its text is what the others leave of the prompt.
        offset = max(0, len(self._prompt_text) - num_chars)
        first = self._prompt_text[:offset]
        for item in items:
            if item.logprob is None:
                table["tokens"].append(first)
                table["token_logprobs"].append(None)
                table["top_logprobs"].append(None)
                table["text_offset"].append(0)
            else:
                self._add(table, item, offset)
                offset += len(decoder.decode(item.data))

    def _add(self, table: dict[str, list[Any]], item: TokenLogprob, offset: int) -> None:
        table["tokens"].append(item.token)
        table["token_logprobs"].append(json_logprob(item.logprob))
        top: dict[str, float | None] = {}
        for token, _, logprob in item.top:
            # Tokens that are parts of characters read alike: the likeliest of them is shown.
            top.setdefault(token, json_logprob(logprob))
        if self._num_top:
            top.setdefault(item.token, json_logprob(item.logprob))
        table["top_logprobs"].append(top or None)
        table["text_offset"].append(offset)

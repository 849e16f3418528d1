"""Which messages a process notes in its trace as it passes them on, and what it notes of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from common.messages import Generate, Message, TextBatch, Tokenized
from common.trace import Arrived, TextOut, TokenizedAt, TraceRecord, TraceWriter


class SendsMessages(Protocol):
    """The part of ``common.channels.Sender`` that is watched."""

    def send(self, message: Message) -> bool:
        """False, with nothing queued, when the channel is full."""
        ...

    def close(self) -> None:
        """Close the channel."""
        ...


class TracedSender:
    """A channel that records what ``describe`` says of each message it took."""

    def __init__(
        self, sender: SendsMessages, trace: TraceWriter, describe: Callable[[Message], TraceRecord | None]
    ) -> None:
        self._sender, self._trace, self._describe = sender, trace, describe

    def send(self, message: Message) -> bool:
        """As the channel does."""
        sent = self._sender.send(message)
        if sent and (record := self._describe(message)) is not None:
            self._trace.write(record)
        return sent

    def close(self) -> None:
        """As the channel does."""
        self._sender.close()


def traced(
    sender: SendsMessages, trace: TraceWriter | None, describe: Callable[[Message], TraceRecord | None]
) -> SendsMessages:
    """``sender`` itself when there is no trace."""
    return sender if trace is None else TracedSender(sender, trace, describe)


def describe_arrival(message: Generate, now: float) -> TraceRecord:
    """gateway: a request came in, or goes in again."""
    return Arrived(now, message.rid, message.attempt, str(message.prompt.__struct_config__.tag))


def describe_tokenized(message: Message) -> TraceRecord | None:
    """tokenizer -> scheduler."""
    if not isinstance(message, Tokenized):
        return None
    return TokenizedAt(time.time(), message.rid, message.attempt, len(message.input_ids) // 4)


def describe_text(message: Message) -> TraceRecord | None:
    """detokenizer -> gateway."""
    if not isinstance(message, TextBatch):
        return None
    return TextOut(time.time(), [(r.rid, r.index, len(r.ids) // 4, len(r.text)) for r in message.rows])

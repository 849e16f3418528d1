"""Scheduler, detokenizer and gateway: tokens and text on their way out."""

from __future__ import annotations

from typing import Literal

from common.messages.base import Message, Record
from common.messages.request import ErrorInfo, TextParams
from common.messages.worker import TopLogprobs

# --------------------------------------------------------------------------- scheduler -> detokenizer


class Finish(Record, frozen=True):
    """How a request ends."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    """The stop id or stop string that ended it."""
    error: ErrorInfo | None = None
    """With reason ``error``: what the client is told. Before acceptance it becomes the HTTP status."""
    message: str = ""
    """Words for the log and for clients that show them (why it was cut short)."""


class BeginOutput(Record, frozen=True):
    """The detokenizer starts (or, with a higher attempt, restarts) a request's text from index 0."""

    rid: str
    attempt: int
    gateway: str
    prompt_len: int
    cached_len: int
    text: TextParams
    logprobs: int | None = None
    prompt_ids: bytes = b""
    """Only with prompt logprobs (the pieces' text is needed for echo)."""


class TokenRow(Record, frozen=True):
    """New output ids of one request."""

    rid: str
    attempt: int
    index: int
    """Absolute output index of the first id."""
    ids: bytes
    """int32."""
    logprobs: bytes = b""
    """float32, one per id, where asked for."""
    top_logprobs: list[TopLogprobs] = []
    prompt_logprobs: bytes = b""
    """float32 [prompt_len - 1], once, with the first row of a request that asked."""
    prompt_top_logprobs: list[TopLogprobs] = []
    finish: Finish | None = None


class TokenBatch(Message, frozen=True, kw_only=True):
    """Everything new for the detokenizer after one scheduler step.

    Order within a message: begins, then rows. A refusal is a TokenRow with a finish and no
    BeginOutput before it (gateway named by ``refused``).
    """

    scheduler_generation: int
    step: int
    begins: list[BeginOutput] = []
    rows: list[TokenRow] = []
    refused: list[RefusedRow] = []
    gone_gateways: list[str] = []
    """Gateways whose lease ran out: drop their requests without an ending."""


class RefusedRow(Record, frozen=True):
    """A request that was never accepted (queue full, can never fit, duplicate rid, unknown to abort)."""

    rid: str
    attempt: int
    gateway: str
    finish: Finish


# --------------------------------------------------------------------------- detokenizer -> gateway


class TokenLogprob(Record, frozen=True):
    """One token of the output with its log-probability, ready for the protocol."""

    token: str
    data: bytes
    """The token's own bytes (it may be part of a character)."""
    logprob: float | None
    """None: the prompt's first token, which no distribution came before."""
    top: list[tuple[str, bytes, float]] = []
    """The most likely tokens there: (token, its bytes, log-probability)."""
    token_id: int = -1
    top_ids: bytes = b""
    """int32, one per entry of ``top``."""


class TextRow(Record, frozen=True):
    """What is new of one request for its gateway."""

    rid: str
    attempt: int
    index: int
    """Absolute output index of the first id of ``ids``."""
    ids: bytes
    """int32: ids whose text is complete within what was sent up to and including this row."""
    text_offset: int
    """Characters (code points) of output text before ``text``."""
    text: str
    accepted: tuple[int, int] | None = None
    """(prompt tokens, cached tokens): the request is running; headers may go out."""
    logprobs: list[TokenLogprob] = []
    """One per id, where asked for."""
    prompt_logprobs: list[TokenLogprob] = []
    """One per prompt token, once, where asked for; the first has no log-probability."""
    finish: Finish | None = None
    completion_tokens: int = 0
    """Output tokens up to and including this row; with ``finish`` the exact usage."""
    starts: bytes = b""
    """int32, one per id, where asked for: characters of the output's text before the first that is of the id."""


class TextBatch(Message, frozen=True, kw_only=True):
    """One message per scheduler step and gateway."""

    detokenizer_generation: int
    rows: list[TextRow]


# --------------------------------------------------------------------------- detokenizer -> scheduler


class StopHit(Message, frozen=True, kw_only=True):
    """A stop string was complete with output token ``index``; nothing beyond it counts."""

    rid: str
    attempt: int
    index: int
    stop: str


class GatewayStuck(Message, frozen=True, kw_only=True):
    """A gateway's channel has been full for too long; treat it as gone."""

    gateway: str

"""Gateway, tokenizer and scheduler: a request on its way in."""

from __future__ import annotations

from common.messages.base import GatewayName, Message
from common.messages.request import ErrorInfo, Grammar, Prompt, SamplingParams, TextParams

# --------------------------------------------------------------------------- gateway -> tokenizer


class Generate(Message, frozen=True, kw_only=True):
    """Submit (or, with attempt > 0, resubmit) one generation."""

    rid: str
    gateway: GatewayName
    attempt: int = 0
    group: str | None = None
    """Rids of one group have the same prompt (parallel samples) or came in one call."""
    prompt: Prompt
    sampling: SamplingParams
    text: TextParams
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    """time.time() after which the request is aborted."""
    received: float = 0.0
    """time.time() at which the gateway received the request (start of TTFT)."""
    output_ids: bytes = b""
    """On a resubmission: every output id delivered so far, int32."""


class Abort(Message, frozen=True, kw_only=True):
    """End a rid. gateway -> tokenizer -> scheduler, so that it stays behind its Generate.

    Repeated by the gateway until the ending arrives; idempotent.
    """

    rid: str
    gateway: GatewayName
    reason: str = "client disconnected"


class TokenizeText(Message, frozen=True, kw_only=True):
    """/tokenize: answered by ``TextReply`` with ids (int32) and, for chat prompts, the rendered text."""

    request_id: str
    gateway: GatewayName
    prompt: Prompt


class DetokenizeIds(Message, frozen=True, kw_only=True):
    """/detokenize: answered by ``TextReply`` with text."""

    request_id: str
    gateway: GatewayName
    ids: bytes


# --------------------------------------------------------------------------- tokenizer -> gateway


class Rejected(Message, frozen=True, kw_only=True):
    """A request refused without the engine: validation, template or grammar errors."""

    rid: str
    attempt: int
    error: ErrorInfo


class TextReply(Message, frozen=True, kw_only=True):
    """Answer to TokenizeText and DetokenizeIds."""

    request_id: str
    ids: bytes = b""
    text: str = ""
    error: ErrorInfo | None = None


class TokenizerReady(Message, frozen=True, kw_only=True):
    """tokenizer -> every local gateway and the scheduler, when it can serve.

    Also says what the tokenizer knows of the model, so a gateway needs no model files.
    """

    generation: int
    context_len: int
    vocab_size: int
    has_chat_template: bool
    default_sampling: dict[str, float] = {}
    """temperature, top_p, top_k, min_p, repetition_penalty from generation_config.json."""
    tool_parser: str = ""
    """``--tool-call-parser`` where it names one; empty: the gateway finds it from ``chat_template``."""
    reasoning_parser: str = ""
    """``--reasoning-parser``; empty: none."""
    chat_template: str = ""
    """The template's text (the one for tools, where there are several)."""
    reasoning_opens: bool = False
    """The generation prompt ends with an open ``<think>``: outputs begin inside the reasoning."""


# --------------------------------------------------------------------------- tokenizer -> scheduler


class Tokenized(Message, frozen=True, kw_only=True):
    """A validated request, as the scheduler sees it."""

    rid: str
    gateway: str
    attempt: int = 0
    group: str | None = None
    input_ids: bytes
    """int32, never empty."""
    sampling: SamplingParams
    """``max_tokens`` resolved."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end ids; empty when ``ignore_eos``."""
    text: TextParams
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    received: float = 0.0
    output_ids: bytes = b""

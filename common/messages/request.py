"""What a request asks for, and why one is refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine (scheduler and worker) needs to know about how to sample.

    The gateway validates ranges; the tokenizer resolves what depends on the model
    (``max_tokens``, ``stop_token_ids``, ids in ``logit_bias``).
    """

    max_tokens: int | None = None
    """Most tokens to generate. None only before the tokenizer resolved it to what fits."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches the filter off."""
    min_p: float = 0.0
    seed: int = 0
    """Always set: the gateway draws one when the client gave none, and keeps it for resubmission.
    0 <= seed < 2**63. The draw for output ``index`` is a function of (seed, index) alone."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request, the model's own end-of-sequence ids not included."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """None: no log-probabilities. k >= 0: that of the chosen token and of the k most likely."""
    prompt_logprobs: int | None = None
    """As ``logprobs``, for the prompt's tokens (completions with echo). Disables the prefix cache."""


class TextParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the detokenizer needs to know: how ids become text and where the text stops."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    starts: bool = False
    """Say of each id where in the text it begins (``TextRow.starts``)."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the output. Exactly one form per request."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag", "lark"]
    text: str
    """The schema (JSON text), expression, grammar, or a JSON list of choices."""
    lazy_trigger: str = ""
    """Not empty: the grammar binds only from the first occurrence of this text in the output on
    (tool_choice auto)."""


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """A plain text prompt (completions)."""

    text: str
    add_special_tokens: bool = True


class IdsPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="ids"):
    """Token ids as they are: int32 bytes."""

    ids: bytes


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="chat", omit_defaults=True):
    """Messages to be rendered by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


Prompt = TextPrompt | IdsPrompt | ChatPrompt


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error a client can act on; becomes OpenAI's error envelope."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    """The field at fault. The engine's ``prompt`` is whatever field the ids came from: the gateway names it."""
    retry_after_s: float | None = None

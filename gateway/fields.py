"""The generation parameters that every protocol shares: types, ranges, and the engine's form of them.

Strict throughout: no string becomes a number, NaN and infinities are refused, and a field that is
not listed is an error. ``null`` means *the default*. docs/api.md has the table; a test tries each row.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import ErrorDetails

from common.errors import RequestError
from common.messages import SamplingParams, TextParams, TokenizerReady

MAX_STOP = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 2048
MAX_CHOICES = 128
MAX_LOGPROBS = 20
LEAST_REPETITION_PENALTY = 0.01
"""Logits are divided by it: a value near zero makes them infinite."""
MAX_INT32 = 2**31 - 1
SEED_MASK = 2**63 - 1


def _stop(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be a string or a list of strings")
    if len(items) > MAX_STOP:
        raise ValueError(f"has {len(items)} strings; the limit is {MAX_STOP}")
    for item in items:
        if not 0 < len(item) <= MAX_STOP_CHARS:
            raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, this one has {len(item)}")
    return tuple(items)


def _stop_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_INT32 for item in value):
        raise ValueError("must be a list of token ids")
    if len(value) > MAX_STOP_IDS:
        raise ValueError(f"has {len(value)} ids; the limit is {MAX_STOP_IDS}")
    return tuple(value)


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; the limit is {MAX_LOGIT_BIAS}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"{key!r} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


StopField = Annotated[
    tuple[str, ...] | None,
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "maxItems": MAX_STOP,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                },
                {"type": "null"},
            ]
        }
    ),
]
StopIdsField = Annotated[
    tuple[int, ...] | None,
    PlainValidator(_stop_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "maxItems": MAX_STOP_IDS, "items": {"type": "integer", "minimum": 0}},
                {"type": "null"},
            ]
        }
    ),
]
LogitBiasField = Annotated[
    dict[int, float] | None,
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
                {"type": "null"},
            ]
        }
    ),
]


class Body(BaseModel):
    """Base of request bodies: strict types, unknown fields refused, no NaN or infinity."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Only false: chunks are not padded."""


class GenerationFields(Body):
    """Parameters shared by chat and completions. None is the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_INT32)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INT32)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: StopField = None
    stop_token_ids: StopIdsField = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=LEAST_REPETITION_PENALTY, le=2)
    logit_bias: LogitBiasField = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), le=MAX_INT32)
    cache_salt: str | None = Field(default=None, max_length=256)
    timeout: float | None = Field(default=None, gt=0, le=86400)
    """Seconds from now after which the request is aborted."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    guided_json: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    choice: list[str] | None = None
    structural_tag: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    user: str | None = Field(default=None, max_length=1024)
    """A label of the client's; used for nothing."""


UNSUPPORTED = {
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "audio": "this server writes text only",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "this server does not search",
    "reasoning_effort": "pass what the model's template knows in 'chat_template_kwargs'",
    "verbosity": "this server does not steer verbosity",
    "suffix": "insertion is not supported",
    "use_beam_search": "beam search is not supported",
    "best_of": "use 'n'",
}
"""Fields of other servers that a client may know, and what to do instead."""


def explain(errors: list[ErrorDetails]) -> RequestError:
    """The first of pydantic's errors as a 400 that names the parameter, the limit and the value."""
    error = errors[0]
    path = ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if error["type"] == "extra_forbidden":
        hint = UNSUPPORTED.get(path)
        words = f"'{path}' is not supported: {hint}" if hint else f"unknown parameter: '{path}'"
        return RequestError(words, param=path, code="unknown_parameter" if hint is None else "unsupported_parameter")
    if error["type"] == "missing":
        return RequestError(f"'{path}' is required", param=path, code="missing_required_parameter")
    words = error["msg"].removeprefix("Value error, ")
    value = repr(error["input"])
    shown = value if len(value) <= 80 else value[:77] + "..."
    return RequestError(f"'{path}': {words} (got {shown})", param=path, code="invalid_value")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice ``choice``: the client's own for the first, a hash of both for the others."""
    if choice == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed & SEED_MASK}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK


def draw_seed() -> int:
    """A fresh seed for a request that named none."""
    return secrets.randbits(63)


def sampling_params(
    fields: GenerationFields, model: TokenizerReady, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The engine's sampling parameters (seed 0; see ``choice_seed``), defaults of the model filled in.

    Raises:
        RequestError: a token id outside the vocabulary, min_tokens above max_tokens.
    """
    defaults = model.default_sampling
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"'min_tokens' ({min_tokens}) is above the most tokens to generate ({max_tokens})",
                           param="min_tokens", code="invalid_value")  # fmt: skip
    for param, ids in (("logit_bias", fields.logit_bias), ("stop_token_ids", fields.stop_token_ids)):
        for token_id in ids or ():
            check_id(token_id, model.vocab_size, param)

    def pick(name: str, fallback: float) -> float:
        value = getattr(fields, name)
        return float(defaults.get(name, fallback) if value is None else value)

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=pick("temperature", 1.0),
        top_p=pick("top_p", 1.0),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=pick("min_p", 0.0),
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=fields.stop_token_ids or (),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=pick("repetition_penalty", 1.0),
        logit_bias=fields.logit_bias or {},
        logprobs=logprobs,
    )


def check_id(token_id: int, vocab_size: int, param: str) -> None:
    """Raise RequestError unless the id is in the vocabulary (size 0: not known yet)."""
    if token_id < 0 or (vocab_size and token_id >= vocab_size):
        raise RequestError(
            f"'{param}': token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})",
            param=param,
            code="invalid_value",
        )


def text_params(fields: GenerationFields) -> TextParams:
    """What the detokenizer needs to know."""
    return TextParams(
        stop=fields.stop or (),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )

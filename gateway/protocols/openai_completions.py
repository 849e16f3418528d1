"""``POST /v1/completions``: the request."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import RequestError
from common.messages import IdsPrompt, Prompt, TextPrompt, TokenizerReady, pack_i32
from gateway import grammar
from gateway.fields import MAX_LOGPROBS, GenerationFields, check_id, sampling_params, text_params
from gateway.protocols.common import (
    Deps,
    Plan,
    check_model,
    check_stream_options,
    new_generate_id,
    parse,
    read_json,
    refuse_unless,
)
from gateway.protocols.openai_completions_reply import CompletionFormatter
from gateway.respond import EngineReply

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


def prompt_list(value: Any) -> list[str] | list[list[int]]:
    """A string, a list of strings, token ids or a list of token ids, as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, token ids, or a list of token ids")
    if not value:
        raise ValueError("is empty")
    prompts: list[Any] = [value] if type(value[0]) is int else value
    if all(isinstance(item, str) for item in prompts):
        if not all(prompts):
            raise ValueError("has an empty prompt")
        return prompts
    for item in prompts:
        if not isinstance(item, list) or not all(type(token) is int for token in item):
            raise ValueError("must be a string, a list of strings, token ids, or a list of token ids")
        if not item:
            raise ValueError("has an empty prompt")
    return prompts


PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}


class CompletionBody(GenerationFields):
    """What a client may send."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(prompt_list), WithJsonSchema(PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1)
    suffix: str | None = None
    add_special_tokens: bool | None = None


def engine_prompts(
    prompts: list[str] | list[list[int]], model: TokenizerReady, add_special_tokens: bool, param: str = "prompt"
) -> list[Prompt]:
    """Prompts in the engine's form. Raises RequestError for an id outside the vocabulary, naming ``param``."""
    result: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            result.append(TextPrompt(text=prompt, add_special_tokens=add_special_tokens))
        else:
            check_id(max(prompt), model.vocab_size, param)
            check_id(min(prompt), model.vocab_size, param)
            result.append(IdsPrompt(ids=pack_i32(prompt)))
    return result


async def completions(request: Request, deps: Deps) -> Response:
    """Continue a text."""
    body = parse(CompletionBody, await read_json(request, deps.config.http.max_request_bytes))
    model_name = check_model(deps, body.model)
    n = body.n or 1
    check_stream_options(body)
    refuse_unless(body.best_of, (n,), "best_of", "choices are not ranked; it must equal 'n'")
    refuse_unless(body.suffix, ("",), "suffix", "insertion is not supported")
    model = deps.engine.check_accepting()
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise RequestError(
            "'max_tokens': 0 generates nothing; it is only of use with 'echo' (got 0)",
            param="max_tokens",
            code="invalid_value",
        )
    sampling = sampling_params(body, model, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
    text = msgspec.structs.replace(text_params(body), starts=body.logprobs is not None)
    plan = Plan(
        call_id=new_generate_id("cmpl-"),
        prompts=engine_prompts(body.prompt, model, body.add_special_tokens is not False),
        n=n,
        seed=body.seed,
        sampling=sampling,
        text=text,
        grammar=grammar.translate(body),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        timeout_s=body.timeout,
    )
    exchange = plan.exchange(deps)
    options = body.stream_options
    formatter = CompletionFormatter(
        plan.call_id,
        model_name,
        exchange,
        n=n,
        echo=await _echo_texts(body.prompt, deps) if body.echo else [],
        logprobs=body.logprobs,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    return EngineReply(deps.engine, exchange, formatter, stream=bool(body.stream))


async def _echo_texts(prompts: list[str] | list[list[int]], deps: Deps) -> list[str]:
    """What echo shows of each prompt."""
    texts = []
    ask = deps.engine.questions
    for prompt in prompts:
        texts.append(prompt if isinstance(prompt, str) else (await ask.detokenize(pack_i32(prompt))).text)
    return texts

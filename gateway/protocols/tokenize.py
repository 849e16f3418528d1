"""``POST /tokenize`` and ``/detokenize``: what the tokenizer makes of a text, and back."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Request, Response
from pydantic import PlainValidator, WithJsonSchema

from common.errors import RequestError
from common.messages import ChatPrompt, Prompt, TextPrompt, pack_i32, unpack_i32
from gateway.fields import Body, check_id
from gateway.protocols.chat_messages import normalise
from gateway.protocols.common import Deps, check_model, parse, read_json
from gateway.protocols.tool_prompt import needs_spelling_out, spell_out
from gateway.tool_parsers.registry import FALLBACK

MAX_TEXTS = 256
MAX_IDS = 65_536
"""Ids of all lists of a call, or one context where that is longer: an id of two bytes may be a text of a hundred."""


def _texts(value: Any) -> list[str] | str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a string or a list of strings")
    if not 0 < len(value) <= MAX_TEXTS:
        raise ValueError(f"has {len(value)} strings; from 1 to {MAX_TEXTS} are taken")
    return value


def _ids(value: Any) -> list[int] | list[list[int]]:
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for row in rows:
        if not isinstance(row, list) or not all(type(item) is int for item in row):
            raise ValueError("must be a list of token ids, or a list of such lists")
    if len(rows) > MAX_TEXTS:
        raise ValueError(f"has {len(rows)} lists; the limit is {MAX_TEXTS}")
    return value  # type: ignore[no-any-return]


_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_ID_LISTS = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class TokenizeBody(Body):
    """A text, or a chat to be rendered first."""

    model: str | None = None
    prompt: Annotated[list[str] | str | None, PlainValidator(_texts), WithJsonSchema(_STRINGS)] = None
    messages: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[int] | list[list[int]], PlainValidator(_ids), WithJsonSchema(_ID_LISTS)]


async def tokenize(request: Request, deps: Deps) -> Response:
    """Ids of a text or chat: ``{"tokens", "count", "max_model_len"}``."""
    body = parse(TokenizeBody, await read_json(request, deps.config.http.max_request_bytes))
    check_model(deps, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either 'prompt' or 'messages'", param="prompt")
    model = deps.engine.check_accepting()
    prompts: list[Prompt]
    if body.prompt is None:
        if body.add_special_tokens is not None:
            words = "'add_special_tokens' is for 'prompt': a template adds its own"
            raise RequestError(words, param="add_special_tokens")
        messages, tools = normalise(body.messages), body.tools
        # As a chat would have it.
        as_text = bool(tools) and deps.tools.planner(model).plan(tools).parser_name == FALLBACK
        if needs_spelling_out(model.chat_template, messages, as_text):
            messages, tools = spell_out(messages, tools or ()), None
        prompts = [
            ChatPrompt(
                messages=messages,
                tools=tools,
                add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
                continue_final_message=bool(body.continue_final_message),
                template_kwargs=body.chat_template_kwargs or {},
            )
        ]
    else:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise RequestError(f"'{name}' is for 'messages'", param=name)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        prompts = [TextPrompt(text=text, add_special_tokens=body.add_special_tokens is not False) for text in texts]
    rows = [unpack_i32((await deps.engine.questions.tokenize(prompt)).ids).tolist() for prompt in prompts]
    several = isinstance(body.prompt, list)
    reply = {
        "tokens": rows if several else rows[0],
        "count": [len(row) for row in rows] if several else len(rows[0]),
        "max_model_len": model.context_len,
    }
    return Response(orjson.dumps(reply), media_type="application/json")


async def detokenize(request: Request, deps: Deps) -> Response:
    """Text of ids: ``{"text", "prompt"}``, the same under both names clients look for."""
    body = parse(DetokenizeBody, await read_json(request, deps.config.http.max_request_bytes))
    check_model(deps, body.model)
    model = deps.engine.check_accepting()
    several = bool(body.tokens) and isinstance(body.tokens[0], list)
    rows: list[Any] = list(body.tokens) if several else [body.tokens]
    total, limit = sum(map(len, rows)), max(MAX_IDS, model.context_len)
    if total > limit:
        raise RequestError(f"'tokens': has {total} ids; the limit of one call is {limit}", param="tokens")
    for row in rows:
        for token_id in row:
            check_id(token_id, model.vocab_size, "tokens")
    texts = [(await deps.engine.questions.detokenize(pack_i32(row))).text for row in rows]
    text = texts if several else texts[0]
    return Response(orjson.dumps({"text": text, "prompt": text}), media_type="application/json")

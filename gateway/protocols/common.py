"""What the protocols share: reading a body, the served names, making an exchange, usage."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from common.config import ServerConfig
from common.errors import RequestError
from common.messages import Finish, Generate, Grammar, Prompt, SamplingParams, TextParams
from gateway.edge import LINGER_FACTOR, drop_body, too_large
from gateway.engine import Engine
from gateway.fields import UNSUPPORTED, GenerationFields, choice_seed, draw_seed, explain
from gateway.output import ToolSupport
from gateway.protocols.numbers import find_unusable
from gateway.request import Delta, Exchange, OpenRequest

BODY_TIMEOUT_S = 60.0
MAX_GENERATIONS = 1024
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Deps:
    """What a protocol's handler works with."""

    engine: Engine
    config: ServerConfig
    started: float
    """time.time() at which the gateway started."""
    tools: ToolSupport

    @property
    def served(self) -> list[str]:
        """The names clients may use; the first is what replies say by default."""
        model = self.config.model
        return list(model.served_model_name) or [model.model or DEFAULT_MODEL_NAME]


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestError: 413 above ``limit`` bytes, 408 when it does not arrive in ``BODY_TIMEOUT_S``,
            400 when it is no JSON object (NaN, infinities and lone surrogates are no JSON), naming the field of a
            number that cannot be taken.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    await drop_body(request.receive, LINGER_FACTOR * limit)
                    raise RequestError(too_large(limit).message, status=413, code="request_too_large")
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError(f"the request body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if field := find_unusable(body):
            words = f"'{field}' must be a finite number that a 64-bit float holds (NaN and Infinity are no JSON)"
            raise RequestError(words, param=field, code="invalid_value") from None
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError(f"the request body must be a JSON object, not {type(data).__name__}", code="invalid_json")
    return data


def parse(kind: type[B], data: dict[str, Any]) -> B:
    """Validate a body. Raises RequestError naming the field at fault."""
    for name in UNSUPPORTED:
        # Clients that know a field often send it as null, which asks for nothing.
        if name in data and data[name] is None and name not in kind.model_fields:
            del data[name]
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise explain(error.errors(include_url=False)) from None


def check_model(deps: Deps, name: str | None) -> str:
    """The name to reply with. Raises RequestError 404 for a model that is not served."""
    served = deps.served
    if name is None:
        return served[0]
    if name not in served:
        raise RequestError(
            f"the model {name!r} does not exist here; served: {', '.join(served)}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return name


def refuse_unless(value: Any, allowed: tuple[Any, ...], param: str, why: str) -> None:
    """Raise RequestError (400) for a known field whose value asks for something we do not do."""
    if value is not None and not any(value == item and type(value) is type(item) for item in allowed):
        words = " or ".join(str(orjson.dumps(item), "utf-8") for item in allowed)
        raise RequestError(f"'{param}' can only be {words}: {why}", param=param, code="unsupported_value")


def check_stream_options(fields: GenerationFields) -> None:
    """Raise RequestError unless the stream options make sense."""
    options = fields.stream_options
    if options is None:
        return
    if not fields.stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options")
    refuse_unless(options.include_obfuscation, (False,), "stream_options.include_obfuscation", "chunks are not padded")


@dataclass(frozen=True, slots=True)
class PromptParams:
    """What one prompt of a call has to itself, where each has its own."""

    sampling: SamplingParams
    text: TextParams
    grammar: Grammar | None
    seed: int | None
    discard_output: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One call's generations: every prompt ``n`` times."""

    call_id: str
    prompts: Sequence[Prompt]
    n: int
    seed: int | None
    sampling: SamplingParams
    text: TextParams
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    discard_output: bool = False
    rids: Sequence[str] = ()
    """The client's own names of the generations, one per prompt; empty: made from ``call_id``."""
    own_params: Sequence[PromptParams] = ()
    """One per prompt, in place of the fields of the same names; empty: all have the same."""
    prompt_param: str = "prompt"
    """The field that the prompts came in."""

    def exchange(self, deps: Deps) -> Exchange:
        """One OpenRequest per prompt and choice; choice index = prompt index * n + choice of the prompt.

        Raises:
            RequestError: more than ``MAX_GENERATIONS``.
        """
        total = len(self.prompts) * self.n
        if total > MAX_GENERATIONS:
            raise RequestError(
                f"{len(self.prompts)} prompts with n={self.n} are {total} generations; the limit is {MAX_GENERATIONS}",
                param="n",
            )
        engine, now = deps.engine, time.time()
        exchange = Exchange(time.monotonic(), deps.config.http.stream_buffer_bytes)
        exchange.prompt_param = self.prompt_param
        drawn = draw_seed()
        for index in range(total):
            prompt, choice = divmod(index, self.n)
            own: Plan | PromptParams = self.own_params[prompt] if self.own_params else self
            seed = drawn if own.seed is None else own.seed
            generate = Generate(
                rid=self.rids[index] if self.rids else self.call_id if total == 1 else f"{self.call_id}-{index}",
                gateway=engine.gateway,
                group=self.call_id if total > 1 else None,
                prompt=self.prompts[prompt],
                sampling=msgspec.structs.replace(own.sampling, seed=choice_seed(seed, choice)),
                text=own.text,
                grammar=own.grammar,
                priority=self.priority,
                cache_salt=self.cache_salt,
                deadline=None if self.timeout_s is None else now + self.timeout_s,
                received=now,
            )
            exchange.records.append(OpenRequest(generate, exchange, index, discard_output=own.discard_output))
        return exchange


def usage(exchange: Exchange, n: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object. A prompt counts once, however many choices it has."""
    prompts = exchange.records[::n]
    prompt_tokens = sum(record.prompt_tokens for record in prompts)
    completion_tokens = sum(record.completion_tokens for record in exchange.records)
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(record.cached_tokens for record in prompts)},
    }
    if reasoning_tokens is not None:
        result["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return result


def by_choice(deltas: list[Delta], num_choices: int) -> list[list[Delta]]:
    """The deltas of each choice, in order."""
    grouped: list[list[Delta]] = [[] for _ in range(num_choices)]
    for delta in deltas:
        grouped[delta.choice].append(delta)
    return grouped


def new_generate_id(prefix: str) -> str:
    """A fresh id that no other gateway draws: ``chatcmpl-`` and 32 hex digits."""
    return prefix + secrets.token_hex(16)


def why(finish: Finish | None) -> dict[str, str]:
    """``finish_message`` of a choice: why it was cut short, where the reason alone does not say (an extension)."""
    return {"finish_message": finish.message} if finish is not None and finish.message else {}

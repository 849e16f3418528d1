"""``POST /generate``: SGLang's native form.

``text`` or ``input_ids``, one or a list; ``sampling_params`` with SGLang's names, and what is asked of
log-probabilities, for all prompts or as a list with one for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import RequestError
from common.messages import Prompt, TokenizerReady
from gateway import grammar
from gateway.fields import (
    LEAST_REPETITION_PENALTY,
    MAX_CHOICES,
    MAX_INT32,
    MAX_LOGPROBS,
    Body,
    GenerationFields,
    LogitBiasField,
    StopField,
    StopIdsField,
    sampling_params,
    text_params,
)
from gateway.protocols.common import (
    Deps,
    Plan,
    PromptParams,
    new_generate_id,
    parse,
    read_json,
    refuse_unless,
)
from gateway.protocols.native_generate_reply import LogprobAsk, NativeFormatter
from gateway.protocols.openai_completions import PROMPT_SCHEMA, engine_prompts, prompt_list
from gateway.respond import EngineReply

DEFAULT_MAX_NEW_TOKENS = 128
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "modalities": (None,),
    "lora_path": (None,),
    "custom_logit_processor": (None,),
    "session_params": (None,),
    "token_ids_logprob": (None,),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "log_metrics": (None, True),
}
"""SGLang's own clients send what they do not use, too: values of fields not supported here that ask for nothing."""


_RID = r"^[\x21-\x7e]+$"
_RID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": _RID}


def _rid(value: Any) -> str | list[str] | None:
    for name in value if isinstance(value, list) else () if value is None else [value]:
        if not isinstance(name, str) or len(name) > 128 or not re.fullmatch(_RID, name) or name.endswith("\n"):
            raise ValueError("must be 1 to 128 visible ASCII characters, or a list of such names, one per prompt")
    return value  # type: ignore[no-any-return]


RidField = Annotated[
    str | list[str] | None,
    PlainValidator(_rid),
    WithJsonSchema({"anyOf": [_RID_SCHEMA, {"type": "array", "items": _RID_SCHEMA, "minItems": 1}, {"type": "null"}]}),
]


class NativeSampling(Body):
    """``sampling_params`` in SGLang's names; see ``fields.GenerationFields`` for the ranges."""

    max_new_tokens: int | None = Field(default=None, ge=0, le=MAX_INT32)
    min_new_tokens: int | None = Field(default=None, ge=0, le=MAX_INT32)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    sampling_seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: StopField = None
    stop_token_ids: StopIdsField = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=LEAST_REPETITION_PENALTY, le=2)
    logit_bias: LogitBiasField = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


def _or_a_list(schema: dict[str, Any]) -> None:
    one = next(form for form in schema["anyOf"] if "$ref" in form)
    schema["anyOf"] = [*schema["anyOf"], {"type": "array", "items": one, "minItems": 1}]


def _one_or_each(check: Callable[[Any], bool], words: str) -> PlainValidator:
    """A value for all prompts, or a list with one for each (which may be null)."""

    def validate(value: Any) -> Any:
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not check(one):
                raise ValueError(f"must be {words}, or a list of such, one per prompt")
        return value

    return PlainValidator(validate)


def _integers(least: int, most: int) -> tuple[PlainValidator, WithJsonSchema]:
    one = {"type": "integer", "minimum": least, "maximum": most}
    schema = {"anyOf": [one, {"type": "array", "items": {"anyOf": [one, {"type": "null"}]}}, {"type": "null"}]}
    check = _one_or_each(lambda one: type(one) is int and least <= one <= most, f"an integer from {least} to {most}")
    return check, WithJsonSchema(schema)


_BOOLEANS = {
    "anyOf": [
        {"type": "boolean"},
        {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
        {"type": "null"},
    ]
}


class GenerateBody(Body):
    """What a client may send."""

    text: Annotated[
        list[str] | list[list[int]] | None, PlainValidator(lambda value: _one_or_many(value, str)),
        WithJsonSchema({"anyOf": [*PROMPT_SCHEMA["anyOf"][:2], {"type": "null"}]}),
    ] = None  # fmt: skip
    input_ids: Annotated[
        list[str] | list[list[int]] | None, PlainValidator(lambda value: _one_or_many(value, list)),
        WithJsonSchema({"anyOf": [*PROMPT_SCHEMA["anyOf"][2:], {"type": "null"}]}),
    ] = None  # fmt: skip
    sampling_params: NativeSampling | None = Field(default=None, json_schema_extra=_or_a_list)
    """A list (one for each prompt) is taken apart before: see ``_samplings``."""
    rid: RidField = None
    stream: bool | None = None
    return_logprob: Annotated[
        Any, _one_or_each(lambda one: isinstance(one, bool), "true or false"), WithJsonSchema(_BOOLEANS)
    ] = None
    logprob_start_len: Annotated[Any, *_integers(-1, MAX_INT32)] = None
    top_logprobs_num: Annotated[Any, *_integers(0, MAX_LOGPROBS)] = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), le=MAX_INT32)


def _one_or_many(value: Any, kind: type) -> list[str] | list[list[int]] | None:
    if value is None:
        return None
    prompts = prompt_list(value)
    if not isinstance(prompts[0], kind):
        raise ValueError("must be text" if kind is str else "must be token ids")
    return prompts


async def generate(request: Request, deps: Deps) -> Response:
    """Generate, in SGLang's native form."""
    data = await read_json(request, deps.config.http.max_request_bytes)
    for name, values in ASKS_FOR_NOTHING.items():
        if name in data and any(data[name] == off and type(data[name]) is type(off) for off in values):
            del data[name]
    several_params = _samplings(data)
    body = parse(GenerateBody, data if several_params is None else {**data, "sampling_params": None})
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("send either 'text' or 'input_ids'", param="text")
    if isinstance(body.rid, str) and deps.engine.has_open(body.rid):  # of a list: seen when it is submitted
        # Also as the id of a call of several generations, which have rids of their own.
        raise RequestError(f"the rid {body.rid!r} is already in use", status=409, param="rid")
    model = deps.engine.check_accepting()
    prompts = body.text if body.text is not None else body.input_ids or []
    prompt_param = "text" if body.text is not None else "input_ids"
    raw = data.get(prompt_param)
    asks = _asks(body, len(prompts))
    natives = several_params or [body.sampling_params or NativeSampling()]
    if several_params is not None:
        _check_num("sampling_params", several_params, len(prompts))
    n = natives[0].n or 1
    if any((native.n or 1) != n for native in natives):
        raise RequestError("'n' must be the same in all of 'sampling_params'", param="sampling_params")
    same = several_params is None and len(set(asks)) == 1
    if same:
        own = [_prompt_params(natives[0], asks[0], model)]
    else:
        own = [_prompt_params(natives[i % len(natives)], ask, model) for i, ask in enumerate(asks)]
    several = several_params is not None or n > 1 or (isinstance(raw, list) and isinstance(raw[0], (list, str)))
    engine_form: list[Prompt] = engine_prompts(prompts, model, True, prompt_param)
    plan = Plan(
        call_id=body.rid if isinstance(body.rid, str) else new_generate_id("gen-"),
        rids=_rids(body.rid, len(prompts), n) if isinstance(body.rid, list) else (),
        prompts=engine_form,
        n=n,
        seed=own[0].seed,
        sampling=own[0].sampling,
        text=own[0].text,
        grammar=own[0].grammar,
        own_params=() if same else own,
        priority=body.priority or 0,
        discard_output=own[0].discard_output,
        prompt_param=prompt_param,
    )
    exchange = plan.exchange(deps)
    formatter = NativeFormatter(
        exchange,
        [ask for ask in asks for _ in range(n)],
        several=several,
        with_text=bool(body.return_text_in_logprobs),
    )
    return EngineReply(deps.engine, exchange, formatter, stream=bool(body.stream))


def _asks(body: GenerateBody, num_prompts: int) -> list[LogprobAsk]:
    """What each prompt asks of log-probabilities. Raises RequestError for lists of another length, and for
    details of log-probabilities that are not asked for."""
    columns = []
    for name, off in (("return_logprob", False), ("logprob_start_len", -1), ("top_logprobs_num", 0)):
        given = getattr(body, name)
        if isinstance(given, list):
            _check_num(name, given, num_prompts)
        each = given if isinstance(given, list) else [given] * num_prompts
        columns.append([off if one is None else one for one in each])
    asks = [LogprobAsk(*each) for each in zip(*columns, strict=True)]
    for name, attribute, off in (("logprob_start_len", "start", -1), ("top_logprobs_num", "num_top", 0)):
        in_vain = [ask for ask in asks if not ask.wanted and getattr(ask, attribute) != off]
        if in_vain and (isinstance(getattr(body, name), list) or len(in_vain) == len(asks)):
            raise RequestError(f"'{name}' needs 'return_logprob': true", param=name)
    return [ask if ask.wanted else LogprobAsk() for ask in asks]


def _check_num(name: str, each: list[Any], num_prompts: int) -> None:
    if len(each) != num_prompts:
        words = f"'{name}' is a list of {len(each)}, and there are {num_prompts} prompts: one for each"
        raise RequestError(words, param=name, code="invalid_value")


def _samplings(data: dict[str, Any]) -> list[NativeSampling] | None:
    """The list form of ``sampling_params``; None for the other. Raises RequestError naming the entry at fault."""
    many = data.get("sampling_params")
    if not isinstance(many, list):
        return None
    if not many:
        raise RequestError("'sampling_params' is an empty list", param="sampling_params", code="invalid_value")
    found = []
    for index, one in enumerate(many):
        try:
            found.append(parse(GenerateBody, {"sampling_params": one}).sampling_params or NativeSampling())
        except RequestError as error:
            info, name = error.info, f"sampling_params[{index}]"
            param = (info.param or "").replace("sampling_params", name, 1)
            words = info.message.replace("sampling_params", name, 1)
            raise RequestError(words, param=param, code=info.code) from None
    return found


def _prompt_params(native: NativeSampling, ask: LogprobAsk, model: TokenizerReady) -> PromptParams:
    """The engine's form. Raises RequestError for what the model does not allow."""
    spaces = "sampling_params.spaces_between_special_tokens"
    refuse_unless(native.spaces_between_special_tokens, (True,), spaces, "text is as decoded")
    fields = _fields(native)
    asked = DEFAULT_MAX_NEW_TOKENS if native.max_new_tokens is None else native.max_new_tokens
    sampling = sampling_params(fields, model, max_tokens=asked, logprobs=ask.num_top if ask.wanted else None)
    if ask.start >= 0:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=ask.num_top)
    unshown = asked == 0 and ask.start < 0
    if unshown:  # one token is run, so that the prompt is computed, and in the cache
        sampling = msgspec.structs.replace(sampling, max_tokens=1)
    constraint = grammar.translate(fields)
    return PromptParams(sampling, text_params(fields), constraint, native.sampling_seed, discard_output=unshown)


def _rids(rids: list[str], num_prompts: int, n: int) -> list[str]:
    if len(rids) != num_prompts or n != 1:
        words = f"'rid' names {len(rids)} generations, this call has {num_prompts} prompts with n={n}"
        raise RequestError(words, param="rid", code="invalid_value")
    if len(set(rids)) != len(rids):
        raise RequestError("'rid' has a name twice", param="rid", code="invalid_value")
    return rids


def _fields(native: NativeSampling) -> GenerationFields:
    """The same in the shared names."""
    values = native.model_dump(exclude_none=True)
    for ours, theirs in (
        ("min_tokens", "min_new_tokens"),
        ("include_stop_str_in_output", "no_stop_trim"),
        ("seed", "sampling_seed"),
    ):
        if theirs in values:
            values[ours] = values.pop(theirs)
    for name in ("max_new_tokens", "spaces_between_special_tokens"):
        values.pop(name, None)
    return GenerationFields.model_construct(**values)

"""``POST /generate``: SGLang's native form.

``text`` or ``input_ids``, one or a list; ``sampling_params`` with SGLang's names, for all prompts or as a
list with one for each. A streamed reply repeats the text so far in every event, as SGLang's does.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import Request, Response
from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import RequestError
from common.messages import Prompt, TokenizerReady, TokenLogprob, unpack_i32
from gateway import grammar
from gateway.fields import (
    LEAST_REPETITION_PENALTY,
    MAX_CHOICES,
    MAX_INT32,
    MAX_LOGPROBS,
    Body,
    GenerationFields,
    StopField,
    StopIdsField,
    sampling_params,
    text_params,
)
from gateway.protocols.common import (
    Deps,
    Plan,
    PromptParams,
    by_choice,
    new_generate_id,
    parse,
    read_json,
    refuse_unless,
)
from gateway.protocols.openai_chat_reply import DONE, json_logprob
from gateway.protocols.openai_completions import PROMPT_SCHEMA, engine_prompts, prompt_list
from gateway.request import Delta, Exchange
from gateway.respond import EngineReply

DEFAULT_MAX_NEW_TOKENS = 128


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

    max_new_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
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
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


def _or_a_list(schema: dict[str, Any]) -> None:
    one = next(form for form in schema["anyOf"] if "$ref" in form)
    schema["anyOf"] = [*schema["anyOf"], {"type": "array", "items": one, "minItems": 1}]


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
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(default=None, ge=-1, le=MAX_INT32)
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
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
    several_params = _samplings(data)
    body = parse(GenerateBody, data if several_params is None else {**data, "sampling_params": None})
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("send either 'text' or 'input_ids'", param="text")
    if not body.return_logprob:
        for name in ("top_logprobs_num", "logprob_start_len"):
            if getattr(body, name) is not None:
                raise RequestError(f"'{name}' needs 'return_logprob': true", param=name)
    if isinstance(body.rid, str) and deps.engine.has_open(body.rid):  # of a list: seen when it is submitted
        # Also as the id of a call of several generations, which have rids of their own.
        raise RequestError(f"the rid {body.rid!r} is already in use", status=409, param="rid")
    model = deps.engine.check_accepting()
    prompts = body.text if body.text is not None else body.input_ids or []
    raw = data.get("text") if body.text is not None else data.get("input_ids")
    natives = several_params or [body.sampling_params or NativeSampling()]
    if several_params is not None and len(natives) != len(prompts):
        words = f"'sampling_params' is a list of {len(natives)}, and there are {len(prompts)} prompts: one for each"
        raise RequestError(words, param="sampling_params", code="invalid_value")
    n = natives[0].n or 1
    if any((native.n or 1) != n for native in natives):
        raise RequestError("'n' must be the same in all of 'sampling_params'", param="sampling_params")
    own = [_prompt_params(native, body, model) for native in natives]
    several = several_params is not None or n > 1 or (isinstance(raw, list) and isinstance(raw[0], (list, str)))
    engine_form: list[Prompt] = engine_prompts(prompts, model, True)
    plan = Plan(
        call_id=body.rid if isinstance(body.rid, str) else new_generate_id("gen-"),
        rids=_rids(body.rid, len(prompts), n) if isinstance(body.rid, list) else (),
        prompts=engine_form,
        n=n,
        seed=own[0].seed,
        sampling=own[0].sampling,
        text=own[0].text,
        grammar=own[0].grammar,
        own_params=own if several_params is not None else (),
        priority=body.priority or 0,
    )
    exchange = plan.exchange(deps)
    formatter = NativeFormatter(
        exchange,
        several=several,
        logprobs=bool(body.return_logprob),
        start=_start(body),
        with_text=bool(body.return_text_in_logprobs),
    )
    return EngineReply(deps.engine, exchange, formatter, stream=bool(body.stream))


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


def _start(body: GenerateBody) -> int:
    """The first prompt position with a log-probability in the reply; -1: of the output alone."""
    return -1 if body.logprob_start_len is None else body.logprob_start_len


def _prompt_params(native: NativeSampling, body: GenerateBody, model: TokenizerReady) -> PromptParams:
    """The engine's form. Raises RequestError for what the model does not allow."""
    spaces = "sampling_params.spaces_between_special_tokens"
    refuse_unless(native.spaces_between_special_tokens, (True,), spaces, "text is as decoded")
    fields = _fields(native)
    num_top = body.top_logprobs_num or 0
    sampling = sampling_params(
        fields,
        model,
        max_tokens=native.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        logprobs=num_top if body.return_logprob else None,
    )
    if _start(body) >= 0:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=num_top)
    return PromptParams(sampling, text_params(fields), grammar.translate(fields), native.sampling_seed)


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


class NativeFormatter:
    """Writes one call's reply."""

    def __init__(
        self, exchange: Exchange, *, several: bool, logprobs: bool, start: int, with_text: bool
    ) -> None:
        self._exchange = exchange
        self._several = several
        self._logprobs = logprobs
        self._start = start
        self._with_text = with_text
        num = len(exchange.records)
        self._texts = [""] * num
        self._outputs: list[list[Any]] = [[] for _ in range(num)]
        self._tops: list[list[Any]] = [[] for _ in range(num)]
        self._inputs: list[list[Any]] = [[] for _ in range(num)]
        self._input_tops: list[list[Any]] = [[] for _ in range(num)]

    def opening(self) -> bytes:
        """Nothing: the first event carries text."""
        return b""

    def chunk(self, deltas: list[Delta]) -> bytes:
        """One event per choice that has something new."""
        pieces = []
        for index, own in enumerate(by_choice(deltas, len(self._exchange.records))):
            if own:
                self._take(index, own)
                pieces.append(b"data: " + orjson.dumps(self._state(index)) + b"\n\n")
        return b"".join(pieces)

    def closing(self) -> bytes:
        """The end mark."""
        return DONE

    def whole(self, deltas: list[Delta]) -> bytes:
        """One object, or a list for several prompts or choices."""
        for index, own in enumerate(by_choice(deltas, len(self._exchange.records))):
            self._take(index, own)
        states = [self._state(index) for index in range(len(self._exchange.records))]
        return orjson.dumps(states if self._several else states[0])

    def _take(self, index: int, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._texts[index] += delta.text
            for item in delta.prompt_logprobs[max(0, self._start) :] if self._start >= 0 else ():
                self._inputs[index].append(self._entry(item))
                self._input_tops[index].append(self._top(item))
            for item in delta.logprobs:
                self._outputs[index].append(self._entry(item))
                self._tops[index].append(self._top(item))

    def _entry(self, item: TokenLogprob) -> list[Any]:
        """(log-probability, id, text): SGLang's triple, its text null unless asked for."""
        return [json_logprob(item.logprob), item.token_id, item.token if self._with_text else None]

    def _top(self, item: TokenLogprob) -> list[list[Any]] | None:
        """The triples of the most likely tokens; None where none were asked for or there is no distribution."""
        ids = unpack_i32(item.top_ids).tolist()
        return [
            [json_logprob(logprob), token_id, token if self._with_text else None]
            for token_id, (token, _, logprob) in zip(ids, item.top, strict=True)
        ] or None

    def _state(self, index: int) -> dict[str, Any]:
        record = self._exchange.records[index]
        finish = record.finish
        reason: dict[str, Any] | None = None
        if finish is not None:
            reason = {"type": finish.reason}
            if finish.reason == "length":
                reason["length"] = record.completion_tokens
            elif finish.matched is not None:
                reason["matched"] = finish.matched
            if finish.message:
                reason["message"] = finish.message
        meta: dict[str, Any] = {
            "id": record.rid,
            "finish_reason": reason,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "e2e_latency": time.monotonic() - self._exchange.received,
        }
        if self._logprobs:
            meta["output_token_logprobs"] = self._outputs[index]
            meta["output_top_logprobs"] = self._tops[index]
            if self._start >= 0:
                meta["input_token_logprobs"] = self._inputs[index]
                meta["input_top_logprobs"] = self._input_tops[index]
        state: dict[str, Any] = {
            "text": self._texts[index],
            "output_ids": unpack_i32(bytes(record.ids)).tolist(),
            "meta_info": meta,
        }
        if self._several:
            state["index"] = index
        return state

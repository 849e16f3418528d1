"""``POST /v1/chat/completions``: the request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import Field, WithJsonSchema

from common.errors import RequestError
from common.messages import ChatPrompt, Grammar, TokenizerReady
from gateway import grammar
from gateway.fields import MAX_INT32, MAX_LOGPROBS, GenerationFields, sampling_params, text_params
from gateway.output import ChoiceOutput
from gateway.protocols.chat_messages import MESSAGE_SCHEMA, normalise
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
from gateway.protocols.openai_chat_reply import ChatFormatter
from gateway.protocols.tool_prompt import needs_spelling_out, spell_out
from gateway.reasoning.parser import ReasoningParser
from gateway.reasoning.registry import ReasoningFormat, create, format_of
from gateway.respond import EngineReply
from gateway.tool_parsers.grammar import ToolPlan
from gateway.tool_parsers.registry import FALLBACK


class ChatBody(GenerationFields):
    """What a client may send."""

    messages: Annotated[
        Any, WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA})
    ]
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


async def chat_completions(request: Request, deps: Deps) -> Response:
    """Generate the next message of a chat."""
    body = parse(ChatBody, await read_json(request, deps.config.http.max_request_bytes))
    model_name = check_model(deps, body.model)
    _check(body)
    messages = normalise(body.messages)
    model = deps.engine.check_accepting()
    if body.continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(
            f"'continue_final_message' needs an assistant message at the end, not {messages[-1]['role']!r}",
            param="continue_final_message",
        )
    reasoning = _reasoning(body, model)
    plan_tools = _plan_tools(body, deps, model, reasoning)
    sampling = sampling_params(
        body,
        model,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    tools = list(body.tools or ()) if plan_tools.tools else None
    if needs_spelling_out(model.chat_template, messages, tools is not None and plan_tools.parser_name == FALLBACK):
        messages, tools = spell_out(messages, tools or ()), None
    prompt = ChatPrompt(
        messages=messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
    )
    outputs = [_output(plan_tools, reasoning) for _ in range(body.n or 1)]
    text = text_params(body)
    if outputs[0] is not None and outputs[0].tells_reasoning:
        text = msgspec.structs.replace(text, starts=True)
    if plan_tools.needs_special_tokens or (reasoning is not None and reasoning.form.needs_special_tokens):
        text = msgspec.structs.replace(text, skip_special_tokens=False)
    plan = Plan(
        call_id=new_generate_id("chatcmpl-"),
        prompts=[prompt],
        n=body.n or 1,
        seed=body.seed,
        sampling=sampling,
        text=text,
        grammar=_grammar(body, plan_tools, reasoning),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        timeout_s=body.timeout,
        prompt_param="messages",
    )
    exchange = plan.exchange(deps)
    options = body.stream_options
    formatter = ChatFormatter(
        plan.call_id,
        model_name,
        exchange,
        outputs,
        logprobs=bool(body.logprobs),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    return EngineReply(deps.engine, exchange, formatter, stream=bool(body.stream))


def _check(body: ChatBody) -> None:
    check_stream_options(body)
    refuse_unless(body.store, (False,), "store", "replies are not kept")
    refuse_unless(body.service_tier, ("auto", "default"), "service_tier", "there is one tier; see 'priority'")
    if body.modalities is not None and body.modalities != ["text"]:
        raise RequestError("'modalities' can only be [\"text\"]", param="modalities", code="unsupported_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other", param="add_generation_prompt"
        )


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) differ; send one", param="max_tokens"
        )
    return old if new is None else new


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How this request's output tells reasoning from content."""

    name: str
    form: ReasoningFormat
    opens: bool
    template_kwargs: dict[str, Any]

    def parser(self) -> ReasoningParser:
        """A fresh parser for one choice."""
        return create(self.name, reasoning_opens=self.opens, template_kwargs=self.template_kwargs)

    @property
    def end(self) -> str:
        """The mark after which the answer comes; empty when the output does not begin with reasoning."""
        return self.form.closing if self.parser().in_reasoning else ""


def _reasoning(body: ChatBody, model: TokenizerReady) -> Reasoning | None:
    """None without ``--reasoning-parser``, and where the client's own text is continued."""
    name = model.reasoning_parser
    if not name or body.continue_final_message:
        return None
    opens = model.reasoning_opens and body.add_generation_prompt is not False
    return Reasoning(name, format_of(name), opens, body.chat_template_kwargs or {})


def _plan_tools(body: ChatBody, deps: Deps, model: TokenizerReady, reasoning: Reasoning | None) -> ToolPlan:
    if not body.tools and body.tool_choice in (None, "none", "auto"):
        return deps.tools.planner(model).without_tools()
    parallel = body.parallel_tool_calls is not False
    plan = deps.tools.planner(model).plan(
        body.tools, body.tool_choice, parallel, reasoning_end="" if reasoning is None else reasoning.end
    )
    return replace(plan, used_ids=_call_ids(body.messages))


def _call_ids(messages: list[dict[str, Any]]) -> frozenset[str]:
    """Ids of the calls in a conversation."""
    lists = [message.get("tool_calls") for message in messages]
    calls = [call for each in lists if isinstance(each, list) for call in each if isinstance(call, dict)]
    return frozenset(call["id"] for call in calls if isinstance(call.get("id"), str))


def _grammar(body: ChatBody, tools: ToolPlan, reasoning: Reasoning | None) -> Grammar | None:
    """The request's one constraint: its own (from the end of the reasoning on), or what the tools ask for."""
    own = grammar.translate(body)
    if own is not None and reasoning is not None and (end := reasoning.end):
        own = msgspec.structs.replace(own, lazy_trigger=end)
    if own is not None and tools.grammar is not None and not tools.grammar.lazy_trigger:
        raise RequestError(
            "'tool_choice' makes the model call a tool, so nothing else can constrain the output", param="tool_choice"
        )
    return tools.grammar if own is None else own


def _output(tools: ToolPlan, reasoning: Reasoning | None) -> ChoiceOutput | None:
    """The parsers of one choice; None when its text is content as it is."""
    parser = tools.new_parser()
    if parser is None and reasoning is None:
        return None
    return ChoiceOutput(None if reasoning is None else reasoning.parser(), parser)

"""Renders a chat with the model's own Jinja template.

The environment offers what transformers offers to templates (Hugging Face's "Chat templates"
documentation is the reference): a sandbox, trimmed blocks, ``break`` and ``continue``,
``raise_exception``, ``strftime_now``, ``tojson`` that keeps non-ASCII text and the order of keys, and
``{% generation %}`` blocks (which only matter for training, so their body is simply rendered).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, RequestError, raise_if_starved
from common.messages import ChatPrompt
from tokenizer_proc.control_tokens import ControlTokens, secret_text

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}``: the body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """The templates of one model. ``render`` is safe to call from several threads."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str], source: str = "") -> None:
        self.sources = templates
        self._special_tokens = special_tokens
        self._compiled: dict[str, jinja2.Template] = {}
        self._broken: dict[str, str] = {}
        self._continue_mark = secret_text()
        environment = _environment()
        for name, text in templates.items():
            try:
                self._compiled[name] = environment.from_string(text)
            except jinja2.TemplateError as error:
                words = f"the chat template ({source}) is not valid Jinja: {error}"
                if source == "--chat-template":
                    raise ConfigError(words) from None
                self._broken[name] = words

    @property
    def available(self) -> bool:
        """The model has a chat template that compiles."""
        return bool(self._compiled)

    def render(self, prompt: ChatPrompt, control: ControlTokens) -> tuple[str, bool]:
        """The prompt's text, and whether it holds marks of ``control`` (see there).

        Raises:
            RequestError: there is no template, it raised, or the prompt cannot be rendered (400).
        """
        if not prompt.messages:
            raise RequestError("'messages' is empty: send at least one message", param="messages")
        template = self._choose(prompt.tools is not None)
        for key in _RESERVED:
            if key in prompt.template_kwargs:
                raise RequestError(
                    f"chat_template_kwargs must not set '{key}': it has a field of its own",
                    param="chat_template_kwargs",
                )
        messages, marked_messages = control.guard(_plain_messages(prompt.messages), "messages")
        tools, marked_tools = control.guard(prompt.tools, "tools")
        kwargs, marked_kwargs = control.guard(prompt.template_kwargs, "chat_template_kwargs")
        if prompt.continue_final_message:
            self._mark_end(messages)

        def run(chat: list[dict[str, Any]]) -> str:
            return template.render(
                {
                    **self._special_tokens,
                    "documents": None,
                    **kwargs,
                    "messages": chat,
                    "tools": tools,
                    "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final_message,
                }
            )

        rendered = _render(run, messages)
        if prompt.continue_final_message:
            rendered = self._cut_at_end(rendered)
        return rendered, marked_messages or marked_tools or marked_kwargs

    def _choose(self, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources and self.sources:
            name = next(iter(self.sources))
        if name in self._broken:
            raise RequestError(self._broken[name], param="messages", code="invalid_chat_template")
        if name not in self._compiled:
            raise RequestError(
                "this model has no chat template: start the server with --chat-template (a file or inline Jinja), "
                "or use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self._compiled[name]

    def _mark_end(self, messages: list[dict[str, Any]]) -> None:
        last = messages[-1]
        if not isinstance(last.get("content"), str):
            raise RequestError(
                "continue_final_message needs text in the last message to continue", param="continue_final_message"
            )
        # The blank shows whether the template trims contents (see _cut_at_end).
        last["content"] = last["content"] + self._continue_mark + " "

    def _cut_at_end(self, rendered: str) -> str:
        at = rendered.rfind(self._continue_mark)
        if at < 0:
            raise RequestError(
                "continue_final_message: the chat template leaves out the last message's text",
                param="continue_final_message",
            )
        end = at + len(self._continue_mark)
        kept = rendered[:at]
        return kept if rendered[end : end + 1] == " " else kept.rstrip()


def _render(run: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """Render; a template that needs a tool call's arguments as text, not as an object, gets them so."""
    try:
        try:
            return run(messages)
        except TypeError:
            if not (as_text := _arguments_as_text(messages)):
                raise
            return run(as_text)
    except jinja2.TemplateError as error:
        words = error.message or type(error).__name__
    except RecursionError:
        words = "it recurses too deeply"
    except Exception as error:  # a template is a program: it may raise anything, and the client must hear of it
        raise_if_starved(error)
        words = f"{type(error).__name__}: {error}"
    raise RequestError(f"the chat template refused the messages: {words}", param="messages", code="chat_template_error")


def _plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them; the input is left as it is.

    Keys that are null are left out, text parts are joined to one string, reasoning is found under each
    of its usual names, and arguments of tool calls are objects.
    """
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{index}] is not an object", param="messages")
        copy = {key: value for key, value in message.items() if value is not None}
        copy["content"] = _joined(copy.get("content", ""), index)
        reasoning = next((copy[name] for name in _REASONING_NAMES if name in copy), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        if isinstance(calls := copy.get("tool_calls"), list):
            copy["tool_calls"] = [_with_arguments(call, json.loads, str) for call in calls]
        plain.append(copy)
    return plain


def _joined(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RequestError(
                    f"messages[{index}].content has a part of type {kind!r}: only text parts are supported",
                    param="messages",
                )
            texts.append(text)
        return "".join(texts)
    raise RequestError(f"messages[{index}].content must be a string or a list of text parts", param="messages")


def _with_arguments(call: Any, convert: Callable[[Any], Any], when: type) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), when):
        return call
    try:
        arguments = convert(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if when is str and not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of tool calls as JSON text; empty when there are none."""
    if not any("tool_calls" in message for message in messages):
        return []
    return [
        {**message, "tool_calls": [_with_arguments(call, _tojson, dict) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]

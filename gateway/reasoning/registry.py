"""The reasoning syntaxes that ``--reasoning-parser`` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.reasoning.parser import ReasoningParser


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"
    always_inside: bool = False
    """The family reasons in every answer, and may leave the opening mark out."""
    switch: str = "enable_thinking"
    """The argument of the chat template (``chat_template_kwargs``) that turns reasoning off."""
    switch_opens: bool = False
    """With the switch on, the template opens the block itself, although it does not by default."""
    needs_special_tokens: bool = False
    """The marks are special tokens: the request must be sent with skip_special_tokens=False."""


FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(always_inside=True, switch=""),
    "deepseek-v3": ReasoningFormat(switch="thinking", switch_opens=True),
    "qwen3": ReasoningFormat(),
    "qwen3-thinking": ReasoningFormat(always_inside=True, switch=""),
    "glm45": ReasoningFormat(),
    "kimi": ReasoningFormat(opening="◁think▷", closing="◁/think▷", switch=""),
    "kimi_k2": ReasoningFormat(switch="thinking"),
    "minimax": ReasoningFormat(always_inside=True, switch=""),
    "mistral": ReasoningFormat(opening="[THINK]", closing="[/THINK]", switch="", needs_special_tokens=True),
    "step3": ReasoningFormat(always_inside=True, switch=""),
}


def format_of(name: str) -> ReasoningFormat:
    """The format of a parser's name. Raises ``ValueError`` that lists the names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown reasoning parser {name!r}; known are {', '.join(FORMATS)}") from None


def create(
    name: str, *, reasoning_opens: bool = False, template_kwargs: Mapping[str, Any] | None = None
) -> ReasoningParser:
    """A parser for one choice of a response.

    ``reasoning_opens``: what ``TokenizerReady`` says of the model's template; ``template_kwargs``: the
    request's ``chat_template_kwargs``. Raises ``ValueError`` for an unknown name.
    """
    form = format_of(name)
    switched = (template_kwargs or {}).get(form.switch) if form.switch else None
    inside = form.always_inside or reasoning_opens
    if switched is not None:
        inside = bool(switched) and (inside or form.switch_opens)
    return ReasoningParser(form.opening, form.closing, starts_inside=inside)

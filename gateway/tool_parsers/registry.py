"""The parsers by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError
from common.tool_syntax import detect
from gateway.tool_parsers.base import ToolParser
from gateway.tool_parsers.envelope import HermesParser, Llama3JsonParser, MistralNamedParser, MistralParser
from gateway.tool_parsers.harmony import HarmonyParser
from gateway.tool_parsers.marked import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from gateway.tool_parsers.pythonic import PythonicParser
from gateway.tool_parsers.xml_like import Glm45Parser, Qwen3CoderParser

__all__ = ["ALIASES", "FALLBACK", "PARSERS", "create", "detect", "resolve_name"]

PARSERS: dict[str, type[ToolParser]] = {
    cls.name: cls
    for cls in (
        HermesParser, Qwen3CoderParser, Llama3JsonParser, PythonicParser, MistralParser, MistralNamedParser,
        DeepSeekV3Parser, DeepSeekV31Parser, Glm45Parser, HarmonyParser, KimiK2Parser,
    )
}

ALIASES = {
    "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "qwen3_xml": "qwen3_coder", "llama3_json": "llama3",
    "llama4_pythonic": "pythonic", "llama4": "pythonic", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "glm": "glm45", "glm46": "glm45", "gpt_oss": "gpt-oss", "openai": "gpt-oss", "harmony": "gpt-oss",
    "kimi": "kimi_k2",
}
"""SGLang's, vLLM's and older spellings."""

FALLBACK = "hermes"
"""The syntax used where the template knows none: the widest spread, and made of plain text."""

def resolve_name(name: str) -> str:
    """The canonical name of a ``--tool-call-parser`` value. Raises ConfigError for an unknown one."""
    canonical = ALIASES.get(name, name)
    if canonical not in PARSERS:
        known = ", ".join(sorted([*PARSERS, *ALIASES]))
        raise ConfigError(f"unknown --tool-call-parser {name!r}; known: {known}, auto")
    return canonical


def create(name: str, tools: Sequence[dict[str, Any]] = ()) -> ToolParser:
    """A fresh parser for one choice of a response. ``name``: canonical or an alias, not empty."""
    return PARSERS[resolve_name(name)](tools)

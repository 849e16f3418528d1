"""Names of the parsers, and which one a chat template (``TokenizerReady.chat_template``) asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError
from gateway.tool_parsers.base import ToolParser
from gateway.tool_parsers.envelope import HermesParser, Llama3JsonParser, MistralNamedParser, MistralParser
from gateway.tool_parsers.harmony import HarmonyParser
from gateway.tool_parsers.marked import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from gateway.tool_parsers.pythonic import PythonicParser
from gateway.tool_parsers.xml_like import Glm45Parser, Qwen3CoderParser

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

# The first line whose marks are all in the template decides; a template may contain several families' marks.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt-oss", ("<|channel|>", "<|start|>", "functions.")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>", "<tool_call>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(params_name1=",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters": dictionary of argument name and its value',)),
    ("llama3", ("<|start_header_id|>ipython",)),
)


def detect(chat_template: str) -> str:
    """Name of the parser for a chat template's text; empty when it shows no tool-call syntax we know."""
    return next((name for name, signs in _SIGNS if all(sign in chat_template for sign in signs)), "")


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

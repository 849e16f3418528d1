"""Which family's tool-call syntax a chat template teaches its model.

Here, and not beside the parsers, because the tokenizer process has the template and the gateway the
parsers: the name travels in ``TokenizerReady.tool_parser``.
"""

from __future__ import annotations

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

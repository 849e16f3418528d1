"""Tools for models whose chat template knows none: spelled out in the messages, as Hermes models do.

Such a template would leave the tools out in silence, and calls and results of earlier turns, too. So
the functions go into the system message with the syntax to call them, earlier calls become the text
that the model would have written, and results become text of the user's. The syntax is the one that
``gateway.tool_parsers`` falls back to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INSTRUCTIONS = (
    "You can call functions. These are the functions, one JSON object each:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write this and nothing after it:\n"
    '<tool_call>\n{{"name": "<function name>", "arguments": {{<arguments as JSON>}}}}\n</tool_call>\n'
    "The result comes back between <tool_response> and </tool_response>."
)


def spell_out(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with tools, calls and results as text. The input is left as it is."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    words = _INSTRUCTIONS.format(tools=lines)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{words}"}, *plain[1:]]
    return [{"role": "system", "content": words}, *plain]


def needs_spelling_out(chat_template: str, messages: list[dict[str, Any]], with_tools: bool) -> bool:
    """Whether the template, if there is one, would leave something about tools out."""
    if not chat_template or "tools" in chat_template or "tool_calls" in chat_template:
        return False
    return with_tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        '<tool_call>\n{"name": ' + json.dumps(call["function"]["name"], ensure_ascii=False)
        + ', "arguments": ' + call["function"]["arguments"] + "}\n</tool_call>"
        for call in calls
    ]  # fmt: skip
    content = "\n".join([*([message["content"]] if message["content"] else []), *texts])
    return {key: value for key, value in {**message, "content": content}.items() if key != "tool_calls"}

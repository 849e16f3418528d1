"""The messages of a chat, checked and brought into the form chat templates expect.

Roles system, developer, user, assistant and tool. ``developer`` is OpenAI's newer word for
``system``; templates of open models know only the latter (some drop other roles in silence), so
that is what they get. Content is a string or a list of text parts; other parts are refused.
"""

from __future__ import annotations

from typing import Any

import orjson

from common.errors import RequestError

MAX_MESSAGES = 16384

_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {
        "role", "content", "name", "tool_calls", "refusal", "audio", "function_call", "reasoning_content",
        "annotations",
    },
    "tool": {"role", "content", "tool_call_id", "name"},
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")

MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(_ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
}


def normalise(messages: Any) -> list[dict[str, Any]]:
    """Checked messages with only the keys that say something.

    Raises:
        RequestError: 400 naming the message and the key.
    """
    if not isinstance(messages, list):
        raise RequestError("'messages' must be a list", param="messages", code="invalid_type")
    if not messages:
        raise RequestError("'messages' is empty: send at least one message", param="messages", code="empty_array")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"'messages' has {len(messages)} messages; the limit is {MAX_MESSAGES}", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"'{path}' must be an object", param=path, code="invalid_type")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"'{path}.role' must be one of {', '.join(_ROLES)}, not {role!r}",
            param=f"{path}.role",
            code="invalid_value",
        )
    role = "system" if role == "developer" else role
    for key, value in message.items():
        if key not in _KEYS[role]:
            raise RequestError(f"unknown parameter: '{path}.{key}'", param=f"{path}.{key}", code="unknown_parameter")
        if key in ("audio", "function_call") and value is not None:
            raise RequestError(f"'{path}.{key}' is not supported", param=f"{path}.{key}", code="unsupported_parameter")
    checked: dict[str, Any] = {"role": role}
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if value is not None:
            checked[key] = _string(value, f"{path}.{key}")
    content = message.get("content")
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls is not None:
            checked["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
        if content is None and message.get("refusal") is not None:
            content = _string(message["refusal"], f"{path}.refusal")
        if content is None and not calls:
            raise RequestError(f"'{path}.content' is required unless there are tool_calls", param=f"{path}.content")
    elif content is None:
        raise RequestError(f"'{path}.content' is required", param=f"{path}.content", code="missing_required_parameter")
    if role == "tool" and "tool_call_id" not in checked:
        raise RequestError(f"'{path}.tool_call_id' is required", param=f"{path}.tool_call_id")
    checked["content"] = "" if content is None else _content(content, f"{path}.content")
    return checked


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{path}' must be a string or a list of text parts", param=path, code="invalid_type")
    texts = []
    for index, part in enumerate(content):
        here = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise RequestError(f"'{here}' must be an object", param=here, code="invalid_type")
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise RequestError(
                f"'{here}.type' is {kind!r}: this server takes text parts only",
                param=f"{here}.type",
                code="unsupported_content",
            )
        texts.append(_string(part.get(kind), f"{here}.{kind}"))
    return "".join(texts)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"'{path}' must be a list", param=path, code="invalid_type")
    checked = []
    for index, call in enumerate(calls):
        here = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise RequestError(f"'{here}' must be a call of a function", param=here, code="invalid_value")
        name = _string(function.get("name"), f"{here}.function.name")
        arguments = function.get("arguments", "{}")
        _string(arguments, f"{here}.function.arguments")
        try:
            orjson.loads(arguments or "{}")
        except ValueError:
            raise RequestError(
                f"'{here}.function.arguments' is not valid JSON", param=f"{here}.function.arguments"
            ) from None
        checked.append(
            {
                "id": _string(call.get("id", ""), f"{here}.id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments or "{}"},
            }
        )
    return checked


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"'{path}' must be a string", param=path, code="invalid_type")
    return value

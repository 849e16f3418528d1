"""Families that write a call as a JSON object with the function's name and its arguments.

Hermes / Qwen2.5 (model card of NousResearch/Hermes-2-Pro, template of Qwen2.5-Instruct):

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Llama 3.x JSON (Meta's prompt format for Llama 3.1 and 3.2), calls after one another or joined by ``;``:

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>

Mistral (mistral-common; both the list and the form of later models):

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]</s>
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}</s>
"""

from __future__ import annotations

import secrets
import string
from typing import ClassVar

from gateway.tool_parsers.machine import Reader, ReaderParser

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "function")


class EnvelopeParser(ReaderParser):
    """Reads ``{"name": ..., "arguments": {...}}``, whatever stands around it."""

    _must_be_known: ClassVar[bool] = False
    """The object alone is no sign of a call: the name must be a function's."""

    def _envelope(self) -> Reader[bool]:
        """Read an object within an attempt; True when it was a call (even one cut off)."""
        if not (yield from self._accept("{")):
            return False
        name: str | None = None
        early: str | None = None
        index: int | None = None
        while True:
            yield from self._skip_space()
            if name is None and early is None and (yield from self._accept("}")):
                return False
            key = yield from self._string()
            yield from self._skip_space()
            if key is None or not (yield from self._accept(":")):
                return index is not None
            yield from self._skip_space()
            if key in _NAMES and name is None:
                name = yield from self._string()
                if not name or (self._must_be_known and not self.knows(name)):
                    return False
            elif key in _ARGUMENTS and index is None and name is not None:
                index = self._emit_call(name)
                if not (yield from self._arguments(index)):
                    return True
            else:
                value = yield from self._value()
                if value is None:
                    return index is not None
                if key in _ARGUMENTS and early is None:
                    early = value
            yield from self._skip_space()
            if (yield from self._accept(",")):
                continue
            if not (yield from self._accept("}")) and index is None:
                return False
            break
        if index is None:
            if name is None or (self._must_be_known and early is None):
                return False
            self._emit_arguments(self._emit_call(name), early if early and early[0] == "{" else "{}")
        return True


class HermesParser(EnvelopeParser):
    """``<tool_call>{...}</tool_call>``: Hermes 2/3, Qwen2.5, Qwen3 and many others."""

    name = "hermes"

    def _read(self) -> Reader[None]:
        while mark := (yield from self._until(["<tool_call>"], self._emit_text)):
            self._begin_attempt(mark)
            yield from self._skip_space()
            if (yield from self._envelope()):
                yield from self._closing("</tool_call>")
            else:
                self._give_up()


class Llama3JsonParser(EnvelopeParser):
    """A bare JSON object at the beginning of a line, or after ``<|python_tag|>``.

    JSON that names no function of the request, or has no parameters, is content.
    """

    name = "llama3"
    needs_special_tokens = True
    _must_be_known = True

    def _read(self) -> Reader[None]:
        yield from self._skip_space()
        at_line_start = True
        while True:
            if at_line_start:
                mark = yield from self._accept("{", "<|python_tag|>")
                if mark and (yield from self._call(mark)):
                    if (yield from self._closing(";")):
                        yield from self._skip_space()
                    continue
            mark = yield from self._until(["\n", "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"], self._emit_text)
            if not mark:
                return
            at_line_start = mark == "\n"
            if mark == "\n":
                self._emit_text(mark)
            elif mark == "<|python_tag|>":
                yield from self._call(mark)

    def _call(self, mark: str) -> Reader[bool]:
        self._begin_attempt(mark)
        if mark == "{":
            self._at -= 1
        else:
            yield from self._skip_space()
        found = yield from self._envelope()
        if not found:
            self._give_up()
        return found


class MistralParser(EnvelopeParser):
    """``[TOOL_CALLS]`` and a list of objects, or name and arguments."""

    name = "mistral"
    needs_special_tokens = True

    @staticmethod
    def make_id() -> str:
        """Nine letters and digits: the only ids Mistral's templates take back."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _read(self) -> Reader[None]:
        while mark := (yield from self._until(["[TOOL_CALLS]", "</s>"], self._emit_text)):
            if mark == "</s>":
                continue
            self._begin_attempt(mark)
            yield from self._skip_space()
            found = (yield from self._list()) if (yield from self._accept("[")) else (yield from self._named())
            if not found:
                self._give_up()

    def _list(self) -> Reader[bool]:
        found = False
        while True:
            yield from self._skip_space()
            if not (yield from self._envelope()):
                return found
            found = True
            if (yield from self._closing(",", "]")) != ",":
                return True

    def _named(self) -> Reader[bool]:
        if (yield from self._peek()) == "{":
            return (yield from self._envelope())
        name = yield from self._name_until("[ARGS]", "[CALL_ID]", "{")
        if name is None or not name.strip() or any(char in name for char in " \n\"'<>"):
            return False
        if self._text.startswith("[CALL_ID]", self._at - len("[CALL_ID]")):
            # The id between the marks is not the client's: ours are unique over a conversation.
            if (yield from self._name_until("[ARGS]")) is None:
                return False
        elif self._text[self._at - 1] == "{":
            self._at -= 1
        yield from self._arguments(self._emit_call(name.strip()))
        return True


class MistralNamedParser(MistralParser):
    """Mistral's models of 2025 on, which write name and arguments; reads the list too."""

    name = "mistral_v11"

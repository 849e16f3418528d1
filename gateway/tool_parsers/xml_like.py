"""Families that write each argument between tags, as text without a type.

Qwen3-Coder (its chat template):

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

GLM-4.5 and 4.6 (their chat template):

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

The function's schema says what a value is: one that can only be a string is streamed as it comes,
any other is read to its end and is JSON where it is JSON of an allowed type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gateway.tool_parsers.json_scan import JsonScanner
from gateway.tool_parsers.machine import Reader, ReaderParser
from gateway.tool_parsers.schema_types import parameter_schemas, types_of, value_text

_NAME = re.compile(r"[\w.-]+")


class TaggedArgumentsParser(ReaderParser):
    """What the two syntaxes share: arguments written one by one into a JSON object."""

    def _argument(self, index: int, function: str, key: str, first: bool, ends: Sequence[str]) -> Reader[bool]:
        """Stream ``"key": value`` with its separator; the value ends at one of ``ends``. False when cut off."""
        described = self._functions.get(function)
        root = (described or {}).get("parameters") or {}
        types = types_of(parameter_schemas(described).get(key), root if isinstance(root, dict) else {})
        self._emit_arguments(index, ("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if types == {"string"}:
            self._emit_arguments(index, '"')
            found = yield from self._until(
                ends, lambda text: self._emit_arguments(index, json.dumps(text, ensure_ascii=False)[1:-1])
            )
            if found:
                self._emit_arguments(index, '"')
            return bool(found)
        raw = yield from self._typed_value(ends)
        if raw is None:
            return False
        self._emit_arguments(index, value_text(raw, types))
        return True

    def _typed_value(self, ends: Sequence[str]) -> Reader[str | None]:
        """Text up to one of ``ends``, but not one within a JSON string; None when cut off.

        Where no end stands outside of strings (a quote that is never closed), the first one counts after all.
        """
        pieces: list[str] = []
        scanner = JsonScanner()
        first = ""

        def take(text: str) -> None:
            pieces.append(text)
            scanner.feed(text)

        while end := (yield from self._until(ends, take)):
            if not scanner.in_string:
                self._attempt = None
                return "".join(pieces)
            if self._attempt is None:
                first, self._attempt = "".join(pieces), self._at  # from here on the text is kept, to go back to
            take(end)
        if self._attempt is None:
            return None
        self._at, self._attempt = self._attempt, None
        return first


class Qwen3CoderParser(TaggedArgumentsParser):
    """``<function=NAME>`` with ``<parameter=KEY>`` inside, within ``<tool_call>`` or bare."""

    name = "qwen3_coder"

    def _read(self) -> Reader[None]:
        while mark := (yield from self._until(["<tool_call>", "<function="], self._emit_text)):
            self._begin_attempt(mark)
            if mark == "<tool_call>":
                yield from self._skip_space()
                mark = yield from self._accept("<function=")
            name = (yield from self._name_until(">")) if mark else None
            if name is None or not _NAME.fullmatch(name.strip()):
                self._give_up()
                continue
            yield from self._parameters(name.strip())

    def _parameters(self, function: str) -> Reader[None]:
        index = self._emit_call(function)
        first = True
        while True:
            yield from self._skip_space()
            mark = yield from self._accept("<parameter=", "</function>", "</tool_call>")
            if mark != "<parameter=":
                break
            key = yield from self._name_until(">")
            if key is None:
                return
            yield from self._accept("\n")
            if not (yield from self._argument(index, function, key, first, ["\n</parameter>", "</parameter>"])):
                return
            first = False
        if not mark and (yield from self._peek()) == "":
            return  # cut off
        self._emit_arguments(index, "{}" if first else "}")
        if mark == "</function>":
            yield from self._closing("</tool_call>")


class Glm45Parser(TaggedArgumentsParser):
    """``<arg_key>`` and ``<arg_value>`` pairs after the function's name."""

    name = "glm45"

    def _read(self) -> Reader[None]:
        while mark := (yield from self._until(["<tool_call>"], self._emit_text)):
            self._begin_attempt(mark)
            yield from self._skip_space()
            name = yield from self._name_until("\n", "<arg_key>", "</tool_call>")
            if name is None or not _NAME.fullmatch(name.strip()):
                self._give_up()
                continue
            for end in ("<arg_key>", "</tool_call>"):
                if self._text.startswith(end, self._at - len(end)):
                    self._at -= len(end)
            yield from self._pairs(name.strip())

    def _pairs(self, function: str) -> Reader[None]:
        index = self._emit_call(function)
        first = True
        while True:
            yield from self._skip_space()
            if not (yield from self._accept("<arg_key>")):
                break
            key = yield from self._name_until("</arg_key>")
            yield from self._skip_space()
            if key is None or not (yield from self._accept("<arg_value>")):
                return
            if not (yield from self._argument(index, function, key.strip(), first, ["</arg_value>"])):
                return
            first = False
        if not (yield from self._accept("</tool_call>")) and (yield from self._peek()) == "":
            return  # cut off
        self._emit_arguments(index, "{}" if first else "}")

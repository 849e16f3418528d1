"""Families that wrap each call in special tokens.

DeepSeek V3 and R1-0528 (their chat template); V3.1 leaves out the word and the fence:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>...

Kimi K2 (its tool-call guidance); the id is the model's own and its template wants it back:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
    {"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from typing import ClassVar

from gateway.tool_parsers.machine import Reader, ReaderParser


class DeepSeekV3Parser(ReaderParser):
    """Both forms of DeepSeek's marks, told apart by what follows the separator."""

    name = "deepseek_v3"
    needs_special_tokens = True
    begin_section: ClassVar[str] = "<｜tool▁calls▁begin｜>"
    end_section: ClassVar[str] = "<｜tool▁calls▁end｜>"
    begin_call: ClassVar[str] = "<｜tool▁call▁begin｜>"
    end_call: ClassVar[str] = "<｜tool▁call▁end｜>"
    separator: ClassVar[str] = "<｜tool▁sep｜>"
    end_of_turn: ClassVar[str] = "<｜end▁of▁sentence｜>"

    def _read(self) -> Reader[None]:
        marks = [self.begin_section, self.begin_call, self.end_section, self.end_of_turn]
        while mark := (yield from self._until(marks, self._emit_text)):
            if mark == self.begin_section:
                self._begin_attempt(mark)
                yield from self._skip_space()
                mark = yield from self._accept(self.begin_call)
                if not mark:
                    self._give_up()
            if mark == self.begin_call:
                if self._attempt is None:
                    self._begin_attempt(mark)
                if not (yield from self._call()):
                    self._give_up()

    def _call(self) -> Reader[bool]:
        name = yield from self._name_until(self.separator)
        if name is None:
            return False
        name = name.strip()
        yield from self._skip_space()
        if name == "function" and (yield from self._peek()) != "{":
            line = yield from self._name_until("\n")
            name = (line or "").strip()
            yield from self._skip_space()
            if (yield from self._accept("```json", "```")):
                yield from self._skip_space()
        if not name or (yield from self._peek()) != "{":
            return False
        yield from self._arguments(self._emit_call(name))
        if (yield from self._closing("```", self.end_call)) == "```":
            yield from self._closing(self.end_call)
        return True


class DeepSeekV31Parser(DeepSeekV3Parser):
    """DeepSeek V3.1 and later; reads the older form too."""

    name = "deepseek_v31"


class KimiK2Parser(ReaderParser):
    """Kimi K2: ``functions.NAME:INDEX`` between special tokens."""

    name = "kimi_k2"
    needs_special_tokens = True

    def _read(self) -> Reader[None]:
        begin = "<|tool_calls_section_begin|>"
        marks = [begin, "<|tool_call_begin|>", "<|tool_calls_section_end|>", "<|im_end|>"]
        while mark := (yield from self._until(marks, self._emit_text)):
            if mark == begin:
                self._begin_attempt(mark)
                yield from self._skip_space()
                mark = yield from self._accept("<|tool_call_begin|>")
                if not mark:
                    self._give_up()
            if mark == "<|tool_call_begin|>":
                if self._attempt is None:
                    self._begin_attempt(mark)
                if not (yield from self._call()):
                    self._give_up()

    def _call(self) -> Reader[bool]:
        call_id = yield from self._name_until("<|tool_call_argument_begin|>")
        if call_id is None:
            return False
        call_id = call_id.strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
        yield from self._skip_space()
        if not name or (yield from self._peek()) != "{":
            return False
        yield from self._arguments(self._emit_call(name, self._unused(name, call_id)))
        yield from self._closing("<|tool_call_end|>")
        return True

    def _unused(self, name: str, call_id: str) -> str:
        """The model's id, which its template wants back; numbered on where a call of the conversation has it."""
        number = call_id.rpartition(":")[2]
        count = int(number) if number.isascii() and number.isdigit() else self.num_calls
        while (own := f"functions.{name}:{count}") in self.used_ids:
            count += 1
        self.used_ids.add(own)
        return own

"""gpt-oss: OpenAI's harmony format, where every message has a channel and may have a recipient.

    <|channel|>analysis<|message|>The user wants ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Paris"}<|call|>

The final channel (and a commentary without a recipient) is content, analysis is reasoning. The
output begins within a header, as the prompt ends in ``<|start|>assistant``.
"""

from __future__ import annotations

import re

from gateway.tool_parsers.machine import Reader, ReaderParser

_HEADER_MARKS = ["<|start|>", "<|channel|>"]
_ENDS = ["<|end|>", "<|return|>", "<|call|>"]
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


class HarmonyParser(ReaderParser):
    """Splits the output into reasoning, content and calls."""

    name = "gpt-oss"
    needs_special_tokens = True
    tells_reasoning = True

    def _read(self) -> Reader[None]:
        mark = yield from self._accept(" to=", "to=")
        while True:
            if not mark:
                mark = yield from self._until([*_HEADER_MARKS, *_ENDS], self._emit_text)
            if not mark:
                return
            mark = (yield from self._message(mark)) if mark not in _ENDS else ""

    def _message(self, mark: str) -> Reader[str]:
        """One message from the mark that begins its header; the mark that begins the next, if it is there."""
        begin = self._place - len(mark)
        self._begin_attempt(mark)
        rest = yield from self._name_until("<|message|>")
        if rest is None:
            self._give_up()
            return ""
        header = mark + rest
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and recipient.group(1).startswith("functions."):
            yield from self._tool_call(recipient.group(1).removeprefix("functions."))
            return ""
        self._attempt = None
        thinking = (channel is not None and channel.group(1) == "analysis") or recipient is not None
        if thinking:
            self.reasoning_spans.append((begin, None))
        write = self._emit_reasoning if thinking else self._emit_text
        end = yield from self._until([*_ENDS, "<|start|>"], write)
        if thinking and end:
            self.reasoning_spans[-1] = (begin, self._place - (len(end) if end == "<|start|>" else 0))
        return end if end == "<|start|>" else ""

    def _tool_call(self, name: str) -> Reader[None]:
        if not name:
            self._give_up()
            return
        index = self._emit_call(name)
        yield from self._skip_space()
        if (yield from self._peek()) in ("<", ""):
            if (yield from self._accept(*_ENDS)):
                self._emit_arguments(index, "{}")
            return
        yield from self._arguments(index)
        yield from self._closing(*_ENDS)

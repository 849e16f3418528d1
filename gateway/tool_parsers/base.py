"""The one incremental interface of all tool-call parsers.

A parser turns the text a model writes into events. It is fed whatever pieces the detokenizer
delivers and takes any split: the events of two splits of the same text are the same once
neighbouring deltas are joined. What is not a call is text, kept in order; a beginning of a mark
(``<`` of ``<tool_call>``) is held back until it is clear which it is, and ``flush`` releases it.

    events = parser.feed(piece)      # for every piece
    events = parser.flush()          # once, at the end

For each call a ``ToolCallStart`` (index 0, 1, ..., a unique id, the function's name) comes before
its ``ToolArgumentsDelta`` s, whose texts concatenate to the arguments as JSON. They are complete
JSON when the call is; a text that ends within a call (finish_reason ``length``) leaves a prefix.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Content outside calls; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its name is complete and never empty."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the JSON text of call ``index``'s arguments; never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning, from families whose one syntax carries it too (gpt-oss); never empty."""

    text: str


Event = TextDelta | ToolCallStart | ToolArgumentsDelta | ReasoningDelta


def new_call_id() -> str:
    """A fresh id in OpenAI's form, ``call_`` and 24 hex digits."""
    return "call_" + secrets.token_hex(12)


class ToolParser(ABC):
    """Base of the parsers. One instance per choice of a response; not reusable after ``flush``.

    ``tools`` are the request's tools in OpenAI's form (``{"type": "function", "function": {...}}``).
    Families whose syntax carries untyped text (XML-like parameters) read the schemas to decide
    between a JSON value and a string; the others ignore them.
    """

    name: ClassVar[str]
    """Value of ``--tool-call-parser``."""
    needs_special_tokens: ClassVar[bool] = False
    """The syntax uses special tokens: the request must be sent with skip_special_tokens=False, or
    the calls are invisible. The parser drops the family's own end-of-turn marks from the content."""
    tells_reasoning: ClassVar[bool] = False
    """The syntax carries reasoning, too."""

    def __init__(
        self, tools: Sequence[dict[str, Any]] = (), *, new_id: Callable[[], str] | None = None
    ) -> None:
        self.tools = tools
        self.num_calls = 0
        """Calls begun so far; the finish_reason is ``tool_calls`` when it is not 0."""
        self._new_id = new_id or self.make_id
        self.reasoning_spans: list[tuple[int, int | None]] = []
        """Where reasoning is in the text, in characters, with its marks, in order; the last may have no end yet."""
        self.used_ids: set[str] = set()
        """Ids that calls of this conversation have already: no new call gets one of them."""

    @staticmethod
    def make_id() -> str:
        """A fresh call id in the form the family's chat template expects back."""
        return new_call_id()

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the model's text; return what it completes, in order."""

    @abstractmethod
    def flush(self) -> list[Event]:
        """The text is over: release what was held back."""

    def _start(self, name: str) -> ToolCallStart:
        """Begin the next call."""
        event = ToolCallStart(self.num_calls, self._new_id(), name)
        self.num_calls += 1
        return event


@dataclass(slots=True)
class ToolCall:
    """A call as a whole, for responses that are not streamed."""

    id: str
    name: str
    arguments: str


def collect(events: Iterable[Event]) -> tuple[str, list[ToolCall]]:
    """Join a response's events into (content, calls): the whole form of what was streamed.

    Reasoning is left out.
    """
    content: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        match event:
            case TextDelta(text):
                content.append(text)
            case ToolCallStart(_, call_id, name):
                calls.append(ToolCall(call_id, name, ""))
            case ToolArgumentsDelta(index, text):
                calls[index].arguments += text
    return "".join(content), calls

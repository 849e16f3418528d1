"""What a chat choice's text means: reasoning, content, tool calls.

A choice's text goes through one ``ChoiceOutput``, piece by piece in whatever split it arrives, and
comes out as events. First the reasoning parser takes its block out, then what remains goes through
the tool parser. Which tokens were reasoning follows from where in the text each begins.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from common.messages import TokenizerReady, unpack_i32
from gateway.reasoning.parser import ReasoningParser
from gateway.tool_parsers.base import Event, ReasoningDelta, TextDelta, ToolParser
from gateway.tool_parsers.grammar import ToolPlanner
from gateway.tool_parsers.registry import detect


class ChoiceOutput:
    """One choice's parsers. Without either the text is content as it is."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._starts = array("i")
        """Of each token where in the text it begins; ascending."""

    @property
    def tells_reasoning(self) -> bool:
        """Reasoning is told apart, so its tokens are counted."""
        return self._reasoning is not None or (self._tools is not None and self._tools.tells_reasoning)

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far."""
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that begin within reasoning; its marks belong to it."""
        spans = [] if self._tools is None else list(self._tools.reasoning_spans)
        if self._reasoning is not None:
            spans = [] if self._reasoning.span is None else [self._reasoning.span]
        return sum(self._num_before(end) - self._num_before(begin) for begin, end in spans)

    def _num_before(self, place: int | None) -> int:
        """Tokens that begin before a place in the text; None: its end."""
        return len(self._starts) if place is None else bisect_left(self._starts, place)

    def feed(self, text: str, starts: bytes = b"", *, last: bool) -> list[Event]:
        """Events of the next piece; ``starts``: see ``TextRow.starts``; ``last``: nothing follows."""
        if starts:
            self._starts.extend(unpack_i32(starts).tolist())
        events: list[Event] = []
        rest = text
        if self._reasoning is not None:
            thought, rest = self._reasoning.feed(text)
            if last:
                more_thought, more_rest = self._reasoning.flush()
                thought, rest = thought + more_thought, rest + more_rest
            if thought:
                events.append(ReasoningDelta(thought))
        if self._tools is None:
            if rest:
                events.append(TextDelta(rest))
            return events
        events += self._tools.feed(rest)
        if last:
            events += self._tools.flush()
        return events


class ToolSupport:
    """The planner for the served model's family; found when the tokenizer has said what the model is."""

    def __init__(self) -> None:
        self._planners: dict[str, ToolPlanner] = {}

    def planner(self, model: TokenizerReady) -> ToolPlanner:
        """The planner for a model."""
        name = model.tool_parser or detect(model.chat_template)
        if name not in self._planners:
            self._planners[name] = ToolPlanner(name)
        return self._planners[name]

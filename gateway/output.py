"""What a chat choice's text means: reasoning, content, tool calls.

A choice's text goes through one ``ChoiceOutput``, piece by piece in whatever split it arrives, and
comes out as events. First the reasoning parser takes its block out, then what remains goes through
the tool parser.
"""

from __future__ import annotations

from common.messages import TokenizerReady
from gateway.reasoning.parser import ReasoningParser
from gateway.tool_parsers.base import Event, ReasoningDelta, TextDelta, ToolParser
from gateway.tool_parsers.grammar import ToolPlanner
from gateway.tool_parsers.registry import detect


class ChoiceOutput:
    """One choice's parsers. Without either the text is content as it is."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.reasoning_tokens = 0
        self.reasons = reasoning is not None
        """Reasoning is told apart; some families' tool syntax does so, too."""

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far."""
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str, num_tokens: int, *, last: bool) -> list[Event]:
        """Events of the next piece, which came with ``num_tokens`` tokens; ``last``: nothing follows."""
        events: list[Event] = []
        rest = text
        if self._reasoning is not None:
            inside = self._reasoning.in_reasoning
            thought, rest = self._reasoning.feed(text)
            if inside:
                self.reasoning_tokens += num_tokens - _share(num_tokens, rest, text)
            if last:
                more_thought, more_rest = self._reasoning.flush()
                thought, rest = thought + more_thought, rest + more_rest
            if thought:
                events.append(ReasoningDelta(thought))
        if self._tools is None:
            if rest:
                events.append(TextDelta(rest))
            return events
        parsed = self._tools.feed(rest)
        if last:
            parsed += self._tools.flush()
        if parsed and isinstance(parsed[-1], ReasoningDelta) and self._reasoning is None:
            self.reasons = True
            self.reasoning_tokens += num_tokens
        return events + parsed


def _share(num_tokens: int, part: str, text: str) -> int:
    """How many of the tokens of ``text`` are those of its end ``part``, by length.

    Tokens that come one at a time are told apart exactly; several that come together are not, because
    nobody says where in their text each begins.
    """
    return round(num_tokens * len(part) / len(text)) if text else 0


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

"""When the second batch in flight is sent: late, so that who arrives in the meantime is in it.

A batch that lies at the worker cannot be changed. Sent as soon as the one before it begins, it makes every
newcomer wait for two steps; sent shortly before that one ends, for the rest of one. So it is held until
``lead_s`` before the end that the measured cost of steps foretells. Steps do not keep to forecasts, and a worker
that waits is time lost for all: each late batch raises the lead by half, each one in time lowers it by a
hundredth, so that about one in forty is late, by a fraction of a millisecond.

Holding costs the scheduler a second turn for each step. When nobody has come for a while it does not hold: then
there are no prefill chunks either, and two steps are short.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.messages import StepResult
from scheduler_proc.cost import StepCost

if TYPE_CHECKING:
    from scheduler_proc.state import InFlight

FIRST_LEAD_S = 0.003
MIN_LEAD_S = 0.0015
"""Building a batch, a message to the worker, and being given a processor for both."""
MAX_LEAD_S = 0.025
LATE_S = 0.0005
"""Idle for longer than this before a step that was held: its batch came late."""
SURE_SHARE = 0.6
"""Of what a chunk's tokens are expected to take, what they take at least: a token of a large chunk costs little more
than half of what one of a small chunk does, and the worker must not wait for the difference."""
QUIET_S = 1.0
"""Nobody has come for so long: the next batch is sent at once."""
_RAISE, _LOWER = 1.5, 0.99


@dataclass
class Pacing:
    """When the oldest batch in flight began, and how early its successor is sent. Part of the state."""

    lead_s: float = FIRST_LEAD_S
    began: float = 0.0
    """time.time() at which the oldest batch in flight began to run, as far as the scheduler can tell."""
    arrived: float = float("-inf")
    """time.time() of the last newcomer."""
    holding: bool = False
    """The next batch would have been sent already, were it not for this."""
    held_step: int = -1
    """The last batch that was held before it was sent."""

    def sent(self, step: int, num_in_flight: int, now: float) -> None:
        """A batch goes out; with it ``num_in_flight`` are. The first begins at once."""
        if num_in_flight == 1:
            self.began = now
        if self.holding:
            self.held_step, self.holding = step, False
        elif num_in_flight > 1 and self.began - self.arrived <= QUIET_S:
            # Newcomers are about and yet nothing was held: the lead has grown as long as the steps are. Only
            # batches that were held teach it otherwise, so it has to shrink by itself.
            self.lead_s = max(self.lead_s * _LOWER, MIN_LEAD_S)

    def returned(self, result: StepResult, now: float) -> None:
        """A result came: the next batch in flight begins. Learn from one that had been held."""
        self.began = now
        if result.step == self.held_step:
            lead_s = self.lead_s * (_RAISE if result.idle_s > LATE_S else _LOWER)
            self.lead_s = min(max(lead_s, MIN_LEAD_S), MAX_LEAD_S)

    def send_at(self, in_flight: deque[InFlight], cost: StepCost) -> float:
        """When the next batch is due: -inf (now) unless one of known cost is running and newcomers are about."""
        if not in_flight or self.began - self.arrived > QUIET_S:
            return float("-inf")
        running_s = expected_s(in_flight[0], cost)
        return self.began + running_s - self.lead_s if running_s else float("-inf")


def expected_s(flight: InFlight, cost: StepCost) -> float:
    """Seconds a step is expected to take at least; 0 while nothing like it was measured."""
    num_prefill, num_decode = flight.num_prefill_tokens, flight.num_decode
    decode_s, token_s = cost.decoding(num_decode), cost.prefill_token.at(flight.mean_context)
    if (num_decode and not decode_s) or (num_prefill and not token_s):
        return 0.0
    return (decode_s if num_decode else 0.0) + SURE_SHARE * num_prefill * token_s

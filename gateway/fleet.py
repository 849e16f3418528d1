"""When must open requests be submitted again? Decided from what the engine says of itself.

Every ``EngineStatus`` names the generation of each role. When one changes, that process died, and
with it whatever it held or had in its pipe:

* scheduler, detokenizer: every open request is submitted again. A silence of ``STALE_S`` that ends
  counts as the scheduler's death.
* a tokenizer: the requests it was to hand on, of which nothing has come back yet, are submitted
  again. The others are past it and go on without a pause.
* a worker: nothing. The scheduler has all the ids.
* the whole engine (seen by a gateway on another host, which outlives it): every open request.
"""

from __future__ import annotations

from typing import NamedTuple

from common.messages import EngineStatus

STALE_S = 3.0
"""Without an EngineStatus for this long the engine does not answer. It is sent every second, and more often
while there is work."""


class Lost(NamedTuple):
    """What a change of the engine's processes may have lost."""

    everything: bool = False
    tokenizers: frozenset[int] = frozenset()
    """Indexes of the tokenizers that were replaced."""
    why: str = ""
    """What was seen, for the log: after a mere silence nobody needs to look for a process that died."""


class Fleet:
    """The engine's state as last told. ``take_status`` says what a change of it asks for."""

    def __init__(self) -> None:
        self.status: EngineStatus | None = None
        self.heard = 0.0
        """time.monotonic() of the last status."""
        self.was_ready = False
        """The engine has served: whatever is away now is being restarted, not started."""
        self._generations: dict[str, int] = {}

    def is_fresh(self, now: float) -> bool:
        """Whether the scheduler answers."""
        return self.status is not None and now - self.heard < STALE_S

    def take_status(self, status: EngineStatus, now: float) -> Lost:
        """Store a status; what may have been lost since the one before."""
        anew = self.status is not None and self.status.run != status.run
        silent_s = 0.0 if self.status is None else now - self.heard
        everything = anew or silent_s >= STALE_S
        seen = [f"the scheduler was not heard of for {silent_s:.1f} s"] if silent_s >= STALE_S else []
        self.status = status
        self.heard = now
        self.was_ready = self.was_ready or status.ready
        tokenizers: set[int] = set()
        for role, generation in status.generations.items():
            known = self._generations.get(role)
            self._generations[role] = generation
            if known is None or known == generation:
                continue
            kind, _, index = role.partition("-")
            if kind in ("scheduler", "detokenizer"):
                everything = True
            elif kind == "tokenizer" and index.isdigit():
                tokenizers.add(int(index))
            else:
                continue
            seen.append(f"{role} was restarted")
        why = "the whole engine was started anew" if anew else " and ".join(seen)
        return Lost(everything, frozenset(tokenizers), why)

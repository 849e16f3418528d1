"""When must open requests be submitted again? Decided from what the engine says of itself.

Every ``EngineStatus`` names the generation of each role. When the tokenizer's, the scheduler's or
the detokenizer's changes, that process died, and with it whatever it held or had in its pipe; so
each open request it may have held is submitted again. A worker's death needs nothing from us: the
scheduler has all the ids. A silence of ``STALE_S`` that ends counts as a death, too.
"""

from __future__ import annotations

from common.messages import EngineStatus

STALE_S = 3.0
"""Without an EngineStatus for this long the engine does not answer. It is sent several times a second."""


class Fleet:
    """The engine's state as last told. ``take_status`` says what a change of it asks for."""

    def __init__(self, num_tokenizers: int) -> None:
        self.status: EngineStatus | None = None
        self.heard = 0.0
        """time.monotonic() of the last status."""
        self._num_tokenizers = num_tokenizers
        self._generations: dict[str, int] = {}

    def is_fresh(self, now: float) -> bool:
        """Whether the scheduler answers."""
        return self.status is not None and now - self.heard < STALE_S

    def take_status(self, status: EngineStatus, now: float) -> set[int]:
        """Store a status; the tokenizer indexes whose requests must be submitted again."""
        silent = self.status is not None and now - self.heard >= STALE_S
        self.status = status
        self.heard = now
        stale: set[int] = set()
        everything = set(range(self._num_tokenizers))
        for role, generation in status.generations.items():
            known = self._generations.get(role)
            self._generations[role] = generation
            if known is None or known == generation:
                continue
            kind, _, index = role.partition("-")
            if kind in ("scheduler", "detokenizer"):
                stale |= everything
            elif kind == "tokenizer" and index.isdigit():
                stale.add(int(index))
        return everything if silent else stale

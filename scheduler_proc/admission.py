"""May a waiting request start? An estimate of what those that run will still need.

Reserving every request's ``max_tokens`` would leave most of the pool empty, for most outputs end early;
reserving nothing would thrash. So a fraction of what each may still generate is reserved (SGLang's
new-token ratio): it starts careful, falls with every step that goes well, and rises to what is really
out there when a preemption shows that it was too low.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_proc.request import Req
from scheduler_proc.state import Pool

INITIAL_RATIO = 0.4
"""Lower than SGLang's 0.7: a preempted request finds its pages in the tree, so a wrong guess costs little, and in
simulation a bolder start filled the pool better where outputs end early and preempted next to nobody."""
FLOOR_FRACTION = 0.14
"""The ratio never falls below this part of where it starts."""
DECAY_STEPS = 600
CLIP_TOKENS = 4096
"""No single request counts for more than this many future tokens."""
RISE = 0.1
"""Added to the observed fraction after a preemption."""


@dataclass
class Admission:
    """The ratio and the test that uses it."""

    conservativeness: float
    ratio: float = -1.0

    def __post_init__(self) -> None:
        if self.ratio < 0:
            self.ratio = self.initial

    @property
    def initial(self) -> float:
        """Where the ratio starts and returns to when nothing runs."""
        return min(INITIAL_RATIO * self.conservativeness, 1.0)

    def went_well(self) -> None:
        """A step with decoding rows found its pages.

        A ratio raised far above where it starts falls faster, so that one preemption does not leave pages
        empty for thousands of steps.
        """
        floor = self.initial * FLOOR_FRACTION
        self.ratio = max(floor, self.ratio - max(self.initial - floor, self.ratio - floor) / DECAY_STEPS)

    def idle(self) -> None:
        """Nothing runs: what was learnt of those requests says nothing about the next."""
        self.ratio = self.initial

    def preempted(self, pool: Pool) -> None:
        """Pages ran out. The fraction already generated is what the ratio should have been at least."""
        table = pool.table
        slots = table.decoding_slots()
        if not slots:
            return
        done = sum(table.known[slot] - table.prompt[slot] for slot in slots)
        allowed = sum(table.limit[slot] - table.prompt[slot] for slot in slots)
        self.ratio = min(1.0, max(self.ratio, done / max(allowed, 1)) + RISE * self.conservativeness)

    def reserved_tokens(self, pool: Pool) -> float:
        """Tokens expected of the requests that run, beyond the pages they have."""
        table = pool.table
        running = table.view("running")
        left = table.view("limit")[running] - table.view("known")[running]
        return self.ratio * float(np.minimum(left, CLIP_TOKENS).sum())

    def reserve_for(self, req: Req) -> float:
        """Tokens expected of a request beyond the ids it has."""
        return self.ratio * min(max(req.max_len - len(req.ids), 0), CLIP_TOKENS)

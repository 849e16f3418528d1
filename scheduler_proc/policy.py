"""The order in which waiting requests are considered.

A policy yields candidates, best first; the batch takes them while they fit and stops at the first that
does not, so whoever is first cannot be overtaken for ever. Under every policy a long wait makes a request
first in the end. Among equals, who has output already goes before who never ran (see ``queue.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from scheduler_proc.queue import WaitingQueue
from scheduler_proc.radix import RadixTree
from scheduler_proc.request import Req

LPM_QUEUE_LIMIT = 128
"""Above this many waiting requests, matching each of them costs more than it saves (as SGLang found)."""
LPM_PATIENCE_S = 5.0
"""A request that has waited this long goes before all that have not, in order of arrival."""
PRIORITY_AGING_S = 5.0
"""Each such time of waiting counts as one more unit of priority."""


class Policy(Protocol):
    """Chooses from the queue; changes nothing but ``Req.rank``."""

    preempts: bool
    """A waiting request may preempt a running one of lower rank."""

    def order(self, queue: WaitingQueue, tree: RadixTree, now: float) -> Iterable[Req]:
        """Candidates, best first. The queue may shrink while they are taken."""
        ...


class Fcfs:
    """First come, first served, those with output before the others."""

    preempts = False

    def order(self, queue: WaitingQueue, tree: RadixTree, now: float) -> Iterable[Req]:
        """As the queue is sorted."""
        return queue.lazily()


class Lpm:
    """Longest cached prefix first (SGLang): what is cached is used before it is evicted."""

    preempts = False

    def order(self, queue: WaitingQueue, tree: RadixTree, now: float) -> Iterable[Req]:
        """Who has output, then who waited too long, both in order of arrival, then by cached pages, then by arrival."""
        if len(queue) > LPM_QUEUE_LIMIT:
            return queue.lazily()

        def key(req: Req) -> tuple[bool, bool, int, int]:
            patient = now - req.queued_at < LPM_PATIENCE_S
            if req.has_output:
                return (False, False, 0, req.seq)
            if not patient or not req.uses_cache:
                return (True, patient, 0, req.seq)
            match = tree.match(req.spec.cache_salt, req.data(), (len(req.ids) - 1) // tree.page_size)
            return (True, True, -match.num_pages, req.seq)

        return sorted(queue, key=key)


class Priority:
    """Higher priority first. Waiting adds to it, so low priorities are served too."""

    preempts = True

    def order(self, queue: WaitingQueue, tree: RadixTree, now: float) -> Iterable[Req]:
        """By priority with age, then who has output, then by arrival."""
        reqs = queue.snapshot()
        for req in reqs:
            req.rank = req.spec.priority + (now - req.queued_at) // PRIORITY_AGING_S
        reqs.sort(key=lambda req: (-req.rank, not req.has_output, req.seq))
        return reqs


def make_policy(name: str) -> Policy:
    """``fcfs``, ``lpm`` or ``priority``."""
    policies: dict[str, Policy] = {"fcfs": Fcfs(), "lpm": Lpm(), "priority": Priority()}
    return policies[name]

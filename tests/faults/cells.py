"""The cells of the matrix: which role, which fault, what the requests were doing."""

from __future__ import annotations

from typing import Any, NamedTuple

ROLES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
FAULTS = {
    "kill": "kill -9",
    "stop": "SIGSTOP",
    "memory": "no memory (prlimit)",
    "start-up": "exit during start-up",
    "shutdown": "exit during shutdown",
}
PHASES = {
    "prefill": "prefilling",
    "greedy": "decoding, greedy",
    "sampled": "decoding, sampled",
    "json": "constrained JSON",
    "n=2": "n=2",
    "waiting": "waiting in the queue",
}
DECODING = ("greedy", "sampled", "json", "n=2")
NUM_TOKENS = 600
"""So that a stream is still far from its end when its cell's fault comes."""
MAX_DRAFTS = 2
"""Of a row: greedy answers of a tiny model go round in circles, and nearly all drafts are right."""
PREFILL_CHUNK = 16
_SENTENCE = "It is over there, by the river. un deux trois quatre cinq six sept. That is the question. "
_COLOURS = {"enum": ["red", "green", "blue", "yellow"]}


class Cell(NamedTuple):
    """A fault of a process, and the phases of the requests it meets."""

    role: str
    fault: str
    phases: tuple[str, ...]

    @property
    def name(self) -> str:
        """For pytest: ``worker-kill`` or ``worker-kill-json``."""
        return "-".join((self.role, self.fault, *(self.phases if len(self.phases) < len(PHASES) else ())))


def whole_matrix() -> list[Cell]:
    """All 150 cells as 25 faults, each of which meets requests of all six phases at once.

    Ordered by fault: what shares a server is together, and no process dies twice in a row.
    """
    return [Cell(role, fault, tuple(PHASES)) for fault in FAULTS for role in ROLES]


def pairwise_slice() -> list[Cell]:
    """The same 25 faults with one phase each (two for one role): 30 cells in which every pair of
    (role, fault), (role, phase) and (fault, phase) occurs."""
    phases = tuple(PHASES)
    found = []
    for f, fault in enumerate(FAULTS):
        for r, role in enumerate(ROLES):
            # A cyclic square leaves one phase of six out for each fault, and the same one for the role of its number.
            both = (phases[(r + f) % 6], phases[(f + 5) % 6])
            found.append(Cell(role, fault, both if r == f else both[:1]))
    return found


def body_of(phase: str, salt: str = "") -> dict[str, Any]:
    """The completion that is in this phase when the fault comes.

    ``salt`` keeps the prefix cache of one cell from helping the next: the answer is the same, the work is not saved.
    """
    fixed = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "cache_salt": salt}
    greedy: dict[str, Any] = {**fixed, "temperature": 0, "max_tokens": (1 + MAX_DRAFTS) * NUM_TOKENS}
    sampled: dict[str, Any] = {**fixed, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    if phase == "prefill":
        return {**greedy, "prompt": _SENTENCE * 150, "max_tokens": 40}
    if phase == "sampled":
        return {**sampled, "prompt": "Where is the station?"}
    if phase == "json":
        schema = {"type": "array", "items": _COLOURS, "minItems": NUM_TOKENS, "maxItems": NUM_TOKENS}
        form = {"type": "json_schema", "json_schema": {"name": "colours", "schema": schema, "strict": True}}
        more = {"max_tokens": 20 * NUM_TOKENS, "ignore_eos": False, "response_format": form}
        return {**sampled, "prompt": "The colours:", **more}
    if phase == "n=2":
        return {**sampled, "prompt": "to be or not to be", "n": 2, "seed": 5}
    if phase == "waiting":
        return {**greedy, "prompt": "for i in range(10):", "max_tokens": 60}
    return {**greedy, "prompt": "un deux trois"}


def num_slots(phase: str) -> int:
    """Requests that run at once for this phase."""
    return {"n=2": 2, "waiting": 0}.get(phase, 1)

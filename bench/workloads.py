"""The requests the benchmarks send: made from a fixed seed, so every server sees the same bytes.

    short          about 32 prompt tokens of content, 64 new tokens
    decode         short prompt, 256 new tokens
    long-prompt    about 800 prompt tokens, all different, 16 new tokens
    shared-prefix  one system prompt of about 800 tokens, short different questions, 32 new tokens
    same-prefix    as shared-prefix, of about 1,000 tokens
    multi-turn     n / 5 users, 5 turns each, every turn resends its whole history, 32 new tokens
    mixed          60 % short, 20 % shared-prefix, 20 % long-prompt
    json           short prompt, response_format json_schema, at most 96 new tokens
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

_WORDS = (
    "river stone market engine window garden letter number mountain signal copper harbor kitchen thunder "
    "village orange pencil lantern meadow circle planet silver bridge forest candle basket winter summer "
    "island castle mirror ladder tunnel feather blanket compass anchor barrel cotton ginger hammer jacket "
    "kettle lemon"
)
WORDS = _WORDS.split()

PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}

KINDS = ("short", "decode", "long-prompt", "shared-prefix", "same-prefix", "multi-turn", "mixed", "json")
TURNS = 5

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Job:
    """One chat request: messages, new tokens, and fields the workload adds to the body."""

    kind: str
    messages: Messages
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)


def words(rng: random.Random, n: int) -> str:
    """``n`` words drawn by ``rng``."""
    return " ".join(rng.choice(WORDS) for _ in range(n))


def shared_system_prompt(seed: int, num_words: int = 800) -> str:
    """The system prompt all ``shared-prefix`` requests of a seed have in common; a word is about a token."""
    return "You are a careful assistant. " + words(random.Random(seed + 1), num_words)


def single_turn(rng: random.Random, kind: str, shared: str) -> Job:
    """Draw one request of a kind; raises ValueError for a kind that is not a single turn."""
    if kind == "short":
        return Job(kind, [_user("Tell me about " + words(rng, 12) + ".")], 64)
    if kind == "decode":
        return Job(kind, [_user("Write a long story about " + words(rng, 5) + ".")], 256)
    if kind == "long-prompt":
        return Job(kind, [_user(words(rng, 800) + "\nSummarise the above.")], 16)
    if kind in ("shared-prefix", "same-prefix"):
        return Job(kind, [{"role": "system", "content": shared}, _user("About " + words(rng, 6) + "?")], 32)
    if kind == "json":
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "person", "strict": True, "schema": PERSON_SCHEMA},
        }
        prompt = "Invent a person who likes " + words(rng, 3) + ". Reply in JSON."
        return Job(kind, [_user(prompt)], 96, {"response_format": response_format})
    raise ValueError(f"{kind!r} is not a single-turn workload; there are {', '.join(KINDS)}")


def jobs(kind: str, n: int, seed: int) -> list[Job]:
    """``n`` independent requests of a workload (``multi-turn`` has its own form: see ``opening``)."""
    rng = random.Random(seed)
    shared = shared_system_prompt(seed, 1000 if kind == "same-prefix" else 800)
    out = []
    for _ in range(n):
        drawn = rng.choices(["short", "shared-prefix", "long-prompt"], [6, 2, 2])[0] if kind == "mixed" else kind
        out.append(single_turn(rng, drawn, shared))
    return out


def opening(seed: int, user: int) -> tuple[random.Random, Messages]:
    """A multi-turn user's own generator and the history it starts with."""
    rng = random.Random(seed * 1000 + user)
    return rng, [{"role": "system", "content": "You are helpful. " + words(rng, 120)}]


def next_turn(rng: random.Random, history: Messages, answer_tokens: int = 32) -> Job:
    """Append the user's next question to ``history`` (mutated) and return the request."""
    history.append(_user(words(rng, 60) + "?"))
    return Job("multi-turn", list(history), answer_tokens)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}

"""Synthetic requests: who asks when, with which prompt, for how long an answer.

Lengths are log-normal (what public traces of chat services look like), prefixes (system prompts,
documents) are shared with Zipf popularity, a share of the clients are conversations whose next
prompt contains the whole exchange before. Everything is drawn from one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

I32 = NDArray[np.int32]


@dataclass(slots=True)
class SimRequest:
    """One request of the simulation. Its prompt is built when it arrives, so that 100,000 take no memory."""

    rid: str
    time: float
    output_len: int
    """After which the model would end by itself."""
    max_tokens: int
    user: int
    priority: int = 0
    prefix: int = -1
    """Number of the shared prefix; -1: none."""
    prefix_len: int = 0
    own_len: int = 0
    """Prompt tokens nobody shares."""
    turns_left: int = 0
    """Further turns of the conversation."""
    history: I32 | None = None
    """The conversation before this turn, instead of a prefix."""
    ids: I32 | None = None
    """A prompt given in full (recorded traces)."""
    blocks: tuple[int, ...] = ()
    """Names of shared blocks, in order, that the prompt consists of (hash ids of public traces)."""
    block_len: int = 0


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Flags of the generator; lengths are means in tokens, times in seconds."""

    num_requests: int = 10_000
    rate: float = 10.0
    """Arrivals per second, conversations counted turn by turn on average."""
    arrivals: Literal["poisson", "bursty"] = "poisson"
    burstiness: float = 3.0
    """Coefficient of variation of the gaps when bursty (Poisson has 1)."""
    prefixes: int = 200
    zipf: float = 1.0
    prefix_len: int = 256
    prompt_len: int = 128
    output_len: int = 128
    spread: float = 0.8
    """Sigma of the logarithm of lengths; 0: all alike."""
    max_tokens: int = 0
    """What clients ask for; 0: 1 to 8 times what they will get, as people do."""
    to_the_limit: bool = False
    """Outputs run to max_tokens instead of ending early."""
    multi_turn: float = 0.3
    """Share of arrivals that begin a conversation."""
    turns: float = 4.0
    """Mean turns of a conversation."""
    think_s: float = 10.0
    users: int = 100
    urgent: float = 0.0
    """Share of requests with priority 20."""
    context_len: int = 8192
    vocab_size: int = 32000
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for values that make no workload."""
        if self.num_requests < 1 or self.rate <= 0 or self.users < 1 or self.turns < 1 or self.prefixes < 1:
            raise ConfigError("--requests, --rate, --users, --turns and --prefixes must be positive")
        if not 0 <= self.multi_turn <= 1 or not 0 <= self.urgent <= 1:
            raise ConfigError("--multi-turn and --urgent are shares between 0 and 1")
        if min(self.prefix_len, self.think_s, self.spread) < 0 or min(self.prompt_len, self.output_len) < 1:
            raise ConfigError("lengths and times must not be negative, prompts and outputs at least 1 token")


@dataclass
class Workload:
    """Requests in order of arrival, and what a client sends after an answer."""

    spec: WorkloadSpec
    requests: list[SimRequest]
    num_turns: int = 0

    def prompt(self, request: SimRequest) -> I32:
        """Prompt ids, int32, at least one."""
        if request.ids is not None:
            return request.ids
        spec = self.spec
        own = _ids((spec.seed, 3, *request.rid.encode()), max(request.own_len, 1), spec.vocab_size)
        if request.history is not None:
            return np.concatenate([request.history, own])
        if request.blocks:
            parts = [_ids((spec.seed, 4, name), request.block_len, spec.vocab_size) for name in request.blocks]
            return np.concatenate(parts)[: request.prefix_len]
        if request.prefix < 0 or not request.prefix_len:
            return own
        shared = _ids((spec.seed, 2, request.prefix), request.prefix_len, spec.vocab_size)
        return np.concatenate([shared, own])

    def next_turn(self, request: SimRequest, prompt: I32, outputs: I32, now: float) -> SimRequest | None:
        """What the client of a finished request asks next; None at the end of a conversation."""
        if not request.turns_left:
            return None
        spec = self.spec
        # Of the request alone, so that every policy that is compared is asked the same.
        rng = np.random.default_rng((spec.seed, 5, *request.rid.encode()))
        history = np.concatenate([prompt, outputs])
        own_len = _length(rng, spec.prompt_len / 2, spec.spread)
        output_len = _length(rng, spec.output_len, spec.spread)
        max_tokens = _limit(rng, spec, output_len)
        if len(history) + own_len + max_tokens > spec.context_len:
            return None
        self.num_turns += 1
        name, _, turn = request.rid.partition(".")
        return replace(
            request,
            rid=f"{name}.{int(turn or 0) + 1}",
            time=now + float(rng.exponential(spec.think_s)),
            output_len=max_tokens + 1 if spec.to_the_limit else output_len,
            max_tokens=max_tokens,
            own_len=own_len,
            history=history,
            turns_left=request.turns_left - 1,
        )


def _ids(key: tuple[int, ...], n: int, vocab_size: int) -> I32:
    return np.random.default_rng(key).integers(3, vocab_size, n, dtype=np.int32)


def _length(rng: np.random.Generator, mean: float, spread: float) -> int:
    """Log-normal with the given mean, at least 1, at most 16 times the mean."""
    value = float(rng.lognormal(math.log(mean) - spread * spread / 2, spread))
    return max(1, min(round(value), round(16 * mean)))


def _limit(rng: np.random.Generator, spec: WorkloadSpec, output_len: int) -> int:
    if spec.max_tokens:
        return spec.max_tokens
    return output_len if spec.to_the_limit else math.ceil(output_len * float(rng.uniform(1, 8)))


def _gaps(rng: np.random.Generator, spec: WorkloadSpec, n: int) -> NDArray[np.float64]:
    mean = 1 / spec.rate
    if spec.arrivals == "poisson":
        return rng.exponential(mean, n)
    shape = 1 / spec.burstiness**2
    return rng.gamma(shape, mean / shape, n)


def _zipf_weights(n: int, exponent: float) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = 1.0 / np.arange(1, n + 1, dtype=np.float64) ** exponent
    weights /= weights.sum()
    return weights


def generate(spec: WorkloadSpec) -> Workload:
    """The requests of ``spec``. Conversations add turns as they go; ``num_requests`` counts them in on average."""
    spec.check()
    rng = np.random.default_rng([spec.seed, 0])
    per_arrival = 1 + spec.multi_turn * (spec.turns - 1)
    n = max(1, round(spec.num_requests / per_arrival))
    times = np.cumsum(_gaps(rng, spec, n) * per_arrival)
    prefixes = rng.choice(spec.prefixes, n, p=_zipf_weights(spec.prefixes, spec.zipf))
    lengths = [_length(rng, max(spec.prefix_len, 1), 0.5) if spec.prefix_len else 0 for _ in range(spec.prefixes)]
    users = rng.choice(spec.users, n, p=_zipf_weights(spec.users, 1.0))
    longest = spec.context_len // 2
    return Workload(spec, list(_requests(rng, spec, times, prefixes, lengths, users, longest)))


def _requests(
    rng: np.random.Generator,
    spec: WorkloadSpec,
    times: NDArray[np.float64],
    prefixes: NDArray[np.int64],
    lengths: list[int],
    users: NDArray[np.int64],
    longest: int,
) -> Iterator[SimRequest]:
    for i in range(len(times)):
        output_len = min(_length(rng, spec.output_len, spec.spread), longest)
        max_tokens = min(_limit(rng, spec, output_len), longest)
        talks = rng.random() < spec.multi_turn
        yield SimRequest(
            rid=f"r{i}",
            time=float(times[i]),
            output_len=max_tokens + 1 if spec.to_the_limit else output_len,
            max_tokens=max_tokens,
            user=int(users[i]),
            priority=20 if rng.random() < spec.urgent else 0,
            prefix=int(prefixes[i]),
            prefix_len=min(lengths[int(prefixes[i])], longest // 2),
            own_len=min(_length(rng, spec.prompt_len, spec.spread), longest // 2),
            turns_left=int(rng.geometric(1 / spec.turns)) - 1 if talks else 0,
        )

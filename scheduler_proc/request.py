"""One generation as the scheduler sees it, and the statuses it passes through.

    WAITING ──admit──> RUNNING ──preempt──> LEAVING ──last row committed──> WAITING
       │                  │
       └──────finish──────┴────finish────> ENDING ──last row committed──> ENDED

LEAVING and ENDING exist because steps are pipelined: pages are in use until the last step that was sent
with them has returned.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import InvariantError
from common.messages import HEALTH_RID_PREFIX, Finish, SamplingParams, Tokenized, TopLogprobs

if TYPE_CHECKING:
    from scheduler_proc.radix import Node

GroupKey = tuple[str, str, str, bytes]
"""(gateway, group, cache salt, prompt): requests that share a prompt."""


class Status(IntEnum):
    """Where a request is; see the module's diagram."""

    WAITING = 0
    RUNNING = 1
    LEAVING = 2
    ENDING = 3
    ENDED = 4


_NEXT: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.ENDED}),
    Status.RUNNING: frozenset({Status.LEAVING, Status.ENDING, Status.WAITING}),
    Status.LEAVING: frozenset({Status.WAITING, Status.ENDING}),
    Status.ENDING: frozenset({Status.ENDED}),
    Status.ENDED: frozenset(),
}


@lru_cache(64)
def _stop_ids(eos: tuple[int, ...], others: tuple[int, ...]) -> frozenset[int]:
    """Requests with the same share one set: each row of each step looks into its own."""
    return frozenset(eos + others)


class Req:
    """A live request. Its ids are in the slot table while it has a slot, here otherwise."""

    __slots__ = (
        "attempt", "cached_len", "crashes", "finish", "finish_handed", "gateway", "group_key",
        "ids", "in_tool_call", "logprobs", "max_len", "node", "num_preemptions", "pages", "pending_key",
        "prompt_len", "prompt_logprobs", "prompt_logprobs_left", "prompt_logprobs_sent", "prompt_top", "queued_at",
        "rank", "rid", "scheduled_len", "sent_len", "seq", "silent", "slot", "spec", "status", "stop_ids",
        "top_logprobs", "tree_len",
    )  # fmt: skip

    def __init__(self, seq: int, spec: Tokenized, now: float) -> None:
        sampling = spec.sampling
        prompt_len, n_known = len(spec.input_ids) // 4, len(spec.output_ids) // 4
        self.seq = seq
        """Order of arrival."""
        self.spec = spec
        self.rid = spec.rid
        self.gateway = spec.gateway
        self.attempt = spec.attempt
        self.status = Status.WAITING
        self.queued_at = now
        self.rank = float(spec.priority)
        """Priority with what the wait added, fixed when it is admitted."""
        self.prompt_len = prompt_len
        self.max_len = prompt_len + (sampling.max_tokens or 0)
        """Most ids, prompt included."""
        self.stop_ids = _stop_ids(spec.eos_token_ids, sampling.stop_token_ids)
        self.ids = array("i", spec.input_ids + spec.output_ids)
        """Every known id, prompt included, while the request has no slot."""
        self.slot = -1
        self.pages: list[int] = []
        self.node: Node | None = None
        """Locked in the radix tree."""
        self.tree_len = 0
        """Leading tokens whose pages are the tree's own, under ``node``."""
        self.scheduled_len = 0
        """Ids whose computation was sent to the worker (while prefilling)."""
        self.pending_key: tuple[str, int, bytes] | None = None
        """Names the prefix it computes, for requests that wait for it."""
        self.group_key: GroupKey | None = None
        if spec.group is not None:
            self.group_key = (spec.gateway, spec.group, spec.cache_salt, spec.input_ids)
        self.cached_len = -1
        """Of the first admission; -1 before."""
        self.sent_len = prompt_len
        """Ids handed to the detokenizer, prompt included, while the request has no slot."""
        self.finish: Finish | None = None
        self.finish_handed = False
        self.silent = False
        """Its ending is known already (stop hit) or nobody hears it (gateway gone)."""
        self.in_tool_call = False
        self.crashes = 0
        """Worker deaths while a row of it was in flight."""
        self.num_preemptions = 0
        # Log-probabilities of ids another scheduler generated are gone; the gateway has them already.
        self.logprobs: list[float] | None = None if sampling.logprobs is None else [0.0] * n_known
        self.top_logprobs: list[TopLogprobs] = [TopLogprobs(b"", b"")] * n_known if sampling.logprobs else []
        wants_prompt = sampling.prompt_logprobs is not None and not n_known
        self.prompt_logprobs: NDArray[np.float32] | None = (
            np.zeros(max(prompt_len - 1, 0), dtype=np.float32) if wants_prompt else None
        )
        self.prompt_logprobs_left = prompt_len - 1 if wants_prompt else 0
        """Prompt positions whose log-probability is still to come."""
        self.prompt_top: list[TopLogprobs] = (
            [TopLogprobs(b"", b"")] * (prompt_len - 1) if wants_prompt and sampling.prompt_logprobs else []
        )
        self.prompt_logprobs_sent = not wants_prompt

    def become(self, status: Status) -> None:
        """Change status. Raises InvariantError for a change that the diagram does not have."""
        if status not in _NEXT[self.status]:
            raise InvariantError(f"{self.rid}: {self.status.name} cannot become {status.name}")
        self.status = status

    def data(self) -> bytes:
        """Every known id as int32 bytes, while the request waits."""
        return self.spec.input_ids if len(self.ids) == self.prompt_len else self.ids.tobytes()

    @property
    def has_output(self) -> bool:
        """It has generated something, or its gateway says so; of a request that waits."""
        return len(self.ids) > self.prompt_len

    @property
    def counted(self) -> bool:
        """It is traffic; health checks are in no metric."""
        return not self.rid.startswith(HEALTH_RID_PREFIX)

    @property
    def accepted(self) -> bool:
        """The client has been (or will be) told that it runs; from then on it ends by a row."""
        return self.cached_len >= 0

    @property
    def uses_cache(self) -> bool:
        """Prompt log-probabilities need every prompt position computed."""
        return self.prompt_logprobs_left == 0

    @property
    def worker_sampling(self) -> SamplingParams:
        """As the client asked, without what is done already."""
        sampling = self.spec.sampling
        if sampling.prompt_logprobs is None or self.prompt_logprobs_left:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)

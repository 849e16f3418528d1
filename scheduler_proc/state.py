"""What the scheduler knows, in one place. Each part has one owner that changes it.

``Pool`` is made anew for each run of the worker (an epoch); requests outlive it.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from common.config import ServerConfig
from common.errors import InvariantError
from common.messages import RefusedRow, WorkerReady
from scheduler_proc.cost import StepCost
from scheduler_proc.metrics import Metrics
from scheduler_proc.pacing import Pacing
from scheduler_proc.pages import PageAllocator
from scheduler_proc.queue import WaitingQueue
from scheduler_proc.radix import RadixTree
from scheduler_proc.request import GroupKey, Req
from scheduler_proc.slots import SlotTable


class InFlight(NamedTuple):
    """A batch the worker has not answered yet. Columns are [R], the batch's rows; nobody changes them."""

    step: int
    slots: array[int]
    chunks: array[int]
    """Prefill tokens of each row; 0 for a decoding row."""
    samples: bytes
    """Rows that sample if all goes as foreseen."""
    num_decode: int
    """Rows that decode: the first so many."""
    num_prefill_tokens: int
    """Of all rows."""
    copied_pages: tuple[int, ...]
    """Sources of the batch's page copies, held until it returns."""
    prefill_context: int = 0
    """Sum over the prefill tokens of how many positions are before each: what attention has to do."""

    @property
    def mean_context(self) -> float:
        """Positions before a prefill token, in the mean over them."""
        return self.prefill_context / self.num_prefill_tokens if self.num_prefill_tokens else 0.0


class Pool:
    """Pages, prefix cache and slots of one run of the worker. Owner of no request."""

    def __init__(self, ready: WorkerReady, config: ServerConfig) -> None:
        self.ready = ready
        self.page_size = ready.page_size
        self.tile_tokens = max(ready.tile_tokens, 1)
        self.allocator = PageAllocator(ready.num_pages)
        self.tree = RadixTree(self.allocator, ready.page_size, enabled=not config.cache.disable_radix_cache)
        self.max_tokens = ready.num_pages * ready.page_size
        self.max_running = min(config.scheduler.max_running_requests, ready.max_slots)
        # A request can know one id more than it has pages for: the one just sampled.
        self.table = SlotTable(ready.max_slots, min(ready.context_len, self.max_tokens + 1) + 1, ready.max_drafts)
        self.in_flight: deque[InFlight] = deque()

    @property
    def num_available(self) -> int:
        """Pages that are free or could be evicted (an upper bound)."""
        return self.allocator.num_free + self.tree.num_evictable

    def ensure(self, num_pages: int) -> bool:
        """Evict until ``num_pages`` are free; False when that is not possible."""
        short = num_pages - self.allocator.num_free
        if short > 0:
            self.tree.evict(short)
        return self.allocator.num_free >= num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size)


@dataclass
class State:
    """Everything ``Scheduler.step`` reads and changes."""

    config: ServerConfig
    generation: int
    """Of this scheduler process."""
    run: str = ""
    """Name of this run of the whole engine."""
    epoch: int = 0
    """Of the worker's run; announced by Reset."""
    step: int = 0
    """Number of the last batch sent."""
    pool: Pool | None = None
    """None until the worker answered the last Reset."""
    worker_generation: int = -1
    next_seq: int = 0
    draining: bool = False
    reqs: dict[str, Req] = field(default_factory=dict)
    """Every live request by rid, those whose ending was not handed over included."""
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    begins: dict[str, Req] = field(default_factory=dict)
    """Requests the detokenizer must be told to begin."""
    loose: dict[str, Req] = field(default_factory=dict)
    """Requests with news that are not plain rows: endings, log-probabilities, ids of preempted ones."""
    refused: list[RefusedRow] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Gateways to be reported as gone."""
    pending_prefixes: dict[tuple[str, int, bytes], Req] = field(default_factory=dict)
    """Prefixes being computed: (salt, pages cached before, bytes of the next page) -> who computes it."""
    leaders: dict[GroupKey, Req] = field(default_factory=dict)
    """A running request of each group: others copy the partial page of the prompt from it."""
    suspects: dict[str, int] = field(default_factory=dict)
    """rid -> ids to compute alone after a worker died with a row of it in flight."""
    unexplained_crashes: int = 0
    """Worker deaths since there are suspects, or since the last conviction."""
    excused_crashes: int = 0
    """Worker deaths that a convicted request explains."""
    preempted: list[tuple[str, str]] = field(default_factory=list)
    """(rid, why) of those who gave way in this step, for the trace."""
    log: list[tuple[str, str]] = field(default_factory=list)
    """(level, words) for the loop to log."""
    metrics: Metrics = field(default_factory=Metrics)
    cost: StepCost = field(default_factory=StepCost)
    pacing: Pacing = field(default_factory=Pacing)

    def need_pool(self) -> Pool:
        """The pool. Raises InvariantError where only a running worker makes sense."""
        if self.pool is None:
            raise InvariantError("no worker is ready")
        return self.pool

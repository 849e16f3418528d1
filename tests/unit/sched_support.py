"""A scheduler and a fake worker joined by hand, for tests that look at single batches."""

from __future__ import annotations

from collections import deque
from typing import Any

from common.config import CacheConfig, SchedulerConfig, ServerConfig
from common.messages import (
    Abort,
    ForwardBatch,
    GatewayLease,
    Grammar,
    RefusedRow,
    SamplingParams,
    TextParams,
    Tokenized,
    ToScheduler,
    ToWorker,
    pack_i32,
    unpack_i32,
)
from scheduler_proc.fakes import FakeReader, FakeWorker, alone
from scheduler_proc.scheduler import Scheduler, StepOutput

GATEWAY = "gateway-0"
VOCAB = 512
PAGE = 4


def request(rid: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Tokenized:
    """A request; fields of SamplingParams and of Tokenized by name."""
    sampling = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
    forced = fields.pop("forced", 0)
    grammar = Grammar(kind="regex", text=str(forced)) if forced else None
    return Tokenized(
        rid=rid, gateway=fields.pop("gateway", GATEWAY), input_ids=pack_i32(prompt), text=TextParams(), grammar=grammar,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling), **fields,
    )  # fmt: skip


def expected(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What the fake worker gives a request that has it for itself."""
    return alone(prompt, max_tokens, stop, VOCAB)


class Rig:
    """``step`` gives the scheduler what the worker and the test have for it; ``work`` runs the oldest order."""

    def __init__(self, *, pages: int = 64, slots: int = 16, radix: bool = True, context_len: int = 512,
                 tile_tokens: int = 1, start: bool = True, **scheduler: Any) -> None:  # fmt: skip
        scheduler.setdefault("chunked_prefill_size", 64)
        scheduler.setdefault("max_running_requests", 8)
        self.config = ServerConfig(
            scheduler=SchedulerConfig(**scheduler), cache=CacheConfig(page_size=PAGE, disable_radix_cache=not radix)
        )
        self.worker = FakeWorker(
            num_pages=pages, page_size=PAGE, context_len=context_len, vocab_size=VOCAB, max_slots=slots,
            tile_tokens=tile_tokens,
        )  # fmt: skip
        self.scheduler = Scheduler(self.config)
        self.reader = FakeReader()
        self.inbox: list[ToScheduler] = []
        self.orders: deque[ToWorker] = deque()
        self.now = 100.0
        self.out = StepOutput()
        if start:
            self.step(self.worker.ready())
            self.work()
            self.step()

    def step(self, *messages: ToScheduler, seconds: float = 0.01, **flags: Any) -> list[ForwardBatch]:
        """One step with these messages after those of the worker; the batches it sends."""
        self.now += seconds
        arrived, self.inbox = [*self.inbox, *messages], []
        self.out = self.scheduler.step(arrived, self.now, **flags)
        self.scheduler.check_invariants()
        self.orders.extend(self.out.to_worker)
        if self.out.tokens is not None:
            self.reader.read(self.out.tokens)
        return [order for order in self.out.to_worker if isinstance(order, ForwardBatch)]

    def work(self) -> None:
        """The worker executes its oldest order."""
        if self.orders:
            self.inbox += self.worker.handle(self.orders.popleft())

    def turn(self, *messages: ToScheduler) -> list[ForwardBatch]:
        """Work, then step."""
        self.work()
        return self.step(*messages)

    def finish(self, turns: int = 400) -> None:
        """Until nothing runs."""
        for _ in range(turns):
            if self.scheduler.idle and not self.orders and not self.inbox:
                return
            self.turn()
        raise AssertionError("it does not come to an end")

    def abort(self, rid: str) -> list[ForwardBatch]:
        return self.step(Abort(rid=rid, gateway=GATEWAY))

    def lease(self, gateway: str = GATEWAY, generation: int = 0, **fields: Any) -> GatewayLease:
        return GatewayLease(gateway=gateway, address=f"ipc://{gateway}", generation=generation, **fields)

    def ids(self, rid: str) -> list[int]:
        return self.reader.streams[rid].ids

    def reason(self, rid: str) -> str | None:
        finish = self.reader.streams[rid].finish
        return None if finish is None else finish.reason

    def status(self, rid: str) -> int | None:
        """HTTP status of a refusal or failure."""
        finish = self.reader.streams[rid].finish
        return None if finish is None or finish.error is None else finish.error.status

    @property
    def refused(self) -> list[RefusedRow]:
        return [] if self.out.tokens is None else list(self.out.tokens.refused)

    @property
    def free(self) -> int:
        return self.scheduler.state.need_pool().allocator.num_free

    @property
    def cached(self) -> int:
        return self.scheduler.state.need_pool().tree.num_pages


def rows(batch: ForwardBatch) -> list[tuple[int, int, int]]:
    """(slot, prefill tokens, new pages) of each row."""
    columns = (batch.slots, batch.num_tokens, batch.num_new_pages)
    return list(zip(*(unpack_i32(column).tolist() for column in columns), strict=True))

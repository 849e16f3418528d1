"""The whole scheduler against a fake worker, fake clients, and everything that can go wrong between them.

After every step the page equation and all counts hold; every rid gets one terminal message; the tokens that come out
are those the worker gives that request alone; and once clients stop coming, everybody is served.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.config import CacheConfig, SchedulerConfig, ServerConfig
from common.messages import (
    Abort,
    Control,
    Finish,
    Fleet,
    ForwardBatch,
    GatewayLease,
    Grammar,
    SamplingParams,
    StopHit,
    TextParams,
    Tokenized,
    ToScheduler,
    ToWorker,
    pack_i32,
)
from scheduler_proc import batch, commit, draft, output, slots
from scheduler_proc.fakes import FakeReader, FakeWorker, WorkerCrash, alone, logprob_of
from scheduler_proc.scheduler import Scheduler

GATEWAY = "gateway-0"
EOS = 5
VOCAB = 48


def seconds_of(prefill_tokens: int, decode_rows: int) -> float:
    """Of a step: prompts are in chunks beside decoding rows."""
    return 0.01 + 0.001 * (prefill_tokens + decode_rows)


@dataclass
class Client:
    """One rid as its gateway knows it."""

    message: Tokenized
    expected: list[int]
    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    aborted: bool = False
    stopped_at: int = -1


class Driver:
    """Scheduler, worker, detokenizer and gateway, with queues between them that the test moves along."""

    def __init__(
        self, policy: str = "fcfs", *, pages: int = 20, page_size: int = 4, chunk: int = 16, radix: bool = True,
        max_drafts: int = 0, tile_tokens: int = 1,
    ) -> None:  # fmt: skip
        self.config = ServerConfig(
            scheduler=SchedulerConfig(
                schedule_policy=policy,  # type: ignore[arg-type]
                chunked_prefill_size=chunk,
                max_running_requests=6,
                max_queued_requests=1000,
                priority_preemption_threshold=1,
            ),
            cache=CacheConfig(page_size=page_size, disable_radix_cache=not radix),
        )
        self.worker = FakeWorker(
            num_pages=pages, page_size=page_size, context_len=200, vocab_size=VOCAB, max_slots=8,
            max_drafts=max_drafts, tile_tokens=tile_tokens, cost=seconds_of,
        )  # fmt: skip
        self.generations = {"scheduler-0": 0, "detokenizer-0": 0, "worker-0": 0}
        self.clients: dict[str, Client] = {}
        self.now = 1000.0
        self.replies: dict[str, int] = {}
        self.num_controls = 0
        self.twin: Scheduler | None = None
        """Restored from a snapshot; must decide the same from then on."""
        self.detokenizer_full = False
        self.start_scheduler()

    # ------------------------------------------------------------------ processes

    def start_scheduler(self) -> None:
        """A new scheduler finds a worker that runs (or starts) and no memory of anything."""
        self.scheduler = Scheduler(self.config, self.generations["scheduler-0"])
        self.twin = None
        self.reader = FakeReader()
        self.to_worker: deque[ToWorker] = deque()
        self.to_scheduler: deque[ToScheduler] = deque([self.worker.ready()])
        self.lease()

    def restart_scheduler(self) -> None:
        self.generations["scheduler-0"] += 1
        self.replies = {name: status for name, status in self.replies.items() if status}  # gateways give up on these
        self.start_scheduler()
        self.resubmit_all()

    def restart_detokenizer(self) -> None:
        self.generations["detokenizer-0"] += 1
        self.reader = FakeReader(successor=True)
        self.to_scheduler.append(Fleet(generations=dict(self.generations)))
        self.resubmit_all()

    def restart_worker(self) -> None:
        """What was on its way to it reaches its successor, which recognises the epoch."""
        self.generations["worker-0"] += 1
        old = self.worker
        self.worker = FakeWorker(
            num_pages=old.num_pages, page_size=old.page_size, context_len=200, vocab_size=VOCAB, max_slots=8,
            generation=self.generations["worker-0"], poison=old.poison, max_drafts=old.max_drafts,
            tile_tokens=old.tile_tokens, cost=old.cost,
        )  # fmt: skip
        self.to_scheduler.append(self.worker.ready())

    def resubmit_all(self) -> None:
        for client in self.clients.values():
            if client.finish is None:
                message = client.message
                client.message = Tokenized(
                    rid=message.rid, gateway=GATEWAY, attempt=message.attempt + 1, group=message.group,
                    input_ids=message.input_ids, sampling=message.sampling, eos_token_ids=message.eos_token_ids,
                    text=message.text, priority=message.priority, cache_salt=message.cache_salt,
                    grammar=message.grammar, output_ids=pack_i32(client.ids), deadline=message.deadline,
                )  # fmt: skip
                self.to_scheduler.append(client.message)
                client.stopped_at = -1
                if client.aborted:
                    self.abort(message.rid)

    def fork(self) -> None:
        data = self.scheduler.snapshot()
        self.twin = Scheduler.restore(self.config, self.generations["scheduler-0"], data)
        self.twin.check_invariants()
        assert self.twin.snapshot() == data

    # ------------------------------------------------------------------ clients

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        group: str | None = None,
        salt: str = "",
        priority: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        forced: int = 0,
        wait_s: float = 0.0,
    ) -> str:
        rid = f"r{len(self.clients)}"
        grammar = Grammar(kind="regex", text=str(forced)) if forced else None
        message = Tokenized(
            rid=rid, gateway=GATEWAY, group=group, input_ids=pack_i32(prompt), eos_token_ids=(EOS,), text=TextParams(),
            sampling=SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
            priority=priority, cache_salt=salt, grammar=grammar, deadline=self.now + wait_s if wait_s else None,
        )  # fmt: skip
        self.clients[rid] = Client(message, alone(prompt, max_tokens, frozenset({EOS}), VOCAB))
        self.to_scheduler.append(message)
        return rid

    def abort(self, rid: str) -> None:
        self.clients[rid].aborted = True
        self.to_scheduler.append(Abort(rid=rid, gateway=GATEWAY))

    def stop_hit(self, rid: str) -> None:
        """The detokenizer finds a stop string in what it has: it ends the request itself."""
        client, stream = self.clients[rid], self.reader.streams.get(rid)
        if client.finish is None and stream is not None and stream.ids and stream.attempt == client.message.attempt:
            client.stopped_at = len(stream.ids) - 1
            client.finish = Finish("stop", "x")
            stream.stopped = True
            self.to_scheduler.append(StopHit(rid=rid, attempt=stream.attempt, index=client.stopped_at, stop="x"))

    def lease(self) -> None:
        self.to_scheduler.append(GatewayLease(gateway=GATEWAY, address="ipc://g", generation=0))

    def flush(self, timeout_s: float) -> None:
        self.num_controls += 1
        name = f"flush-{self.num_controls}"
        self.replies[name] = 0
        self.to_scheduler.append(Control(request_id=name, gateway=GATEWAY, action="flush_cache", timeout_s=timeout_s))

    # ------------------------------------------------------------------ time

    def step(self, num_messages: int = 100) -> None:
        self.now += 0.01
        if int(self.now * 100) % 50 == 0:
            self.lease()
        messages = [self.to_scheduler.popleft() for _ in range(min(num_messages, len(self.to_scheduler)))]
        out = self.scheduler.step(messages, self.now, detokenizer_full=self.detokenizer_full)
        self.scheduler.check_invariants()
        self.check_order(out.to_worker)
        if self.twin is not None:
            assert self.twin.step(messages, self.now, detokenizer_full=self.detokenizer_full) == out
        self.to_worker.extend(out.to_worker)
        for _, reply in out.replies:
            assert self.replies[reply.request_id] == 0, "answered twice"
            self.replies[reply.request_id] = reply.status
        if out.tokens is not None:
            assert not self.detokenizer_full
            assert not out.tokens.gone_gateways
            self.reader.read(out.tokens)
            self.hear()

    def check_order(self, orders: list[ToWorker]) -> None:
        """While a request with output is half computed, no prompt of one that never ran is, unless it outranks it."""
        pool, last = self.scheduler.state.pool, orders[-1] if orders else None
        if pool is None or self.scheduler.state.suspects or not isinstance(last, ForwardBatch):
            return
        table, flight = pool.table, pool.in_flight[-1]
        resumed = [req.rank for req in table.half_computed() if table.known[req.slot] > req.prompt_len]
        if resumed:
            for slot, chunk in zip(flight.slots, flight.chunks, strict=True):
                req = table.reqs[slot]
                assert req is not None
                assert chunk == 0 or table.known[slot] > table.prompt[slot] or req.rank > min(resumed)

    def work(self) -> None:
        if self.to_worker:
            try:
                self.to_scheduler.extend(self.worker.handle(self.to_worker.popleft()))
            except WorkerCrash:
                self.restart_worker()

    def hear(self) -> None:
        """The gateway takes what is new, and checks it against what the request gives alone."""
        for rid, stream in self.reader.streams.items():
            client = self.clients[rid]
            if client.finish is not None or stream.attempt < client.message.attempt:
                continue
            sampling = client.message.sampling
            assert stream.ids == client.expected[: len(stream.ids)], rid
            if sampling.logprobs is not None and client.message.attempt == 0:
                assert stream.logprobs == [logprob_of(token) for token in stream.ids]
            if sampling.prompt_logprobs is not None and stream.ids and client.message.attempt == 0:
                prompt = list(map(int, _ids(client.message.input_ids)))
                assert stream.prompt_logprobs == [logprob_of(token) for token in prompt[1:]]
            client.ids = max(client.ids, stream.ids, key=len)
            if stream.finish is not None:
                self.end(rid, client, stream.finish)

    def end(self, rid: str, client: Client, finish: Finish) -> None:
        client.finish = finish
        if finish.reason == "abort":
            assert client.aborted or client.message.deadline is not None, rid
        elif finish.reason == "length" and finish.message:
            assert "KV cache" in finish.message
        elif finish.reason == "error":
            # two restarts while it ran alone look like its fault
            allowed = ("context_length_exceeded", "worker_crash", "deadline")
            assert finish.error is not None and finish.error.code in allowed, finish
        else:
            assert client.ids == client.expected, rid
            assert finish.reason == ("stop" if client.expected[-1:] == [EOS] else "length")

    def drain(self, limit: int = 4000) -> None:
        """Nobody comes any more: everybody must be served, and every page come back."""
        self.detokenizer_full = False
        for _ in range(limit):
            self.step()
            self.work()
            if self.scheduler.idle and not self.to_scheduler and not self.to_worker:
                break
        unfinished = [rid for rid, client in self.clients.items() if client.finish is None]
        assert not unfinished, unfinished
        assert not self.scheduler.state.reqs
        pool = self.scheduler.state.need_pool()
        assert pool.allocator.num_free + pool.tree.num_pages == pool.allocator.num_pages
        assert pool.tree.num_locked == 0
        self.now += 100.0
        self.lease()
        self.step()
        assert all(self.replies.values()), self.replies
        assert not self.scheduler.state.pending_prefixes and not self.scheduler.state.leaders


def _ids(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


FAMILIES = [[(7 * f + i) % 11 + 6 for i in range(40)] for f in range(3)]
"""Prompts are beginnings of these with a tail of their own, so that prefixes are shared."""


def prompt_of(rng: random.Random) -> list[int]:
    family = rng.choice(FAMILIES)
    return family[: rng.randrange(0, 24)] + [rng.randrange(6, 30) for _ in range(rng.randrange(1, 9))]


def submit_something(driver: Driver, rng: random.Random) -> None:
    kind = rng.randrange(8)
    prompt, max_tokens = prompt_of(rng), rng.randrange(1, 30)
    salt, priority = rng.choice(["", "", "", "s"]), rng.choice([0, 0, 1, 5])
    if kind == 0:
        group = f"g{len(driver.clients)}"
        for _ in range(rng.randrange(2, 5)):
            driver.submit(prompt, max_tokens, group=group, salt=salt, priority=priority)
    elif kind == 1:
        driver.submit(prompt, max_tokens, logprobs=rng.choice([0, 2]), salt=salt)
    elif kind == 2:
        driver.submit(prompt, rng.choice([0, max_tokens]), prompt_logprobs=rng.choice([0, 1]))
    elif kind == 3:
        driver.submit(prompt, max_tokens, forced=rng.randrange(1, 9), logprobs=rng.choice([None, 1]))
    elif kind == 4:
        driver.submit(prompt * 4, rng.choice([1, 60]))
    elif kind == 5:
        driver.submit(prompt, max_tokens, wait_s=rng.choice([0.02, 0.2, 1.0]))
    else:
        driver.submit(prompt, max_tokens, salt=salt, priority=priority)


def disturb(driver: Driver, rng: random.Random) -> None:
    """Something that does not happen every day."""
    open_rids = [rid for rid, client in driver.clients.items() if client.finish is None]
    match rng.randrange(12):
        case 0 | 1 | 2 if open_rids:
            driver.abort(rng.choice(open_rids))
        case 3 if open_rids:
            driver.stop_hit(rng.choice(open_rids))
        case 4:
            driver.restart_worker()
        case 5:
            driver.restart_scheduler()
        case 6:
            driver.restart_detokenizer()
        case 7:
            driver.flush(rng.choice([0.0, 0.5]))
        case 8:
            driver.detokenizer_full = not driver.detokenizer_full
        case 9 | 10:
            driver.fork()
        case 11 if open_rids:
            rid = rng.choice(open_rids)
            prompt_len = len(driver.clients[rid].message.input_ids) // 4
            driver.worker.poison[rid] = rng.randrange(prompt_len + 8)
        case _:
            pass


@pytest.mark.parametrize("seed", range(24))
def test_a_storm_of_requests_and_failures_leaves_every_stream_right(seed: int) -> None:
    storm(random.Random(seed))


@pytest.mark.parametrize("seed", range(100, 106))
def test_a_storm_whose_steps_are_array_operations_does_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch, commit, draft, output, slots):
        monkeypatch.setattr(module, "FEW", -1)
    storm(random.Random(seed))


@pytest.mark.parametrize("seed", range(200, 206))
def test_a_storm_whose_chunks_fill_tiles_does_too(seed: int) -> None:
    storm(random.Random(seed), tile_tokens=5)


def storm(rng: random.Random, tile_tokens: int = 1) -> None:
    driver = Driver(
        rng.choice(["fcfs", "lpm", "priority"]),
        pages=rng.choice([12, 20, 60]),
        page_size=rng.choice([1, 2, 4, 8]),
        chunk=rng.choice([5, 16, 200]) if tile_tokens == 1 else 0,
        radix=rng.random() < 0.8,
        max_drafts=rng.choice([0, 1, 5]),
        tile_tokens=tile_tokens,
    )
    for _ in range(300):
        match rng.randrange(20):
            case 0 | 1 | 2:
                submit_something(driver, rng)
            case 3 if rng.random() < 0.5:
                disturb(driver, rng)
            case n if n < 12:
                driver.step(rng.choice([1, 2, 100]))
            case _:
                driver.work()
    driver.drain()


class SchedulerMachine(RuleBasedStateMachine):
    """The same, with Hypothesis choosing (and shortening what fails)."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(pages=16, max_drafts=3)

    @rule(seed=st.integers(0, 1 << 16))
    def submit(self, seed: int) -> None:
        if len(self.driver.clients) < 40:
            submit_something(self.driver, random.Random(seed))

    @rule(prefix=st.integers(1, 30), n=st.integers(2, 4), max_tokens=st.integers(1, 12))
    def parallel_samples(self, prefix: int, n: int, max_tokens: int) -> None:
        if len(self.driver.clients) < 40:
            for _ in range(n):
                self.driver.submit(FAMILIES[0][:prefix], max_tokens, group=f"p{prefix}")

    @rule(num=st.integers(0, 3))
    def step(self, num: int) -> None:
        self.driver.step(num)

    @rule()
    def work(self) -> None:
        self.driver.work()

    @rule(turns=st.integers(1, 5))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.driver.step()
            self.driver.work()

    @precondition(lambda self: self.driver.clients)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.clients))))

    @precondition(lambda self: self.driver.clients)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.driver.stop_hit(data.draw(st.sampled_from(sorted(self.driver.clients))))

    @rule(which=st.sampled_from(["worker", "scheduler", "detokenizer"]))
    def restart(self, which: str) -> None:
        getattr(self.driver, f"restart_{which}")()

    @rule(timeout_s=st.sampled_from([0.0, 0.05]))
    def flush(self, timeout_s: float) -> None:
        self.driver.flush(timeout_s)

    @rule()
    def fork(self) -> None:
        self.driver.fork()

    @rule(full=st.booleans())
    def channel(self, full: bool) -> None:
        self.driver.detokenizer_full = full

    @invariant()
    def page_equation(self) -> None:
        self.driver.scheduler.check_invariants()

    def teardown(self) -> None:
        self.driver.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

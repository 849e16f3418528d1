"""Every request's life, put together from the records of all processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from common import config as config_file
from common.messages import Abort, ForwardBatch, Reset, StopHit, Tokenized, WorkerReady, unpack_i32
from common.trace import (
    AnyRecord,
    Arrived,
    Finished,
    SchedulerStep,
    TextOut,
    TokenizedAt,
    WorkerStep,
    Written,
)
from tools.replay.reader import Segment
from tools.replay.rerun import open_scheduler
from tools.replay.rows import RowDone, SlotReader, StepDone


@dataclass(slots=True)
class Stay:
    """One stay among the running requests: from admission until it ends, is preempted, or the worker dies."""

    began: float
    step: int
    slot: int
    known_len: int
    """Ids it came with: the prompt, and what it had generated before."""
    cached_len: int
    num_pages: int
    ended: float = -1.0
    """When its slot was given back; -1: not in the trace."""
    why: str = ""
    """preempted, worker lost; empty: the request ended."""


@dataclass(frozen=True, slots=True)
class RowTime:
    """A row of a step that computed something for the request."""

    step: int
    decided: float
    started: float
    ended: float
    returned: float
    row: RowDone
    prefill_tokens: int
    """Of the whole step: what this row shared its time with."""
    num_rows: int


@dataclass(slots=True)
class Life:
    """One rid. Times are time.time(), -1 where the trace has none."""

    rid: str
    arrivals: list[Arrived] = field(default_factory=list)
    tokenized: float = -1.0
    prompt_len: int = 0
    queued: float = -1.0
    max_tokens: int = 0
    stays: list[Stay] = field(default_factory=list)
    rows: list[RowTime] = field(default_factory=list)
    text: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(time, index of the first id, ids, characters) handed to the gateway."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What happened to it from outside: aborts, stop hits, resubmissions, preemptions and why."""
    written: float = -1.0
    finished: Finished | None = None
    reason: str = ""
    """Of its end, as the scheduler told the detokenizer; also ``stop`` when that one told the scheduler."""

    @property
    def began(self) -> float:
        """The first that is known of it."""
        known = [self.arrivals[0].time] if self.arrivals else []
        return min(known + [t for t in (self.queued, self.tokenized) if t >= 0], default=-1.0)

    @property
    def ended(self) -> float:
        """The last that is known of it."""
        times = [self.finished.time] if self.finished else []
        times += [t[0] for t in self.text[-1:]] + [row.returned for row in self.rows[-1:]]
        return max(times, default=self.began)

    @property
    def ending(self) -> str:
        """The gateway's word for it, else the scheduler's; ``ended``: only the slot's end is known."""
        if self.finished is not None:
            return self.finished.reason
        if self.reason:
            return self.reason
        last = self.stays[-1] if self.stays else None
        return "ended" if last is not None and last.ended >= 0 and not last.why else "open"

    @property
    def num_outputs(self) -> int:
        """Tokens sampled for it."""
        return sum(len(timed.row.ids) for timed in self.rows)

    @property
    def first_token(self) -> float:
        """When the scheduler had its first token; -1: never."""
        return next((timed.returned for timed in self.rows if timed.row.ids), -1.0)

    @property
    def waits(self) -> list[tuple[float, float, str]]:
        """(from, to, why) of its times in the queue."""
        out = []
        at, why = self.queued, "new"
        for stay in self.stays:
            if at >= 0:
                out.append((at, stay.began, why))
            at, why = stay.ended, stay.why
        if at >= 0 and why:
            out.append((at, self.ended, why))
        return out


@dataclass
class Run:
    """A recorded run: lives by rid, steps in order, what held the queue's head."""

    lives: dict[str, Life] = field(default_factory=dict)
    steps: list[StepDone] = field(default_factory=list)
    held: list[tuple[float, str]] = field(default_factory=list)
    """(time, words), whenever the words changed; empty words: nothing waited."""
    worker_steps: dict[str, list[WorkerStep]] = field(default_factory=dict)
    """By process name and generation."""
    decisions: list[tuple[int, SchedulerStep]] = field(default_factory=list)
    """(generation, record) of every scheduler step."""
    lost: list[float] = field(default_factory=list)
    """When a worker's run ended (a Reset for another epoch)."""
    page_size: int = 16
    num_pages: int = 0

    def life(self, rid: str) -> Life:
        """The life of a rid, begun here if it is new."""
        if rid not in self.lives:
            self.lives[rid] = Life(rid)
        return self.lives[rid]

    @property
    def began(self) -> float:
        """The first time in the trace that anything happened to a request, else of any step."""
        times = [life.began for life in self.lives.values() if life.began >= 0]
        return min(times, default=self.decisions[0][1].now if self.decisions else 0.0)

    def held_between(self, start: float, end: float) -> list[tuple[float, float, str]]:
        """(from, to, words) of what held the head of the queue in a time."""
        out = []
        for i, (at, words) in enumerate(self.held):
            until = self.held[i + 1][0] if i + 1 < len(self.held) else float("inf")
            if words and at < end and until > start:
                out.append((max(at, start), min(until, end), words))
        return out


def read_lives(segments: Iterable[Segment]) -> Run:
    """Put a run together. Schedulers' records first, so that every rid is known."""
    segments = list(segments)
    run = Run()
    mine = [segment for segment in segments if segment.start.role == "scheduler"]
    for generation, group in groupby(mine, key=lambda segment: segment.start.generation):
        reader = _SchedulerReader(run, generation)
        for number, segment in enumerate(group):
            if number == 0:
                reader.begin(segment)
            reader.read(segment.records)
    for segment in segments:
        name = f"{segment.start.role}-{segment.start.index}.{segment.start.generation}"
        for record in segment.records:
            _take(run, name, record)
    return run


def _take(run: Run, name: str, record: AnyRecord) -> None:
    match record:
        case Arrived():
            life = run.life(record.rid)
            if record.attempt:
                life.notes.append((record.time, f"the gateway submitted it again (attempt {record.attempt})"))
            life.arrivals.append(record)
        case TokenizedAt():
            life = run.life(record.rid)
            life.tokenized = record.time if life.tokenized < 0 else life.tokenized
            life.prompt_len = record.num_tokens
        case TextOut():
            for rid, index, num_ids, num_chars in record.rows:
                run.life(rid).text.append((record.time, index, num_ids, num_chars))
        case Written():
            run.life(record.rid).written = record.time
        case Finished():
            run.life(record.rid).finished = record
        case WorkerStep():
            run.worker_steps.setdefault(name, []).append(record)


class _SchedulerReader:
    """Follows one scheduler process."""

    def __init__(self, run: Run, generation: int) -> None:
        self.run = run
        self.generation = generation
        self.slots = SlotReader()
        self.in_slot: dict[int, str] = {}
        """Whose slot it is, as the scheduler sees it (a step or two ahead of the worker)."""
        self.epoch = 0

    def begin(self, segment: Segment) -> None:
        """The first segment there is: earlier ones may have been deleted, so take over what runs and waits."""
        scheduler = open_scheduler(config_file.load(segment.start.config), segment)
        state = scheduler.state
        self.epoch = state.epoch if state.pool is not None else 0
        self.slots.resume(scheduler)
        if state.pool is not None:
            self.run.page_size, self.run.num_pages = state.pool.page_size, state.pool.allocator.num_pages
            for req in state.pool.table.taken():
                self.in_slot[req.slot] = req.rid
                known = state.pool.table.known_len(req)
                stay = Stay(segment.start.time, state.step, req.slot, known, max(req.cached_len, 0), len(req.pages))
                self.run.life(req.rid).stays.append(stay)
        for req in state.reqs.values():
            life = self.run.life(req.rid)
            life.queued, life.prompt_len = req.queued_at, req.prompt_len
            life.max_tokens = req.spec.sampling.max_tokens or 0

    def read(self, records: list[AnyRecord]) -> None:
        """The records that follow, of one segment or several."""
        for record in records:
            if isinstance(record, SchedulerStep):
                self.run.decisions.append((self.generation, record))
                self._inputs(record)
                self._preemptions(record)
                for rid, reason in record.ended:
                    self.run.life(rid).reason = reason
                self._orders(record)
                if not self.run.held or self.run.held[-1][1] != record.held:
                    self.run.held.append((record.now, record.held))

    def _inputs(self, record: SchedulerStep) -> None:
        run = self.run
        for message in record.messages:
            match message:
                case Tokenized():
                    life = run.life(message.rid)
                    if life.queued < 0:
                        life.queued = record.now
                        life.prompt_len = len(message.input_ids) // 4
                        life.max_tokens = message.sampling.max_tokens or 0
                case Abort():
                    run.life(message.rid).notes.append((record.now, f"abort: {message.reason}"))
                case StopHit():
                    words = f"the detokenizer found {message.stop!r} complete at output {message.index}"
                    life = run.life(message.rid)
                    life.notes.append((record.now, words))
                    life.reason = life.reason or "stop"
                case WorkerReady():
                    run.page_size = self.slots.page_size = message.page_size
                    run.num_pages = message.num_pages
        for done in self.slots.steps([record]):
            self._returned(done)

    def _returned(self, done: StepDone) -> None:
        self.run.steps.append(done)
        result = done.result
        ended = result.started + result.forward_s + result.sample_s
        prefill = sum(row.chunk for row in done.rows)
        for row in done.rows:
            if row.num_tokens:
                self.run.life(row.rid).rows.append(
                    RowTime(
                        result.step, done.decided, result.started, ended, done.returned, row, prefill, len(done.rows)
                    )
                )

    def _preemptions(self, record: SchedulerStep) -> None:
        """The slot is given back later, once the rows in flight have returned."""
        for rid, why in record.preempted:
            life = self.run.life(rid)
            life.notes.append((record.now, f"preempted: {why}"))
            if life.stays and life.stays[-1].ended < 0:
                life.stays[-1].why = "preempted"

    def _orders(self, record: SchedulerStep) -> None:
        for order in record.orders:
            if isinstance(order, Reset) and order.epoch != self.epoch:
                self.epoch = order.epoch
                if self.in_slot:
                    self.run.lost.append(record.now)
                for rid in self.in_slot.values():
                    self._leave(rid, record.now, "worker lost")
                self.in_slot.clear()
                self.slots.slots.clear()
            elif isinstance(order, ForwardBatch):
                self._batch(order, record.now)

    def _batch(self, batch: ForwardBatch, now: float) -> None:
        for begin in batch.begins:
            life = self.run.life(begin.rid)
            if life.stays and life.stays[-1].ended >= 0 and not life.stays[-1].why:
                life.stays[-1].why = "preempted"
            self.in_slot[begin.slot] = begin.rid
            life.stays.append(
                Stay(now, batch.step, begin.slot, len(begin.ids) // 4, begin.computed_len, len(begin.pages) // 4)
            )
        for slot in unpack_i32(batch.ends).tolist():
            if slot in self.in_slot and not any(begin.slot == slot for begin in batch.begins):
                self._leave(self.in_slot.pop(slot), now, "")

    def _leave(self, rid: str, now: float, why: str) -> None:
        stays = self.run.life(rid).stays
        if stays and stays[-1].ended < 0:
            stays[-1].ended, stays[-1].why = now, stays[-1].why or why

"""A run as Chrome trace events (JSON), which ui.perfetto.dev and chrome://tracing open.

One track per process, in the order in which a request passes them, then one per request, and counters of the
pool and the queue. An arrow leads from each decision of the scheduler to the worker's step. Names are chosen for
the viewers: both colour a slice by its name with the numbers left out.

The format: "Trace Event Format", Google, 2016. Times are microseconds since the first request arrived; what the
processes did before (starting, and waiting for somebody to ask) is left out.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.messages import unpack_i32
from common.trace import Arrived, Finished, SchedulerStep, TextOut, TokenizedAt, WorkerStep, Written
from tools.replay.lives import Life, Run
from tools.replay.reader import Segment
from tools.replay.timeline import headline, ms, phases, waiting_times

ROLES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
"""Tracks from top to bottom."""
REQUESTS_PID = 1000
Event = dict[str, Any]


def write_perfetto(path: Path, run: Run, segments: Sequence[Segment]) -> int:
    """Write the file; returns the number of events."""
    events = make_events(run, segments)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
    return len(events)


def make_events(run: Run, segments: Sequence[Segment]) -> list[Event]:
    """All events: names first, then by time, a slice before what is inside it."""
    zero = _zero(run, segments)
    events = list(_requests(run))
    events += _Processes(run, zero).events(segments)
    for event in events:
        if event["ph"] != "M":
            event["ts"] = _us(event["ts"] - zero)
        if event["ph"] == "X":
            event["dur"] = _us(event.pop("end") - zero) - event["ts"]
    kept = [event for event in events if event["ph"] == "M" or event["ts"] >= 0]
    return sorted(kept, key=lambda event: (event["ph"] != "M", event.get("ts", 0), -event.get("dur", 0)))


def _us(seconds: float) -> int:
    """Whole microseconds: with fractions, viewers round ends and starts apart, and drop what overlaps."""
    return math.floor(seconds * 1e6)


def _zero(run: Run, segments: Sequence[Segment]) -> float:
    began = [life.began for life in run.lives.values() if life.began >= 0]
    if began:
        return min(began)
    return min((segment.start.time for segment in segments), default=0.0)


def _named(kind: str, pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    """Name and place of a process or thread."""
    yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _span(name: str, category: str, start: float, end: float, **args: object) -> Event:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "end": max(start, end), "args": args}


def _instant(name: str, category: str, at: float, **args: object) -> Event:
    return {"ph": "i", "s": "t", "name": name, "cat": category, "ts": at, "args": args}


# --------------------------------------------------------------------------- requests


def _requests(run: Run) -> Iterator[Event]:
    lives = sorted((life for life in run.lives.values() if life.began >= 0), key=lambda life: life.began)
    yield from _named("process", REQUESTS_PID, 0, "requests", len(ROLES) + 1)
    for number, life in enumerate(lives, 1):
        tid = REQUESTS_PID + number
        yield from _named("thread", REQUESTS_PID, tid, life.rid, number)
        for event in _life(run, life):
            yield {**event, "pid": REQUESTS_PID, "tid": tid}


def _life(run: Run, life: Life) -> Iterator[Event]:
    """One request's track: the whole; inside it waiting and steps; inside the waiting its reasons."""
    name = f"{life.ending}: {life.prompt_len} prompt + {life.num_outputs} generated"
    times = {phase: ms(seconds) for phase, seconds in phases(life).items()}
    yield _span(name, "request", life.began, life.ended, summary=headline(life), **times)
    if life.arrivals and life.tokenized >= 0:
        # The tokenizer's record is written after the message went out; the scheduler may have been faster.
        end = min(life.tokenized, life.queued) if life.queued >= 0 else life.tokenized
        yield _span("tokenize", "tokenizer", life.arrivals[0].time, end, tokens=life.prompt_len)
    for start, end, why in life.waits:
        yield _span("wait" if why == "new" else f"wait, {why}", "queue", start, end)
        for a, b, words in waiting_times(run, life, start, end):
            kind, _, numbers = words.partition(": ")
            front, behind, kind = kind.rpartition(", ")
            if behind:
                yield _span(f"behind another: {kind}", "queue", a, b, first=front.partition(" ")[2], why=numbers)
            else:
                yield _span(kind, "queue", a, b, why=numbers)
    yield from _rows(life)
    for at, words in life.notes:
        yield _instant(words.partition(":")[0], "note", at, words=words)
    if life.written >= 0:
        yield _instant("first content written", "gateway", life.written)
    if life.finished is not None:
        yield _instant(f"finished: {life.finished.reason}", "gateway", life.finished.time)


def _rows(life: Life) -> Iterator[Event]:
    """Its part in steps, and how long the first of each stay was on its way to the worker."""
    begun = {stay.step: stay.began for stay in life.stays}
    for timed in life.rows:
        row = timed.row
        if timed.step in begun:
            yield _span("in the worker's inbox", "step", begun[timed.step], timed.started, step=timed.step)
        yield _span(
            f"prefill {row.num_tokens}" if row.chunk else "decode", "step", timed.started, timed.ended,
            step=timed.step, position=row.start, ids=list(row.ids), other_rows=timed.num_rows - 1,
        )  # fmt: skip


# --------------------------------------------------------------------------- processes


@dataclass
class _Processes:
    """The tracks of the processes, with the arrows between them."""

    run: Run
    zero: float
    arrows: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, step) -> number of the arrow, for steps of which the trace has both ends."""

    def events(self, segments: Sequence[Segment]) -> Iterator[Event]:
        """Of all processes; one thread per generation, whose number is its real process id."""
        first_rank = [segment for segment in segments if segment.start.index == 0]
        executed = {(r.epoch, r.step) for s in first_rank for r in s.records if isinstance(r, WorkerStep)}
        batches = (record.batch for _, record in self.run.decisions if record.now >= self.zero)
        decided = {(batch.epoch, batch.step) for batch in batches if batch is not None}
        self.arrows = {step: number for number, step in enumerate(sorted(executed & decided), 1)}
        names = sorted({(ROLES.index(s.start.role), s.start.index) for s in segments})
        pids = {name: number for number, name in enumerate(names, 1)}
        for (role, index), pid in pids.items():
            yield from _named("process", pid, 0, f"{ROLES[role]}-{index}", pid)
        for segment in segments:
            start = segment.start
            pid = pids[ROLES.index(start.role), start.index]
            if start is _first_of_process(segments, segment):
                yield from _named("thread", pid, start.pid, f"generation {start.generation}", start.generation)
            for event in self._segment(segment):
                yield {"pid": pid, "tid": start.pid, **event}

    def _segment(self, segment: Segment) -> Iterator[Event]:
        starts = [record.now for record in segment.records if isinstance(record, SchedulerStep)]
        ends = iter([*starts[1:], math.inf])  # a simulated clock may not wait for the deciding
        for record in segment.records:
            match record:
                case SchedulerStep():
                    yield from self._scheduler_step(record, next(ends))
                case WorkerStep():
                    yield from self._worker_step(record)
                    if segment.start.index == 0:  # of several ranks the first: an arrow has one end
                        yield from self._arrow("f", record.epoch, record.step, record.started)
                case TextOut():
                    chars = sum(row[3] for row in record.rows)
                    yield _instant("text", "detokenizer", record.time, requests=len(record.rows), characters=chars)
                case TokenizedAt():
                    yield _instant("tokenized", "tokenizer", record.time, rid=record.rid, tokens=record.num_tokens)
                case Arrived():
                    yield _instant("arrived", "gateway", record.time, rid=record.rid, attempt=record.attempt)
                case Written():
                    yield _instant("first content", "gateway", record.time, rid=record.rid)
                case Finished():
                    yield _instant(f"finished: {record.reason}", "gateway", record.time, rid=record.rid)

    def _arrow(self, phase: str, epoch: int, step: int, at: float) -> Iterator[Event]:
        """One end of an arrow; none where the other end is not in the trace."""
        number = self.arrows.get((epoch, step))
        if number is not None:
            event = {"ph": phase, "name": "step", "cat": "step", "id": number, "ts": at}
            yield event | ({"bp": "e"} if phase == "f" else {})

    def _worker_step(self, record: WorkerStep) -> Iterator[Event]:
        name = f"prefill {record.num_prefill_tokens} tokens" if record.num_prefill_tokens else "decode"
        yield _span(f"{name}, {record.num_rows} rows", "step", record.started, record.ended, step=record.step)

    def _scheduler_step(self, record: SchedulerStep, before: float) -> Iterator[Event]:
        """A decision, which ended ``before`` the next began."""
        if not record.messages and not record.orders:
            return  # it woke and nothing was due
        batch = record.batch
        args: dict[str, object] = {"messages": dict(Counter(type(message).__name__ for message in record.messages))}
        if batch is not None:
            chunks = unpack_i32(batch.num_tokens)
            args |= {"rows": len(chunks), "prefill_tokens": int(chunks.sum())}
            args |= {"begins": [begin.rid for begin in batch.begins]} if batch.begins else {}
        args |= {"ended": [rid for rid, _ in record.ended]} if record.ended else {}
        args |= {"preempted": dict(record.preempted)} if record.preempted else {}
        args |= {"held": record.held} if record.held else {}
        name = "no batch" if batch is None else f"batch {batch.step}"
        yield _span(name, "scheduler", record.now, min(record.now + record.took_s, before), **args)
        if batch is not None:
            yield from self._arrow("s", batch.epoch, batch.step, record.now)
        yield from self._counters(record)

    def _counters(self, record: SchedulerStep) -> Iterator[Event]:
        idle = record.free_pages + record.cached_pages
        if idle or record.num_running:  # there is a pool
            pages = {"in use": max(self.run.num_pages - idle, 0), "cached": record.cached_pages,
                     "free": record.free_pages}  # fmt: skip
            yield {"ph": "C", "name": "KV pages", "ts": record.now, "args": pages}
        requests = {"running": record.num_running, "waiting": record.num_waiting}
        yield {"ph": "C", "name": "requests", "ts": record.now, "args": requests}


def _first_of_process(segments: Sequence[Segment], segment: Segment) -> object:
    """The start of the first segment of the same process and generation."""
    key = (segment.start.role, segment.start.index, segment.start.generation)
    return next(s.start for s in segments if (s.start.role, s.start.index, s.start.generation) == key)

"""A run as Chrome trace events (JSON), which ui.perfetto.dev and chrome://tracing open.

One track per process, one per request, and counters of the pool. The format: "Trace Event Format",
Google, 2016. Times are microseconds since the run's first event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.trace import Arrived, Finished, SchedulerStep, TextOut, TokenizedAt, WorkerStep, Written
from tools.replay.lives import Life, Run
from tools.replay.reader import Segment
from tools.replay.timeline import headline, waiting_times

REQUESTS_PID = 1
_FIRST_PID = 10
Event = dict[str, Any]


def write_perfetto(path: Path, run: Run, segments: Sequence[Segment]) -> int:
    """Write the file; returns the number of events."""
    events = sorted(make_events(run, segments), key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
    return len(events)


def make_events(run: Run, segments: Sequence[Segment]) -> Iterator[Event]:
    """All events, in no particular order."""
    zero = min((_first_time(segment) for segment in segments), default=0.0)
    yield _name("process_name", REQUESTS_PID, 0, "requests")
    lives = sorted((life for life in run.lives.values() if life.began >= 0), key=lambda life: life.began)
    for tid, life in enumerate(lives, 1):
        yield _name("thread_name", REQUESTS_PID, tid, life.rid)
        for event in _life(run, life):
            yield {**event, "pid": REQUESTS_PID, "tid": tid, "ts": _us(event["ts"] - zero)}
    pids: dict[str, int] = {}
    for segment in segments:
        start = segment.start
        name = f"{start.role}-{start.index}"
        if name not in pids:
            pids[name] = _FIRST_PID + len(pids)
            yield _name("process_name", pids[name], 0, name)
        tid = start.generation + 1
        yield _name("thread_name", pids[name], tid, f"generation {start.generation} (pid {start.pid})")
        for event in _process(segment):
            yield {**event, "pid": pids[name], "tid": tid, "ts": _us(event["ts"] - zero)}


def _first_time(segment: Segment) -> float:
    """Of the first record of a request's doing; the start of the segment otherwise."""
    return min([segment.start.time, *(float(event["ts"]) for event in _process(segment))])


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, category: str, start: float, end: float, **args: object) -> Event:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": _us(max(end - start, 0.0)), "args": args}


def _instant(name: str, category: str, at: float, **args: object) -> Event:
    return {"ph": "i", "s": "t", "name": name, "cat": category, "ts": at, "args": args}


def _life(run: Run, life: Life) -> Iterator[Event]:
    """One request's track: the whole, and inside it what it waited for and which steps ran it."""
    yield _span(life.rid, "request", life.began, life.ended, summary=headline(life))
    if life.arrivals and life.tokenized >= 0:
        # The tokenizer's record is written after the message went out; the scheduler may have been faster.
        end = min(life.tokenized, life.queued) if life.queued >= 0 else life.tokenized
        yield _span("tokenize", "tokenizer", life.arrivals[0].time, end, tokens=life.prompt_len)
    for start, end, why in life.waits:
        reasons = {words: f"{(b - a) * 1e3:.3f} ms" for a, b, words in waiting_times(run, life, start, end)}
        yield _span("wait" if why == "new" else f"wait ({why})", "queue", start, end, **reasons)
    for timed in life.rows:
        row = timed.row
        name = f"prefill {row.num_tokens}" if row.chunk else "decode"
        yield _span(name, "step", timed.started, timed.ended, step=timed.step, position=row.start, ids=list(row.ids))
    for at, words in life.notes:
        yield _instant(words, "note", at)
    if life.written >= 0:
        yield _instant("first content written", "gateway", life.written)
    if life.finished is not None:
        yield _instant(f"finished: {life.finished.reason}", "gateway", life.finished.time)


def _process(segment: Segment) -> Iterator[Event]:
    for record in segment.records:
        match record:
            case SchedulerStep():
                yield from _scheduler_step(record)
            case WorkerStep():
                name = f"{record.num_prefill_tokens} prefill tokens" if record.num_prefill_tokens else "decode"
                yield _span(name, "step", record.started, record.ended, step=record.step, rows=record.num_rows)
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
                yield _instant("finished", "gateway", record.time, rid=record.rid, reason=record.reason)


def _scheduler_step(record: SchedulerStep) -> Iterator[Event]:
    if not record.messages and not record.orders:
        return  # it woke and nothing was due
    batch = record.batch
    name = "messages" if batch is None else f"batch {batch.step}"
    args: dict[str, object] = {"messages": [type(message).__name__ for message in record.messages]}
    if batch is not None:
        args |= {"rows": len(batch.slots) // 4, "begins": [begin.rid for begin in batch.begins]}
    if record.held:
        args["held"] = record.held
    yield _span(name, "scheduler", record.now, record.now + record.took_s, **args)
    pages = {"free": record.free_pages, "cached": record.cached_pages}
    yield {"ph": "C", "name": "pages", "ts": record.now, "args": pages}
    yield {"ph": "C", "name": "requests", "ts": record.now,
           "args": {"running": record.num_running, "waiting": record.num_waiting}}  # fmt: skip

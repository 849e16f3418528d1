"""A request's life as lines of text, and a summary over all of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from tools.replay.lives import Life, RowTime, Run, Stay

_LONG_RID = re.compile(r"[\w-]*[0-9a-f]{26}([0-9a-f]{6})")
_SHORT_RID = r"…\1"
"""Of other requests: their last six digits."""
_SLOW = 3.0
"""A step this many times slower than the request's median is told on its own."""


def ms(seconds: float) -> str:
    """``0.42 ms``, ``12.3 ms``, ``1,234 ms``"""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


def timeline(run: Run, life: Life) -> str:
    """One life, line by line: when (since it began), where, what."""
    zero = life.began
    lines = [headline(life)]
    for at, where, words in sorted(_events(run, life), key=lambda event: event[0]):
        lines.append(f"  {ms(at - zero):>10}  {where:<11} {words}")
    lines.append("")
    lines += [f"  {name:<24} {ms(seconds):>10}" for name, seconds in phases(life).items()]
    return "\n".join(lines)


def headline(life: Life) -> str:
    """The rid, its sizes and its end in one line."""
    cached = life.stays[0].cached_len if life.stays else 0
    end = "still open at the end of the trace" if life.ending == "open" else life.ending
    limit = f" of at most {life.max_tokens}" if life.max_tokens else ""
    return f"{life.rid}: prompt {life.prompt_len} tokens ({cached} cached), {life.num_outputs} generated{limit}, {end}"


def phases(life: Life) -> dict[str, float]:
    """Where the time went, seconds; phases the trace does not show are left out."""
    out: dict[str, float] = {}
    arrived = life.arrivals[0].time if life.arrivals else -1.0
    if arrived >= 0 and life.tokenized >= 0:
        out["gateway to tokenized"] = life.tokenized - arrived
    if life.tokenized >= 0 and life.queued >= 0:
        out["to the scheduler"] = max(life.queued - life.tokenized, 0.0)
    for start, end, why in life.waits:
        name = "waiting, new" if why == "new" else f"waiting, {why}"
        out[name] = out.get(name, 0.0) + end - start
    prefill = [timed for timed in life.rows if timed.row.chunk]
    decode = [timed for timed in life.rows if not timed.row.chunk]
    if prefill:
        out["in prefill steps"] = sum(timed.ended - timed.started for timed in prefill)
    if decode:
        out["in decode steps"] = sum(timed.ended - timed.started for timed in decode)
    if life.written >= 0 and arrived >= 0:
        out["TTFT"] = life.written - arrived
    if life.ended >= 0 and life.began >= 0:
        out["in all"] = life.ended - life.began
    return out


def _events(run: Run, life: Life) -> Iterator[tuple[float, str, str]]:
    for arrival in life.arrivals[:1]:
        yield arrival.time, "gateway", f"received ({arrival.kind})"
    if life.tokenized >= 0:
        yield life.tokenized, "tokenizer", f"{life.prompt_len} tokens handed to the scheduler"
    if life.queued >= 0:
        yield life.queued, "scheduler", "queued"
    for stay in life.stays:
        yield from _stay(run, life, stay)
    for start, end, why in life.waits:
        yield from _wait(run, life, start, end, why)
    yield from _rows(life)
    if life.first_token >= 0:
        yield life.first_token, "scheduler", "first token known"
    if life.text and not life.text[0][2]:
        yield life.text[0][0], "detokenizer", "told the gateway that it is accepted"
    if first := next((text for text in life.text if text[2]), None):
        yield first[0], "detokenizer", f"first text: {first[2]} ids, {first[3]} characters"
    if life.written >= 0:
        since = f" (TTFT {ms(life.written - life.arrivals[0].time)})" if life.arrivals else ""
        yield life.written, "gateway", f"first content written{since}"
    for at, words in life.notes:
        yield at, "note", words
    if life.finished is not None:
        yield life.finished.time, "gateway", f"finished: {life.finished.reason}, {life.finished.num_tokens} tokens"


def _wait(run: Run, life: Life, start: float, end: float, why: str) -> Iterator[tuple[float, str, str]]:
    again = "" if why == "new" else f" ({why})"
    for a, b, words in waiting_times(run, life, start, end):
        yield a, "queue", f"waited {ms(b - a)}{again}: {_LONG_RID.sub(_SHORT_RID, words)}"


def waiting_times(run: Run, life: Life, start: float, end: float) -> list[tuple[float, float, str]]:
    """(from, to, words): what kept a request waiting, its own reason or that of the one before it.

    Neighbours of the same kind are one entry, with the numbers of the last.
    """
    out: list[tuple[float, float, str]] = []
    kinds: list[str] = []
    for a, b, words in run.held_between(start, end):
        rid, _, reason = words.partition(": ")
        kind, _, numbers = reason.partition(": ")
        name = kind if rid == life.rid else f"behind {rid}, {kind}"
        if kinds and kinds[-1] == name:
            a = out.pop()[0]
            kinds.pop()
        out.append((a, b, f"{name}: {numbers}"))
        kinds.append(name)
    return out


def _stay(run: Run, life: Life, stay: Stay) -> Iterator[tuple[float, str, str]]:
    again = " again" if life.stays[0] is not stay else ""
    yield (
        stay.began,
        "scheduler",
        f"admitted{again} in step {stay.step}: slot {stay.slot}, {stay.cached_len} of {stay.known_len} tokens cached,"
        f" {stay.num_pages} pages",
    )
    if stay.why and stay.ended >= 0:
        after = next((d for _, d in run.decisions if d.now >= stay.ended), None)
        pool = f" ({after.num_running} running, {after.free_pages} pages free)" if after else ""
        yield stay.ended, "scheduler", f"{stay.why}: slot and pages given up{pool}; it keeps its tokens"


def _rows(life: Life) -> Iterator[tuple[float, str, str]]:
    for timed in life.rows:
        if timed.row.chunk:
            row = timed.row
            yield (
                timed.started,
                "worker",
                f"prefill of {row.num_tokens} tokens (positions {row.start}..{row.start + row.num_tokens - 1}) in step"
                f" {timed.step}, {ms(timed.ended - timed.started)} with {_others(timed)}",
            )
    for rows in _decode_runs(life):
        durations = np.array([timed.ended - timed.started for timed in rows])
        tokens = sum(len(timed.row.ids) for timed in rows)
        span = f"steps {rows[0].step}..{rows[-1].step}" if len(rows) > 1 else f"step {rows[0].step}"
        median = ms(float(np.median(durations)))
        yield rows[0].started, "worker", f"decode: {tokens} tokens in {span}, median {median} a step"
        worst = rows[int(durations.argmax())]
        if durations.max() > _SLOW * np.median(durations):
            yield worst.started, "worker", f"slow step {worst.step}: {ms(float(durations.max()))} with {_others(worst)}"


def _others(timed: RowTime) -> str:
    others = timed.num_rows - 1
    prefill = timed.prefill_tokens - timed.row.chunk
    words = f"{others} other row{'s' if others != 1 else ''}" if others else "no other row"
    return words + (f", {prefill} prefill tokens of others" if prefill else "")


def _decode_runs(life: Life) -> Iterator[list[RowTime]]:
    """Decode rows between prefills (a preempted request has several such runs)."""
    rows: list[RowTime] = []
    for timed in life.rows:
        if not timed.row.chunk:
            rows.append(timed)
        elif rows:
            yield rows
            rows = []
    if rows:
        yield rows


def summary(run: Run) -> str:
    """All requests: how many, how they ended, where their time went, and who fared worst."""
    lives = [life for life in run.lives.values() if life.queued >= 0]
    endings = Counter(life.ending for life in lives)
    preempted = sum(stay.why == "preempted" for life in lives for stay in life.stays)
    lines = [
        f"{len(lives)} requests, {sum(life.prompt_len for life in lives):,} prompt tokens"
        f" ({sum(life.stays[0].cached_len for life in lives if life.stays):,} cached),"
        f" {sum(life.num_outputs for life in lives):,} generated, {len(run.steps):,} steps",
        "endings: " + ", ".join(f"{n} {reason}" for reason, n in endings.most_common()),
        f"preemptions: {preempted}; worker runs lost: {len(run.lost)}",
        "",
        *_phase_table(lives),
        "",
        *_wait_table(run, lives),
        "slowest first tokens:",
        *_slowest(lives),
    ]
    return "\n".join(lines)


def _phase_table(lives: Iterable[Life]) -> Iterator[str]:
    times: dict[str, list[float]] = defaultdict(list)
    for life in lives:
        for name, seconds in phases(life).items():
            times[name].append(seconds)
        for before, after in zip(life.rows, life.rows[1:], strict=False):
            if before.row.ids and after.row.ids:
                times["between tokens"].append(after.returned - before.returned)
    yield f"{'phase':<26}{'p50':>12}{'p90':>12}{'p99':>12}{'most':>12}"
    for name, values in times.items():
        cells = [*np.percentile(values, [50, 90, 99]).tolist(), max(values)]
        yield f"{name:<26}" + "".join(f"{ms(cell):>12}" for cell in cells)


def _wait_table(run: Run, lives: Iterable[Life]) -> Iterator[str]:
    spent: dict[str, float] = defaultdict(float)
    for life in lives:
        for start, end, _ in life.waits:
            for a, b, words in waiting_times(run, life, start, end):
                kind = words.partition(": ")[0]
                spent["behind another, " + kind.rpartition(", ")[2] if kind.startswith("behind ") else kind] += b - a
    if spent:
        yield "what requests waited for, all together:"
        for kind, seconds in sorted(spent.items(), key=lambda item: -item[1]):
            yield f"  {kind:<24}{ms(seconds):>12}"
        yield ""


def _slowest(lives: Iterable[Life]) -> Iterator[str]:
    with_first = [(life.first_token - life.began, life) for life in lives if life.first_token >= 0]
    for seconds, life in sorted(with_first, key=lambda pair: -pair[0])[:5]:
        yield f"  {ms(seconds):>10}  {headline(life)}"

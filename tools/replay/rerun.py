"""The recorded inputs through ``Scheduler.step`` again: the same decisions, or the first that differs.

The step is a pure function of state and inputs, so with unchanged code and settings every decision comes
out as recorded. With another policy, setting or code the first step that decides otherwise is where the
change takes effect; what comes after it cannot be compared, for the worker's results in the trace answer
the recorded batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from common import config as config_file
from common.config import ServerConfig
from common.errors import InvariantError
from common.flags import all_flags
from common.messages import ForwardBatch, Reset, ToWorker, unpack_i32
from common.trace import SchedulerState, SchedulerStep
from scheduler_proc.record import digest
from scheduler_proc.scheduler import Scheduler, StepOutput
from tools.replay.reader import Segment, TraceError


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one scheduler process's records."""

    generation: int
    compared: int
    """Steps that decided as recorded."""
    differs: bool
    words: str


def changed(config: ServerConfig, settings: Sequence[str]) -> ServerConfig:
    """``config`` with ``NAME=VALUE`` settings. Raises TraceError for unknown names, ConfigError for values."""
    known = {flag.name: flag for flag in all_flags()}
    for setting in settings:
        name, _, value = setting.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in known:
            raise TraceError(f"--set {setting}: no setting is called {name!r} (see launch.py --help)")
        flag = known[name]
        section = msgspec.structs.replace(getattr(config, flag.section), **{name: flag.read(value)})
        config = msgspec.structs.replace(config, **{flag.section: section})
    return config


def rerun(segments: Sequence[Segment], settings: Sequence[str] = ()) -> list[Report]:
    """One report per scheduler process of the run. Raises TraceError when none can be replayed."""
    mine = [segment for segment in segments if segment.start.role == "scheduler"]
    if not mine:
        raise TraceError("the trace has no scheduler records")
    grouped = groupby(mine, key=lambda segment: segment.start.generation)
    return [_rerun_process(list(group), settings) for _, group in grouped]


def _rerun_process(segments: list[Segment], settings: Sequence[str]) -> Report:
    start = segments[0].start
    config = changed(config_file.load(start.config), settings)
    scheduler = open_scheduler(config, segments[0])
    names: dict[int, str] = {}
    compared = 0
    for segment in segments:
        for record in segment.records:
            if not isinstance(record, SchedulerStep):
                continue
            try:
                out = step_again(scheduler, record)
            except InvariantError as error:
                words = f"step {compared + 1} could not be run again: {error}"
                return Report(start.generation, compared, True, words)
            if out.to_worker != record.orders or digest(out) != record.digest:
                words = _difference(compared + 1, record, out, names, segments)
                return Report(start.generation, compared, True, words)
            _learn(names, record.orders)
            compared += 1
    words = f"scheduler generation {start.generation}: {compared:,} steps decided as recorded, to the last"
    return Report(start.generation, compared, False, words)


def open_scheduler(config: ServerConfig, segment: Segment) -> Scheduler:
    """A scheduler in the state in which the segment finds it. Raises TraceError when that is not known."""
    if segment.start.segment == 0:
        return Scheduler(config, segment.start.generation)  # also where the state's form has changed since
    first = segment.records[0] if segment.records else None
    if not isinstance(first, SchedulerState):
        raise TraceError(f"{segment.path}: does not begin with the scheduler's state")
    try:
        return Scheduler.restore(config, segment.start.generation, first.state)
    except msgspec.ValidationError as error:
        raise TraceError(f"{segment.path}: the state in it is not of this release: {error}") from None


def step_again(scheduler: Scheduler, record: SchedulerStep) -> StepOutput:
    """One recorded step's inputs into a scheduler."""
    return scheduler.step(
        list(record.messages),
        record.now,
        worker_full=record.worker_full,
        detokenizer_full=record.detokenizer_full,
        max_batches=1,
    )


def _learn(names: dict[int, str], orders: Iterable[ToWorker]) -> None:
    for order in orders:
        if isinstance(order, ForwardBatch):
            names.update((begin.slot, begin.rid) for begin in order.begins)


def describe(orders: Iterable[ToWorker], names: dict[int, str]) -> list[str]:
    """Orders in words, one line per thing decided; ``names`` knows the slots' rids."""
    lines = []
    for order in orders:
        if isinstance(order, Reset):
            lines.append(f"reset the worker (epoch {order.epoch})")
        if not isinstance(order, ForwardBatch):
            continue
        mine = {**names, **{begin.slot: begin.rid for begin in order.begins}}
        for begin in order.begins:
            pages = unpack_i32(begin.pages).tolist()
            lines.append(f"begin {begin.rid} in slot {begin.slot}: {begin.computed_len} of {len(begin.ids) // 4} tokens"
                         f" cached, pages {pages}")  # fmt: skip
        slots, chunks = unpack_i32(order.slots).tolist(), unpack_i32(order.num_tokens).tolist()
        new = iter(unpack_i32(order.new_pages).tolist())
        for slot, chunk, count in zip(slots, chunks, unpack_i32(order.num_new_pages).tolist(), strict=True):
            pages = [next(new) for _ in range(count)]
            what = f"prefill {chunk} tokens of" if chunk else "decode"
            lines.append(f"{what} {mine.get(slot, f'slot {slot}')}" + (f", new pages {pages}" if pages else ""))
        lines += [f"copy page {src} to {dst}" for src, dst in unpack_i32(order.copies).reshape(-1, 2).tolist()]
        lines += [f"end {mine.get(slot, '?')} in slot {slot}" for slot in unpack_i32(order.ends).tolist()]
    return lines


def _difference(
    number: int, record: SchedulerStep, out: StepOutput, names: dict[int, str], segments: list[Segment]
) -> str:
    first = next(r.now for s in segments for r in s.records if isinstance(r, SchedulerStep))
    before, after = describe(record.orders, names), describe(out.to_worker, names)
    batch = f", batch {record.batch.step}" if record.batch else ""
    lines = [
        f"scheduler generation {segments[0].start.generation}: {number - 1:,} steps decided as recorded;"
        f" step {number:,} ({record.now - first:.3f} s after the first{batch}) is the first that differs",
        f"  it was given {len(record.messages)} messages, with {record.num_running} running and"
        f" {record.num_waiting} waiting after it" + (f"; held: {record.held}" if record.held else ""),
    ]
    same = [line for line in before if line in after]
    lines += [f"  - recorded: {line}" for line in before if line not in after]
    lines += [f"  + now:      {line}" for line in after if line not in before]
    if before == after:
        lines.append("  the orders are the same; what the detokenizer or a gateway is told differs")
    elif set(before) == set(after):
        lines += ["  the same rows in another order:", *(f"    {line}" for line in after)]
    elif same:
        lines.append(f"  (and {len(same)} as recorded)")
    return "\n".join(lines)

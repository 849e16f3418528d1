"""The trace: what every process did, in compact records, bounded in size, cheap enough to leave on.

With ``--trace DIR`` each process appends MessagePack records to segment files of its own:

    DIR/<run>/<role>-<index>.<generation>.<segment>.trace

``<run>`` is the name of the server's run directory, so two starts with one DIR stay apart. A
segment begins with ``SegmentStart``; the scheduler's continue with ``SchedulerState``, a snapshot
from which the recorded inputs can be fed to ``Scheduler.step`` again, so each segment replays
without the ones before it. When a segment is full a new one begins, and the process's oldest are
deleted beyond ``total_bytes``. (Deterministic replay from a checkpoint and an input log is an old
idea; for schedulers it is this simple because the step is a pure function.)

Records are buffered and written at most twice a second, so a process killed with ``kill -9`` loses
about half a second of its trace, and may leave a record cut in two: the reader
(``tools/replay/reader.py``) ends there.
A disk that is full switches the trace off, never the server.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from common.messages import ForwardBatch, ToScheduler, ToWorker

log = logging.getLogger(__name__)

VERSION = 1
TOTAL_BYTES = 256 << 20
"""Per process, all its generations together: the default of ``--trace-mib``."""
SEGMENTS = 16
"""A full trace is in so many files."""
FLUSH_S = 0.4
"""Less than from one heartbeat to the next, so that each of an idle process brings out what there is."""
FLUSH_BYTES = 256 << 10

NAME = re.compile(r"(?P<role>[a-z]+)-(?P<index>\d+)\.(?P<generation>\d+)\.(?P<segment>\d+)\.trace")


# --------------------------------------------------------------------------- records


class TraceRecord(msgspec.Struct, frozen=True, array_like=True, tag=True, omit_defaults=True):
    """Base of all records: an array whose first element is the record's name. Times are time.time()."""


class SegmentStart(TraceRecord, frozen=True, tag="start"):
    """Opens every segment."""

    version: int
    role: str
    index: int
    generation: int
    segment: int
    time: float
    pid: int
    config: bytes = b""
    """The server's config.json, with keys left out."""


class SchedulerState(TraceRecord, frozen=True, tag="state"):
    """``Scheduler.snapshot()`` as it was before the record that follows."""

    time: float
    state: bytes


class SchedulerStep(TraceRecord, frozen=True, tag="step"):
    """One call of ``Scheduler.step``: its inputs, and what it decided."""

    now: float
    """The clock the step was given."""
    took_s: float
    """Deciding and sending."""
    messages: list[ToScheduler] = []
    """Every message of the step, in the order they were ingested."""
    orders: list[ToWorker] = []
    """What it decided: at most one ForwardBatch; a Reset."""
    digest: int = 0
    """CRC-32 of the rest of what the step put out (see ``scheduler_proc/record.py``)."""
    worker_full: bool = False
    detokenizer_full: bool = False
    """Channels that had no room (inputs of the step, too)."""
    num_running: int = 0
    num_waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    """Pages in the tree that could be evicted."""
    held: str = ""
    """The request at the head of the waiting queue and why it is still there; empty: nothing waits."""
    preempted: list[tuple[str, str]] = []
    """(rid, why) of those who lost slot and pages in this step (once the rows in flight have returned)."""
    ended: list[tuple[str, str]] = []
    """(rid, reason) of the endings handed to the detokenizer."""

    @property
    def batch(self) -> ForwardBatch | None:
        """The forward batch decided; None: nothing to run, or no room for another step in flight."""
        return next((order for order in self.orders if isinstance(order, ForwardBatch)), None)


class WorkerStep(TraceRecord, frozen=True, tag="worker"):
    """A step in the worker."""

    epoch: int
    step: int
    started: float
    ended: float
    num_rows: int
    num_prefill_tokens: int


class Arrived(TraceRecord, frozen=True, tag="arrived"):
    """The gateway received a request (or, with attempt > 0, submitted it again)."""

    time: float
    rid: str
    attempt: int
    kind: str
    """The prompt's form: text, ids, chat."""


class TokenizedAt(TraceRecord, frozen=True, tag="tokenized"):
    """The tokenizer handed a request to the scheduler."""

    time: float
    rid: str
    attempt: int
    num_tokens: int
    """Of the prompt."""


class TextOut(TraceRecord, frozen=True, tag="text"):
    """The detokenizer handed text on: (rid, index of the first id, ids, characters) per row."""

    time: float
    rows: list[tuple[str, int, int, int]]


class Written(TraceRecord, frozen=True, tag="written"):
    """The gateway wrote the first content of a request to its client."""

    time: float
    rid: str


class Finished(TraceRecord, frozen=True, tag="finished"):
    """The gateway ended a request."""

    time: float
    rid: str
    reason: str
    num_tokens: int


AnyRecord = (
    SegmentStart | SchedulerState | SchedulerStep | WorkerStep
    | Arrived | TokenizedAt | TextOut | Written | Finished
)  # fmt: skip


# --------------------------------------------------------------------------- writing


class TraceWriter:
    """Appends a process's records to its segments. Thread-safe; never raises for the disk's sake.

    ``opening`` gives the records that begin each segment after ``SegmentStart`` (the scheduler's
    snapshot). They count towards the segment's size, and a segment is at least four times as long
    as what opens it, so a large snapshot is not written over and over.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        index: int,
        generation: int,
        *,
        config: bytes = b"",
        segment_bytes: int = TOTAL_BYTES // SEGMENTS,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        self.opening: Callable[[], Sequence[TraceRecord]] = tuple
        self._folder = folder
        self._identity = (role, index, generation)
        self._config = config
        self._segment_bytes = segment_bytes
        self._total_bytes = total_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._file: int | None = None
        self._number = -1
        self._room = 0
        self._flush_at = 0.0
        self._off = False
        self._lock = threading.Lock()
        """A worker's heartbeat thread flushes while its main thread is in a long step."""

    def make_room(self) -> None:
        """Begin a segment if the current one is full, so that ``opening`` is asked now and not by ``write``."""
        with self._lock:
            if self._room <= 0 and not self._off:
                self._begin_segment()

    def write(self, record: TraceRecord) -> None:
        """Append one record, to a new segment if the current one is full."""
        with self._lock:
            if self._room <= 0 and not self._off:
                self._begin_segment()
            if self._off:
                return
            self._append(record)
            if len(self._buffer) >= FLUSH_BYTES:
                self._flush()

    def flush_when_due(self) -> None:
        """Write the buffer out if ``FLUSH_S`` passed since the last time. Call it on every turn of the loop."""
        if self._buffer and time.monotonic() >= self._flush_at:
            with self._lock:
                self._flush()

    def close(self) -> None:
        """Write the rest out."""
        with self._lock:
            self._close()

    def _flush(self) -> None:
        """Hand what is buffered to the kernel (it survives the process, not the machine)."""
        self._flush_at = time.monotonic() + FLUSH_S
        if self._file is None:
            return
        view = memoryview(self._buffer)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._off = True
            log.warning("--trace: switched off, %s cannot be written: %s", self._folder, error)
        finally:
            view.release()
            self._buffer = bytearray()

    def _close(self) -> None:
        self._flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, record: TraceRecord) -> int:
        data = self._encoder.encode(record)
        self._buffer += data
        self._room -= len(data)
        return len(data)

    def _begin_segment(self) -> None:
        self._close()
        role, index, generation = self._identity
        self._number += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self._folder / f"{role}-{index}.{generation}.{self._number:06d}.trace"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            self._delete_oldest(path)
        except OSError as error:
            self._off = True
            log.warning("--trace: switched off, %s cannot be written: %s", self._folder, error)
            return
        start = SegmentStart(
            VERSION, role, index, generation, self._number, time.time(), os.getpid(), self._config
        )
        size = sum(self._append(record) for record in (start, *self.opening()))
        self._room = max(self._segment_bytes - size, 3 * size)

    def _delete_oldest(self, current: Path) -> None:
        role, index, _ = self._identity
        mine = sorted(
            (p for p in self._folder.glob(f"{role}-{index}.*.trace") if p != current),
            key=lambda p: _order(p.name),
        )
        sizes = {path: path.stat().st_size for path in mine}
        excess = sum(sizes.values()) + self._segment_bytes - self._total_bytes
        for path in mine:
            if excess <= 0:
                break
            excess -= sizes[path]
            path.unlink(missing_ok=True)


def _order(name: str) -> tuple[int, int]:
    match = NAME.fullmatch(name)
    return (int(match["generation"]), int(match["segment"])) if match else (-1, -1)

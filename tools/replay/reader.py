"""Reading a trace back: segments, whole or cut short by the death of their process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import msgspec

from common.errors import QuintetError
from common.trace import NAME, VERSION, AnyRecord, SegmentStart


class TraceError(QuintetError):
    """A trace cannot be read; the message names the file and the way out."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file, read."""

    path: Path
    start: SegmentStart
    records: list[AnyRecord]
    """Those after ``start``."""
    truncated: bool
    """The file ends inside a record: its process was killed."""


def iterate(data: bytes) -> Iterator[AnyRecord | None]:
    """Decode records one after the other; ends with None when the data ends inside one.

    Raises ``msgspec.ValidationError`` (or msgpack's errors) for bytes that are no trace.
    """
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(1, len(data)))
    unpacker.feed(data)
    decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
    view = memoryview(data)
    at = 0
    while at < len(data):
        try:
            unpacker.skip()
        except msgpack.OutOfData:
            yield None
            return
        end = unpacker.tell()
        yield decoder.decode(view[at:end])
        at = end


def read_segment(path: Path) -> Segment | None:
    """Read one segment; None when its process died before the first record was out.

    Raises ``TraceError`` for a file that is no trace or one of another version.
    """
    records: list[AnyRecord] = []
    truncated = False
    try:
        for record in iterate(path.read_bytes()):
            if record is None:
                truncated = True
            else:
                records.append(record)
    except (msgspec.DecodeError, msgpack.UnpackException, ValueError) as error:
        raise TraceError(f"{path}: record {len(records)} is not of trace version {VERSION}: {error}") from None
    if not records:
        return None
    start = records[0]
    if not isinstance(start, SegmentStart) or start.version != VERSION:
        raise TraceError(f"{path}: not a trace of version {VERSION}; read it with the release that wrote it")
    return Segment(path, start, records[1:], truncated)


def read_run(folder: Path) -> list[Segment]:
    """Every segment of one run, ordered by process, generation and number.

    ``folder`` is a run's folder, or the ``--trace`` folder above: then the run that began last.
    Raises ``TraceError`` when there is none.
    """
    paths = [p for p in folder.glob("*.trace") if NAME.fullmatch(p.name)]
    if not paths:
        runs = sorted((p for p in folder.glob("*/*.trace") if NAME.fullmatch(p.name)), key=lambda p: p.stat().st_mtime)
        if not runs:
            raise TraceError(f"{folder}: holds no trace (start the server with --trace {folder})")
        paths = list(runs[-1].parent.glob("*.trace"))
    segments = [segment for path in paths if (segment := read_segment(path)) is not None]
    segments.sort(key=lambda s: (s.start.role, s.start.index, s.start.generation, s.start.segment))
    return segments

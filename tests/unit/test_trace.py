"""The trace's files: what is written is read, also when its writer was killed, and the size stays bounded."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from common.messages import Abort, ForwardBatch, Reset, SamplingParams, TextParams, Tokenized, pack_i32
from common.trace import Arrived, SchedulerState, SchedulerStep, TraceWriter
from tools.replay.reader import TraceError, iterate, read_run, read_segment


def writer(folder: Path, **limits: int) -> TraceWriter:
    return TraceWriter(folder, "scheduler", 0, 0, config=b"{}", **limits)


def step(number: int) -> SchedulerStep:
    request = Tokenized(
        rid=f"r{number}",
        gateway="g",
        input_ids=pack_i32([1, 2, 3]),
        sampling=SamplingParams(max_tokens=5, logit_bias={7: -1.5}),
        text=TextParams(stop=("\n",)),
    )
    batch = ForwardBatch(epoch=1, step=number, slots=pack_i32([0]))
    inputs = [request, Abort(rid="x", gateway="g")]
    return SchedulerStep(1.5, 0.001, inputs, [Reset(epoch=1, scheduler_generation=0), batch], 42)


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    out = writer(tmp_path)
    records = [step(1), Arrived(2.0, "r1", 0, "chat"), step(2)]
    for record in records:
        out.write(record)
    out.close()
    (segment,) = read_run(tmp_path)
    assert segment.records == records
    assert (segment.start.role, segment.start.config, segment.truncated) == ("scheduler", b"{}", False)


def test_nothing_is_created_before_the_first_record(tmp_path: Path) -> None:
    out = writer(tmp_path / "later")
    out.flush_when_due()
    out.close()
    assert not (tmp_path / "later").exists()


def test_every_cut_of_the_file_gives_the_whole_records_before_it(tmp_path: Path) -> None:
    out = writer(tmp_path)
    for number in range(3):
        out.write(step(number))
    out.close()
    path = next(tmp_path.glob("*.trace"))
    data = path.read_bytes()
    ends = [0]
    for record in iterate(data):
        assert record is not None
        ends.append(ends[-1] + len(msgspec.msgpack.encode(record)))
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends[1:])
        segment = read_segment(path)
        if segment is None:
            assert whole == 0
        else:
            assert len(segment.records) == whole - 1
            assert segment.truncated == (cut not in ends)


def test_rotates_and_opens_each_segment_with_the_snapshot_of_that_moment(tmp_path: Path) -> None:
    out = writer(tmp_path, segment_bytes=600)
    number = 0
    out.opening = lambda: [SchedulerState(0.0, str(number).encode())]
    for number in range(12):
        out.make_room()
        out.write(step(number))
    out.close()
    segments = read_run(tmp_path)
    assert len(segments) > 2
    for segment in segments:
        state, first = segment.records[:2]
        assert isinstance(state, SchedulerState) and isinstance(first, SchedulerStep)
        assert first.batch is not None and state.state == str(first.batch.step).encode()


def test_a_large_snapshot_makes_its_segment_longer_instead_of_being_written_again(tmp_path: Path) -> None:
    out = writer(tmp_path, segment_bytes=600)
    out.opening = lambda: [SchedulerState(0.0, bytes(10_000))]
    for number in range(40):
        out.write(step(number))
    out.close()
    assert len(read_run(tmp_path)) == 1


def test_deletes_its_oldest_segments_and_nobody_elses(tmp_path: Path) -> None:
    other = TraceWriter(tmp_path, "worker", 0, 0)
    other.write(step(0))
    other.close()
    out = writer(tmp_path, segment_bytes=1000, total_bytes=4000)
    for number in range(200):
        out.write(step(number))
    out.close()
    mine = [s for s in read_run(tmp_path) if s.start.role == "scheduler"]
    assert sum(s.path.stat().st_size for s in mine) <= 4000 + 1000
    assert mine[-1].start.segment > 10
    assert isinstance(mine[-1].records[-1], SchedulerStep)
    assert len(read_run(tmp_path)) == len(mine) + 1


def test_the_bound_covers_what_earlier_generations_left(tmp_path: Path) -> None:
    for generation in range(20):
        out = TraceWriter(tmp_path, "scheduler", 0, generation, segment_bytes=1000, total_bytes=3000)
        for number in range(4):
            out.write(step(number))
        out.close()
    generations = [s.start.generation for s in read_run(tmp_path)]
    assert max(generations) == 19 and min(generations) > 10


def test_an_unwritable_folder_switches_the_trace_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    out = writer(tmp_path / "file")
    out.write(step(0))
    out.write(step(1))
    out.close()
    assert sum("switched off" in message for message in caplog.messages) == 1


def test_the_newest_run_of_a_trace_folder_is_read(tmp_path: Path) -> None:
    for age, run in ((100, "old"), (0, "new")):
        out = writer(tmp_path / run)
        out.write(Arrived(1.0, run, 0, "text"))
        out.close()
        path = next((tmp_path / run).glob("*.trace"))
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    (segment,) = read_run(tmp_path)
    assert segment.records == [Arrived(1.0, "new", 0, "text")]


def test_says_what_is_wrong_with_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "scheduler-0.0.000000.trace"
    path.write_bytes(b"hello, this is text")
    with pytest.raises(TraceError, match="not of trace version 1"):
        read_segment(path)
    with pytest.raises(TraceError, match="start the server with --trace"):
        read_run(tmp_path / "empty")

"""Replaying a recorded run: lives, the Chrome trace, and every decision once more.

The runs are the simulator's, whose scheduler records as the server's does.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import save
from common.flags import build
from common.messages import GatewayLease, StepResult
from common.trace import Arrived, Finished, SchedulerStep, TextOut, TokenizedAt, TraceWriter, WorkerStep, Written
from tests.unit.trace_events import check_file
from tools.replay import __main__ as command
from tools.replay.lives import Life, Run, read_lives
from tools.replay.perfetto import REQUESTS_PID, make_events, write_perfetto
from tools.replay.picture import write_picture
from tools.replay.reader import Segment, TraceError, iterate, read_run
from tools.replay.rerun import rerun
from tools.replay.rows import RowDone
from tools.replay.timeline import summary, timeline
from tools.simulate.cost import CostModel
from tools.simulate.loop import Simulation
from tools.simulate.worker import WorkerShape
from tools.simulate.workload import WorkloadSpec, generate

SPEC = WorkloadSpec(
    num_requests=60, rate=100, prefixes=6, prefix_len=40, prompt_len=30, output_len=60, multi_turn=0.3, think_s=0.2,
    context_len=512,
)  # fmt: skip
CONFIG = build(
    {"schedule_conservativeness": 0.1, "chunked_prefill_size": 64, "max_running_requests": 16, "page_size": 8}
)


def record(folder: Path, segment_bytes: int = 16 << 20) -> list[Segment]:
    """A run in which the pool gets full: preemptions, evictions, waiting."""
    trace = TraceWriter(folder, "scheduler", 0, 0, config=save(CONFIG), segment_bytes=segment_bytes)
    shape = WorkerShape(num_pages=70, page_size=8, context_len=512, vocab_size=SPEC.vocab_size, max_slots=16)
    simulation = Simulation(CONFIG, shape, CostModel(5e-3, 5e-5, 2e-4, 0), generate(SPEC), trace=trace)
    result = simulation.run()
    assert result["preemptions_per_request"] > 0
    trace.close()
    return read_run(folder)


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[Segment]:
    """One run in one segment."""
    return record(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def run(segments: list[Segment]) -> Run:
    """Its lives."""
    return read_lives(segments)


def test_every_decision_comes_out_again(segments: list[Segment]) -> None:
    (report,) = rerun(segments)
    assert not report.differs
    assert report.compared == sum(isinstance(r, SchedulerStep) for r in segments[0].records)


def test_each_segment_replays_without_the_ones_before_it(tmp_path: Path) -> None:
    segments = record(tmp_path, segment_bytes=60_000)
    assert len(segments) >= 3
    for segment in segments:
        (report,) = rerun([segment])
        assert not report.differs, report.words
        assert report.compared > 5
    (whole,) = rerun(segments)
    assert not whole.differs


def test_a_changed_policy_is_pinpointed_at_its_first_other_decision(segments: list[Segment]) -> None:
    (report,) = rerun(segments, ["schedule_policy=lpm"])
    assert report.differs and 0 < report.compared < len(segments[0].records) - 2
    assert f"step {report.compared + 1:,} " in report.words and "is the first that differs" in report.words
    assert "  + now:      begin r" in report.words and "  - recorded: begin r" in report.words


def test_a_tampered_input_is_found_in_the_step_it_belongs_to(segments: list[Segment]) -> None:
    records = list(segments[0].records)
    at = next(
        i for i, r in enumerate(records)
        if isinstance(r, SchedulerStep) and any(isinstance(m, StepResult) and m.step == 20 for m in r.messages)
    )  # fmt: skip
    changed = records[at]
    assert isinstance(changed, SchedulerStep)
    inputs = [m for m in changed.messages if isinstance(m, GatewayLease)]
    records[at] = type(changed)(**{**{f: getattr(changed, f) for f in changed.__struct_fields__}, "messages": inputs})
    (report,) = rerun([Segment(segments[0].path, segments[0].start, records, False)])
    steps = [r for r in records if isinstance(r, SchedulerStep)]
    assert report.differs and report.compared == steps.index(records[at])


def test_unknown_settings_are_refused(segments: list[Segment]) -> None:
    with pytest.raises(TraceError, match="no setting is called 'polcy'"):
        rerun(segments, ["polcy=lpm"])


def test_lives_add_up_to_what_was_scheduled(run: Run) -> None:
    assert len(run.lives) >= 40 and "?" not in run.lives
    for life in run.lives.values():
        assert life.ending in ("stop", "length")
        computed = defaultdict(int)
        for timed in life.rows:
            for position in range(timed.row.start, timed.row.start + timed.row.num_tokens):
                computed[position] += 1
        first = life.stays[0]
        needed = range(first.cached_len, life.prompt_len + life.num_outputs - 1)
        assert set(needed) <= set(computed)
        assert max(computed.values()) <= len(life.stays), "computed twice without a preemption"
    preempted = [life for life in run.lives.values() if any(stay.why == "preempted" for stay in life.stays)]
    assert preempted


def test_every_preemption_is_told_also_of_requests_that_never_came_back(segments: list[Segment], run: Run) -> None:
    records = [r for r in segments[0].records if isinstance(r, SchedulerStep)]
    told = [rid for record in records for rid, why in record.preempted if "pool is full" in why]
    stays = [life.rid for life in run.lives.values() for stay in life.stays if stay.why == "preempted"]
    assert sorted(told) == sorted(stays) and len(told) >= 3
    last = [life for life in run.lives.values() if life.stays[-1].why == "preempted"]
    assert all(life.ending in ("stop", "length") for life in last), "ended by the token in flight"


def test_a_later_segment_alone_still_knows_every_rid(tmp_path: Path) -> None:
    segments = record(tmp_path, segment_bytes=60_000)
    whole, part = read_lives(segments), read_lives(segments[2:])
    assert "?" not in part.lives
    last = segments[2].records[1]
    assert isinstance(last, SchedulerStep)
    in_flight = {t.step for life in whole.lives.values() for t in life.rows if t.decided < last.now <= t.returned}
    assert len(in_flight) <= 2

    def seen(life: Life) -> list[tuple[int, RowDone]]:
        """What a batch that was in flight gave a row is in the segment, the pages it was sent with are not."""
        rows = [t for t in life.rows if t.returned >= last.now]
        return [(t.step, replace(t.row, new_pages=0) if t.step in in_flight else t.row) for t in rows]

    for rid, life in part.lives.items():
        assert seen(life) == seen(whole.lives[rid])


def test_the_timeline_tells_waiting_admission_preemption_and_resuming(run: Run) -> None:
    life = next(life for life in run.lives.values() if any(stay.why == "preempted" for stay in life.stays))
    text = timeline(run, life)
    for words in ("queued", "admitted in step", "prefill of", "preempted: slot and pages given up", "admitted again"):
        assert words in text
    assert "pages: " in "".join(timeline(run, life) for life in run.lives.values())


def test_the_summary_names_phases_and_what_was_waited_for(run: Run) -> None:
    text = summary(run)
    for words in ("preemptions: ", "between tokens", "what requests waited for", "slowest first tokens", "pages"):
        assert words in text


def other_processes(folder: Path, rid: str) -> None:
    """What the other four processes record of one request."""
    for role, records in {
        "gateway": [Arrived(0.01, rid, 0, "chat"), Written(0.2, rid), Finished(0.9, rid, "stop", 5)],
        "tokenizer": [TokenizedAt(0.02, rid, 0, 12)],
        "worker": [WorkerStep(1, 1, 0.05, 0.1, 1, 12)],
        "detokenizer": [TextOut(0.15, [(rid, 0, 1, 4)])],
    }.items():
        writer = TraceWriter(folder, role, 0, 0)
        for one in records:
            writer.write(one)
        writer.close()


def test_the_perfetto_file_is_what_the_format_asks_and_names_every_track(tmp_path: Path) -> None:
    record(tmp_path)
    other_processes(tmp_path, "r0")
    segments = read_run(tmp_path)
    run = read_lives(segments)
    write_perfetto(tmp_path / "out.json", run, segments)
    events = check_file(json.loads((tmp_path / "out.json").read_text()))
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    places = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    in_order = [names[pid] for pid in sorted(places, key=lambda pid: places[pid])]
    assert in_order == ["gateway-0", "tokenizer-0", "scheduler-0", "worker-0", "detokenizer-0", "requests"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(run.lives) <= set(tracks) and os.getpid() in {e["tid"] for e in events}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} - set(run.lives) == {"generation 0"}
    assert {"KV pages", "requests"} == {e["name"] for e in events if e["ph"] == "C"}
    assert all(sum(e["args"].values()) == run.num_pages for e in events if e["name"] == "KV pages")


def test_a_requests_track_has_its_waiting_with_the_reasons_and_its_steps_inside(segments: list[Segment]) -> None:
    run = read_lives(segments)
    events = make_events(run, segments)
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    life = next(life for life in run.lives.values() if any(stay.why == "preempted" for stay in life.stays[:-1]))
    mine = [e for e in events if e["pid"] == REQUESTS_PID and e["tid"] == tracks[life.rid]]
    whole = [e for e in mine if e.get("cat") == "request"]
    assert [e["name"] for e in whole] == [
        f"{life.ending}: {life.prompt_len} prompt + {life.num_outputs} generated"
    ]
    (again,) = [e for e in mine if e["name"] == "wait, preempted"][:1]
    reasons = [e for e in mine if e.get("cat") == "queue" and "why" in e["args"] and e["ts"] >= again["ts"]]
    assert any("pages" in e["name"] and "needed" in e["args"]["why"] for e in reasons)
    assert sum(e["name"] == "decode" or e["name"].startswith("prefill ") for e in mine) == len(life.rows)
    assert sum(e["name"] == "preempted" for e in mine) >= 1


def test_an_arrow_leads_from_each_decision_to_the_first_ranks_step(tmp_path: Path) -> None:
    (scheduler,) = record(tmp_path)
    batches = [(r.now, r.batch) for r in scheduler.records if isinstance(r, SchedulerStep) and r.batch]
    for rank in (0, 1):
        writer = TraceWriter(tmp_path, "worker", rank, 0)
        for now, batch in batches[:-1]:
            writer.write(WorkerStep(batch.epoch, batch.step, now, now, 1, 0))
        writer.close()
    segments = read_run(tmp_path)
    run = read_lives(segments)
    write_perfetto(tmp_path / "out.json", run, segments)
    events = check_file(json.loads((tmp_path / "out.json").read_text()))
    ends = [e for e in events if e["ph"] == "f"]
    assert len(ends) == len(batches) - 1
    (pid,) = {e["pid"] for e in ends}
    assert {"name": "process_name", "pid": pid, "ph": "M", "tid": 0, "args": {"name": "worker-0"}} in events


def test_the_file_begins_with_the_first_request_and_not_with_the_server(tmp_path: Path) -> None:
    segments = record(tmp_path)
    run = read_lives(segments)
    first = min(life.began for life in run.lives.values())
    early = [r for s in segments for r in s.records if isinstance(r, SchedulerStep) and r.now < first]
    assert early, "the worker's handshake"
    assert min(e["ts"] for e in make_events(run, segments) if e["ph"] != "M") == 0


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    other_processes(tmp_path / "run", "r0")
    out = tmp_path / "trace.json"
    assert command.main([str(tmp_path), "--rid", "r0", "--perfetto", str(out), "--svg", str(tmp_path / "a.svg")]) == 0
    text = capsys.readouterr().out
    assert "first content written (TTFT 190 ms)" in text and "finished: stop, 5 tokens" in text
    assert len(json.loads(out.read_text())["traceEvents"]) > 1000
    assert command.main([str(tmp_path), "--rerun"]) == 0
    assert command.main([str(tmp_path), "--rerun", "--set", "max_running_requests=3"]) == 1
    assert command.main([str(tmp_path), "--rid", "nobody"]) == 2
    assert command.main([str(tmp_path / "nowhere")]) == 2


def test_the_picture_is_well_formed_and_has_a_line_per_request(tmp_path: Path, run: Run) -> None:
    from xml.etree import ElementTree

    write_picture(tmp_path / "a.svg", run)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    text = "".join(root.itertext())
    assert all(f"{rid}: prompt" in text for rid in run.lives)


def test_a_trace_cut_by_kill_9_replays_to_the_last_whole_step(tmp_path: Path) -> None:
    (whole,) = record(tmp_path)
    data = whole.path.read_bytes()
    cut = len(data) // 2 + zlib.crc32(data) % 100
    if list(iterate(data[:cut]))[-1] is not None:  # by chance between two records
        cut -= 1
    whole.path.write_bytes(data[:cut])
    (segment,) = read_run(tmp_path)
    (report,) = rerun([segment])
    assert segment.truncated and not report.differs and report.compared > 50

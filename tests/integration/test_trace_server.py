"""A recorded run of a real server with preemptions, aborts and a worker restart: told, drawn, and replayed."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pexpect
import pytest

from common.trace import SchedulerStep
from tests.integration.server import Server, eventually
from tests.unit.test_step_tool import Terminal
from tests.unit.trace_events import check_file
from tools.replay.lives import Run, read_lives
from tools.replay.perfetto import write_perfetto
from tools.replay.reader import Segment, read_run
from tools.replay.rerun import rerun
from tools.replay.timeline import timeline
from tools.simulate.files import fit_cost, load
from tools.simulate.workload import WorkloadSpec

pytestmark = pytest.mark.integration
ANSWERS, ABORTED = 14, 3
PROMPT = "one two three four five six seven eight nine ten " * 4


def ask(url: str, number: int, begun: list[int]) -> int:
    """A streamed completion; the client of some leaves early. Returns the pieces of text that came."""
    body = {
        "model": "tiny", "prompt": PROMPT + str(number), "max_tokens": 150, "ignore_eos": True, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    while True:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=200) as reply:
            if reply.status_code == 503:  # the worker was killed before this one arrived
                time.sleep(0.2)
                continue
            assert reply.status_code == 200, reply.read()
            pieces = 0
            for line in reply.iter_lines():
                pieces += line.startswith("data: {")
                if pieces == 1:
                    begun.append(number)
                if number < ABORTED and pieces > 5:
                    break
            return pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The trace of the run."""
    trace = tmp_path_factory.mktemp("trace")
    server = Server(
        ["--model", str(tiny_folder), "--served-model-name", "tiny", "--dtype", "float32", "--device", "cpu",
         "--cpu-threads", "1", "--max-total-tokens", "800", "--schedule-conservativeness", "0.05",
         "--trace", str(trace), "--trace-mib", "1"]
    )  # fmt: skip
    try:
        server.wait_ready(250)
        begun: list[int] = []
        with ThreadPoolExecutor(ANSWERS) as pool:
            replies = [pool.submit(ask, server.url, number, begun) for number in range(ANSWERS)]
            eventually(lambda: len(begun) >= 4, 60, "answers that have begun")
            server.wait_replaced("worker-0", server.kill("worker-0"), 200)
            assert all(reply.result() > 0 for reply in replies)
        assert server.stop() == 0
    finally:
        server.close()
    return trace


@pytest.fixture(scope="module")
def segments(folder: Path) -> list[Segment]:
    """Its files."""
    return read_run(folder)


@pytest.fixture(scope="module")
def run(segments: list[Segment]) -> Run:
    """Its lives."""
    return read_lives(segments)


def test_every_process_recorded(segments: list[Segment]) -> None:
    names = {(s.start.role, s.start.index, s.start.generation) for s in segments}
    others = {("gateway", 0, 0), ("tokenizer", 0, 0), ("scheduler", 0, 0), ("detokenizer", 0, 0)}
    # What the first worker did in the half second before it was killed is lost; that may be all of it.
    assert names - {("worker", 0, 0)} == others | {("worker", 0, 1)}


def test_the_run_replays_to_the_last_decision(segments: list[Segment], run: Run) -> None:
    preemptions = [stay for life in run.lives.values() for stay in life.stays if stay.why == "preempted"]
    lost = [stay for life in run.lives.values() for stay in life.stays if stay.why == "worker lost"]
    assert preemptions and lost and len(run.lost) == 1
    (report,) = rerun(segments)
    assert not report.differs, report.words
    assert report.compared == sum(isinstance(r, SchedulerStep) for s in segments for r in s.records)


def test_each_segment_replays_without_the_ones_before_it(segments: list[Segment]) -> None:
    mine = [segment for segment in segments if segment.start.role == "scheduler"]
    assert len(mine) >= 3, "a full one of 64 KiB is followed by another"
    for segment in mine:
        (report,) = rerun([segment])
        assert not report.differs, report.words
        assert report.compared == sum(isinstance(r, SchedulerStep) for r in segment.records)
        part = read_lives([segment])
        assert "?" not in part.lives and all(life.queued >= 0 for life in part.lives.values())


def test_a_changed_setting_is_pinpointed(segments: list[Segment]) -> None:
    (report,) = rerun(segments, ["max_running_requests=4"])
    assert report.differs and report.compared > 3 and "is the first that differs" in report.words


def test_every_life_is_whole_from_the_gateway_to_the_gateway(run: Run) -> None:
    lives = [life for life in run.lives.values() if life.arrivals]
    assert len(lives) == ANSWERS
    for life in lives:
        assert life.arrivals[0].kind == "text" and life.finished is not None
        assert life.began <= life.queued <= life.stays[0].began <= life.first_token <= life.written
        text = timeline(run, life)
        for words in ("received (text)", "tokens handed to the scheduler", "queued", "admitted in step", "prefill of",
                      "first text", "first content written (TTFT "):  # fmt: skip
            assert words in text
        if life.finished.reason == "length":
            assert sum(num_ids for _, _, num_ids, _ in life.text) >= 150
    reasons = sorted(life.finished.reason for life in lives if life.finished)
    assert reasons == ["abort"] * ABORTED + ["length"] * (ANSWERS - ABORTED)
    assert any("worker lost" in timeline(run, life) for life in lives)


def test_perfetto_has_a_track_per_process_and_request(tmp_path: Path, segments: list[Segment], run: Run) -> None:
    path = tmp_path / "trace.json"
    assert write_perfetto(path, run, segments) > 500
    events = check_file(json.loads(path.read_text()))
    tracks = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(run.lives) <= tracks and {"generation 0", "generation 1"} <= tracks
    arrows = sum(e["ph"] == "f" for e in events)
    assert arrows > 100, "from decisions to the worker's steps"


def test_the_simulator_reads_its_requests_and_costs(folder: Path) -> None:
    workload = load(folder, WorkloadSpec())
    assert len(workload.requests) == ANSWERS
    cost, _, steps = fit_cost(folder)
    assert cost.a + cost.b + cost.c > 0 and steps > 100


def test_single_step_mode_drives_the_real_worker_key_by_key(tiny_folder: Path) -> None:
    flags = ["--requests", "2", "--max-tokens", "6", "--max-total-tokens", "256", "--no-color"]
    terminal = Terminal("--model", str(tiny_folder), *flags, timeout_s=250)
    first = terminal.wait_for("quintet step 0,")
    assert f"worker process, {tiny_folder.name}" in first and "2 arrive with the next step" in first
    terminal.child.send(" ")
    assert "RUNNING 1" in terminal.wait_for("quintet step 1,")
    terminal.child.send("s")
    screen = terminal.wait_for("quintet step 2,")
    assert "SAMPLED by batch 1" in screen and "BATCH 2" in screen
    terminal.child.send("k")
    terminal.wait_for("the worker was killed")
    terminal.child.send("e")
    last = terminal.wait_for("RUNNING 0")
    assert "WAITING 0" in last and "TREE 0 nodes" not in last, "what was computed stays in the tree"
    terminal.child.send("q")
    terminal.child.expect(pexpect.EOF)
    terminal.child.close()
    assert terminal.child.exitstatus == 0

"""The simulator: nothing is lost or wrong under any setting, and the comparisons point the way they must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import ServerConfig
from common.errors import ConfigError
from common.flags import build
from tools.simulate.__main__ import main
from tools.simulate.cost import CostModel
from tools.simulate.files import fit_cost, load
from tools.simulate.loop import Simulation
from tools.simulate.plugin import load_plugin
from tools.simulate.worker import WorkerShape
from tools.simulate.workload import WorkloadSpec, generate

COST = CostModel(5e-3, 6e-5, 2e-4, 1e-8)
SPEC = WorkloadSpec(
    num_requests=50, rate=30, prefixes=8, prefix_len=64, prompt_len=40, output_len=40, think_s=1, context_len=1024
)
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def simulate(config: ServerConfig, spec: WorkloadSpec = SPEC, pages: int = 150, **kwargs: object) -> Simulation:
    shape = WorkerShape(num_pages=pages, context_len=1024, max_slots=config.scheduler.max_running_requests)
    return Simulation(config, shape, COST, generate(spec), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule_policy": "fcfs"},
        {"schedule_policy": "lpm", "schedule_conservativeness": 0.05},
        {"schedule_policy": "priority", "max_running_requests": 8},
        {"disable_radix_cache": True, "chunked_prefill_size": 48},
        {"disable_overlap_schedule": True, "schedule_conservativeness": 0.05},
    ],
)
def test_every_request_ends_with_the_tokens_it_would_get_alone(settings: dict[str, object]) -> None:
    spec = WorkloadSpec(**{**{f: getattr(SPEC, f) for f in SPEC.__slots__}, "urgent": 0.2})
    simulation = simulate(build({"max_running_requests": 24, **settings}), spec, check=True)
    result = simulation.run()
    assert result["finished"] == result["requests"] >= 30
    for rid, outcome in simulation.recorder.outcomes.items():
        assert outcome.num_tokens >= 1 and outcome.arrived <= outcome.first <= outcome.finished, rid
    pool = simulation.scheduler.state.need_pool()
    assert pool.num_available == pool.allocator.num_pages


def test_the_same_run_twice_gives_the_same_numbers() -> None:
    results = [simulate(build({"max_running_requests": 24})).run() for _ in range(2)]
    for result in results:
        del result["wall_s"], result["cpu_s"], result["scheduler_us_per_step"]
    assert results[0] == results[1]


def test_the_cache_saves_prefill_and_shortens_the_wait() -> None:
    on = simulate(build({})).run()
    off = simulate(build({"disable_radix_cache": True})).run()
    assert on["hit_rate"] > 0.3 and off["hit_rate"] == 0
    assert on["ttft_p99_ms"] < off["ttft_p99_ms"]


def test_urgent_requests_overtake_under_the_priority_policy_alone() -> None:
    spec = WorkloadSpec(num_requests=120, rate=200, multi_turn=0, output_len=40, urgent=0.1, context_len=1024)
    waits = {}
    for policy in ("fcfs", "priority"):
        waits[policy] = simulate(build({"schedule_policy": policy, "max_running_requests": 8}), spec, 400).run()
    assert waits["priority"]["urgent_ttft_p99_ms"] < 0.5 * waits["fcfs"]["urgent_ttft_p99_ms"]


def test_boldness_preempts_more_when_outputs_run_to_the_limit() -> None:
    spec = WorkloadSpec(num_requests=60, rate=60, output_len=80, multi_turn=0, to_the_limit=True, context_len=1024)
    bold, careful = (
        simulate(build({"schedule_conservativeness": value, "max_running_requests": 32}), spec, 200).run()
        for value in (0.05, 1.4)
    )
    assert bold["preemptions_per_request"] > careful["preemptions_per_request"]


def test_more_than_the_queue_holds_is_refused_and_counted() -> None:
    config = build({"max_running_requests": 2, "max_queued_requests": 3})
    result = simulate(config, WorkloadSpec(num_requests=60, rate=500, multi_turn=0, context_len=1024)).run()
    assert result["refused"] > 10 and result["finished"] + result["refused"] == result["requests"]


def test_a_recorded_run_gives_back_its_requests_and_its_cost(tmp_path: Path) -> None:
    common = ["--requests", "60", "--rate", "20", "--pages", "400", "--cost", "7,50,300,20", "--multi-turn", "0"]
    assert main([*common, "--trace", str(tmp_path)]) == 0
    cost, quality, steps = fit_cost(tmp_path / "fcfs")
    assert steps > 100 and quality > 0.999
    assert [cost.a, cost.b, cost.c, cost.d] == pytest.approx([7e-3, 5e-5, 3e-4, 2e-8], rel=0.01)
    recorded = load(tmp_path / "fcfs", WorkloadSpec(num_requests=1000))
    original = generate(WorkloadSpec(num_requests=60, rate=20, multi_turn=0))
    assert [r.rid for r in recorded.requests] == [r.rid for r in original.requests]
    assert [r.output_len for r in recorded.requests] == [r.output_len for r in original.requests]
    for a, b in zip(recorded.requests, original.requests, strict=True):
        assert recorded.prompt(a).tolist() == original.prompt(b).tolist()


def test_the_command_compares_and_ends_in_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "out.svg"
    runs = ["--policy", "fcfs,lpm", "--cache", "on,off", "--plot", str(plot)]
    assert main(["--requests", "16", "--rate", "30", "--multi-turn", "0", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(json.loads(lines[-1])["runs"]) == {"fcfs cache on", "fcfs cache off", "lpm cache on", "lpm cache off"}
    assert sum(line.startswith("| ") for line in lines) == 5
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cost", "1,2"], "four numbers"),
        (["--rate", "0"], "must be positive"),
        (["--cache", "maybe"], "on or off"),
        (["--policy", "best"], "one of fcfs, lpm, priority"),
        (["--trace-file", "/nowhere.jsonl"], "No such file"),
        (["--policy-file", "/nowhere.py"], "no Python file"),
    ],
)
def test_wrong_flags_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("example", ["shortest_first.py", "popular_stays.py"])
def test_the_documented_examples_plug_in(example: str) -> None:
    simulation = simulate(build({"max_running_requests": 16}), plugin=load_plugin(EXAMPLES / example), check=True)
    result = simulation.run()
    assert result["finished"] == result["requests"]


def test_a_policy_file_without_a_policy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="neither a class Policy nor a class Tree"):
        load_plugin(path)

"""The simulator's parts: the fake worker keeps the contract, workloads are what they say, costs are fitted back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError, InvariantError
from common.messages import BeginRequest, ForwardBatch, RowFlag, SamplingParams, pack_i32, unpack_i32
from tools.simulate.cost import CostModel, fit
from tools.simulate.files import load
from tools.simulate.measure import jain
from tools.simulate.worker import EOS, FakeWorker, StepLoad, WorkerShape, output_ids
from tools.simulate.workload import SimRequest, WorkloadSpec, generate

SHAPE = WorkerShape(num_pages=64, page_size=4, max_slots=4, vocab_size=1000)


def begin(rid: str, ids: list[int], pages: list[int], prompt_len: int) -> BeginRequest:
    sampling = SamplingParams(max_tokens=10)
    return BeginRequest(0, rid, pack_i32(ids), prompt_len, 0, pack_i32(pages), sampling, (EOS,))


def batch(step: int, chunk: int, pages: list[int] | None = None, **fields: object) -> ForwardBatch:
    pages = pages or []
    columns = {"slots": [0], "num_tokens": [chunk], "num_new_pages": [len(pages)], "new_pages": pages}
    packed = {name: pack_i32(values) for name, values in columns.items()}
    return ForwardBatch(epoch=1, step=step, **packed, **fields)  # type: ignore[arg-type]


def ready_worker(output_len: int) -> FakeWorker:
    worker = FakeWorker(SHAPE, lambda rid: output_len)
    worker.ready(1)
    return worker


def test_samples_only_when_every_known_id_is_computed() -> None:
    worker = ready_worker(5)
    first, load = worker.execute(batch(1, 2, begins=[begin("a", [9, 9, 9], [0], 3)]))
    assert unpack_i32(first.num_ids).tolist() == [0]
    assert (load.prefill_tokens, load.decode_rows, load.context_tokens) == (2, 0, 2)
    second, _ = worker.execute(batch(2, 1))
    assert unpack_i32(second.ids).tolist() == output_ids("a", 0, 1, 1000).tolist()


def test_ends_with_its_end_id_and_skips_the_row_sent_meanwhile() -> None:
    worker = ready_worker(2)
    worker.execute(batch(1, 2, begins=[begin("a", [9, 9], [0, 1], 2)]))
    last, _ = worker.execute(batch(2, 0))
    assert unpack_i32(last.ids).tolist() == [EOS]
    extra, load = worker.execute(batch(3, 0))
    assert (extra.flags[0], extra.ids, load.decode_rows) == (RowFlag.SKIPPED, b"", 0)


def test_a_request_begun_again_goes_on_as_it_would_have() -> None:
    worker = ready_worker(8)
    expected = output_ids("a", 0, 4, 1000).tolist()
    worker.execute(batch(1, 2, begins=[begin("a", [9, 9], [0, 1], 2)], ends=pack_i32([0])))
    again, _ = worker.execute(batch(2, 3, begins=[begin("a", [9, 9, expected[0]], [2], 2)]))
    assert unpack_i32(again.ids).tolist() == [expected[1]]


def test_refuses_rows_that_break_the_contract() -> None:
    worker = ready_worker(8)
    worker.execute(batch(1, 4, begins=[begin("a", [9] * 4, [0], 4)]))
    with pytest.raises(InvariantError, match="0 tokens to position 4 of 5 known, with pages for 4"):
        worker.execute(batch(2, 0))


def test_fits_back_the_coefficients_it_was_given() -> None:
    rng = np.random.default_rng(0)
    loads = [StepLoad(int(rng.integers(0, 500) * (i % 3 == 0)), int(rng.integers(1, 99)), int(rng.integers(99, 9999)))
             for i in range(200)]  # fmt: skip
    true = CostModel(5e-3, 40e-6, 200e-6, 20e-9)
    fitted, quality = fit(loads, [true.seconds(load) for load in loads])
    assert quality > 0.9999
    for name in "abcd":
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_a_fit_has_no_negative_coefficient_and_says_when_there_is_too_little() -> None:
    loads = [StepLoad(0, n, 100 * n) for n in range(1, 40)]
    fitted, _ = fit(loads, [1e-2 - 1e-5 * load.decode_rows for load in loads])
    assert min(fitted.a, fitted.b, fitted.c, fitted.d) >= 0
    with pytest.raises(ConfigError, match="at least 20 steps"):
        fit(loads[:5], [1.0] * 5)


def test_the_same_seed_gives_the_same_workload() -> None:
    spec = WorkloadSpec(num_requests=50)
    one, two = generate(spec), generate(spec)
    assert one.requests == two.requests
    assert np.array_equal(one.prompt(one.requests[3]), two.prompt(two.requests[3]))


def test_prefixes_are_popular_by_rank_and_really_shared() -> None:
    workload = generate(WorkloadSpec(num_requests=3000, prefixes=20, multi_turn=0, zipf=1.2))
    counts = Counter(request.prefix for request in workload.requests)
    assert counts[0] > 2 * counts[4] > 2 * counts[19]
    one, two = [r for r in workload.requests if r.prefix == 0][:2]
    n = one.prefix_len
    assert np.array_equal(workload.prompt(one)[:n], workload.prompt(two)[:n])
    assert not np.array_equal(workload.prompt(one)[n : n + 8], workload.prompt(two)[n : n + 8])


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    for arrivals, expected in (("poisson", 1.0), ("bursty", 3.0)):
        spec = WorkloadSpec(num_requests=20_000, rate=50, arrivals=arrivals, multi_turn=0)  # type: ignore[arg-type]
        gaps = np.diff([request.time for request in generate(spec).requests])
        assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.15)


def test_the_next_turn_contains_the_exchange_before() -> None:
    workload = generate(WorkloadSpec(num_requests=200, multi_turn=1.0))
    request = next(r for r in workload.requests if r.turns_left)
    prompt, outputs = workload.prompt(request), np.array([5, 6, 7], dtype=np.int32)
    follow = workload.next_turn(request, prompt, outputs, now=100.0)
    assert follow is not None and follow.time > 100.0 and follow.turns_left == request.turns_left - 1
    assert workload.prompt(follow)[: len(prompt) + 3].tolist() == [*prompt.tolist(), 5, 6, 7]
    last = SimRequest("x", 0.0, 1, 1, 0)
    assert workload.next_turn(last, prompt, outputs, 0.0) is None


def test_reads_json_lines_of_both_kinds(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [4, 5]},
        {"timestamp": 1000, "input_length": 700, "output_length": 3, "hash_ids": [4, 6]},
        {"time": 3.0, "prompt_len": 10, "output_len": 2, "prefix": 1, "prefix_len": 6, "priority": 5},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    workload = load(path, WorkloadSpec())
    assert [request.time for request in workload.requests] == [0.0, 1.0, 2.0]
    prompts = [workload.prompt(request) for request in workload.requests]
    assert [len(prompt) for prompt in prompts] == [700, 600, 10]
    assert np.array_equal(prompts[0][:512], prompts[1][:512]) and prompts[0][512] != prompts[1][512]


def test_names_the_line_of_a_trace_file_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "prompt_len": 5, "output_len": 2}\n{"time": 1}\n')
    with pytest.raises(ConfigError, match="line 2"):
        load(path, WorkloadSpec())


def test_jain_is_one_for_equals_and_one_over_n_for_a_winner() -> None:
    assert jain(np.ones(5)) == pytest.approx(1.0)
    assert jain(np.array([1.0, 0, 0, 0])) == pytest.approx(0.25)

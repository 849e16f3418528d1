"""The gap between steps is read from a profile: a GPU's, as its profiler writes it, and one that is recorded here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_gaps import Step, device_steps, gap_line, gaps_us, read_trace
from worker_proc.profiling import Profiler


def event(kind: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


def gpu_trace() -> list[dict[str, Any]]:
    """Three steps: launches one by one and a drawing later, a graph's launch, and a step after one that is missing."""
    return [
        event("user_annotation", "quintet step 7", 100, 50),
        event("user_annotation", "quintet step 7", 152, 6),
        event("user_annotation", "quintet step 8", 160, 40),
        event("user_annotation", "quintet step 10", 300, 40),
        event("gpu_user_annotation", "quintet step 7", 120, 60),
        event("cuda_runtime", "cudaLaunchKernel", 105, 2, 1),
        event("cuda_driver", "cuLaunchKernelEx", 110, 2, 2),
        event("cuda_runtime", "cudaLaunchKernel", 154, 1, 6),
        event("cuda_runtime", "cudaGraphLaunch", 165, 3, 3),
        event("cuda_runtime", "cudaMemcpyAsync", 170, 3, 4),
        event("cuda_runtime", "cudaLaunchKernel", 250, 2, 9),  # between steps: nobody's
        event("cuda_runtime", "cudaLaunchKernel", 310, 2, 5),
        event("kernel", "_attend_split", 120, 10, 1),
        event("kernel", "_rms_norm", 125, 30, 2),  # overlaps the one before
        event("kernel", "_draw", 170, 5, 6),
        event("kernel", "a graph's first", 200, 10, 3),
        event("kernel", "a graph's second", 215, 5, 3),
        event("gpu_memcpy", "Memcpy DtoH", 222, 3, 4),
        event("kernel", "nobody's", 255, 4, 9),
        event("kernel", "_rms_norm", 320, 10, 5),
        event("cpu_op", "aten::mm", 105, 40),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 105, "id": 1},
    ]


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    steps, on_device = device_steps(gpu_trace()[:-1])
    assert on_device
    assert steps == [Step(7, 120, 175, 40), Step(8, 200, 225, 18), Step(10, 320, 330, 10)]
    assert gaps_us(steps) == [25], "from 8 to 10 is not a gap between steps"
    assert gaps_us([Step(1, 0, 10, 10), Step(2, 8, 20, 12)]) == [0]


def test_a_trace_becomes_a_line_and_a_number(tmp_path: Path) -> None:
    path = tmp_path / "worker-1.json"
    path.write_text(json.dumps({"traceEvents": gpu_trace()}))
    done = subprocess.run([sys.executable, "-m", "bench.gpu_gaps", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 steps of GPU; between two of them it waits 25 us (95 %: 25), a step takes 25 us" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["idle_between_steps"] == pytest.approx(25 / (25 + 55 + 25 + 10))
    assert report["idle_within_steps"] == pytest.approx(1 - 68 / 90)
    path.write_text(json.dumps({"traceEvents": gpu_trace()[:1]}))
    with pytest.raises(ValueError, match="0 steps with work in them, no two in a row"):
        gap_line(path)


def test_a_profile_recorded_here_holds_its_steps(tmp_path: Path) -> None:
    profiler = Profiler()
    with profiler.step(1):  # nothing is recorded yet
        pass
    profiler.start(str(tmp_path))
    for number in (2, 3, 4):
        with profiler.step(number):
            torch.ones(8, 8) @ torch.ones(8, 8)
    trace = Path(profiler.stop())
    steps, on_device = device_steps(read_trace(trace))
    assert [step.number for step in steps] == [2, 3, 4]
    assert on_device == torch.cuda.is_available()
    assert all(0 < step.busy_us <= step.end - step.begin for step in steps)
    assert len(gaps_us(steps)) == 2 and gap_line(trace)["steps"] == 3

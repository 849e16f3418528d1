"""How long the GPU waits between steps, read from a profile of the worker.

    curl -X POST localhost:30000/start_profile -d '{"output_dir": "/tmp/profile"}'
    (requests)
    curl -X POST localhost:30000/stop_profile
    python -m bench.gpu_gaps /tmp/profile/worker-*.json

A gap is the time from the end of the last kernel or copy that a step launched to the beginning of the first that the
next one launches. Kernels are counted to the step within which they were launched (a graph's too: its launch has
their correlation); a step that is launched in two parts (worker_proc/launched.py) has two marks. A trace without a GPU
has its torch operations in place of kernels; its gaps say nothing of a GPU.
The profiler itself takes time on the host, so the gaps of an undisturbed server are smaller. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from worker_proc.profiling import STEP_NAME

DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH_KINDS = frozenset({"cuda_runtime", "cuda_driver"})

Interval = tuple[float, float]
"""Begin and end in microseconds."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the device saw it."""

    number: int
    begin: float
    end: float
    busy_us: float
    """Within it, some kernel or copy ran."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The complete events of a Chrome trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def device_steps(events: list[dict[str, Any]]) -> tuple[list[Step], bool]:
    """Steps in order, and whether a GPU computed them (else torch's operations on the host stand for its kernels)."""
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(STEP_NAME)))
        for event in events
        if event["name"].startswith(STEP_NAME) and event.get("cat") == "user_annotation"
    )
    begins = [begin for begin, _, _ in marks]

    def step_at(time: float) -> int | None:
        place = bisect_right(begins, time) - 1
        return marks[place][2] if place >= 0 and time <= marks[place][1] else None

    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCH_KINDS and "correlation" in event.get("args", {})
    }
    on_device = [event for event in events if event.get("cat") in DEVICE_KINDS]
    work: dict[int, list[Interval]] = {}
    for event in on_device or [event for event in events if event.get("cat") == "cpu_op"]:
        at = launched.get(event.get("args", {}).get("correlation")) if on_device else event["ts"]
        number = None if at is None else step_at(at)
        if number is not None:
            work.setdefault(number, []).append((event["ts"], event["ts"] + event["dur"]))
    steps = [_step(number, intervals) for number, intervals in sorted(work.items())]
    return steps, bool(on_device)


def _step(number: int, intervals: list[Interval]) -> Step:
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return Step(number, min(begin for begin, _ in intervals), reached, busy)


def gaps_us(steps: list[Step]) -> list[float]:
    """Idle time between each step and the one numbered next, 0 where they overlap."""
    return [
        max(0.0, after.begin - before.end) for before, after in pairwise(steps) if after.number == before.number + 1
    ]


def gap_line(path: Path) -> dict[str, Any]:
    """One line of a table. ``ValueError`` where the trace does not hold two steps that follow each other."""
    steps, on_device = device_steps(read_trace(path))
    gaps = gaps_us(steps)
    if not gaps:
        raise ValueError(f"{path}: {len(steps)} steps with work in them, no two in a row")
    spans = np.array([step.end - step.begin for step in steps])
    within = 1.0 - sum(step.busy_us for step in steps) / max(float(spans.sum()), 1e-9)
    return {
        "of": "GPU" if on_device else "torch's operations on the CPU", "steps": len(steps),
        "gap_us_median": float(np.median(gaps)), "gap_us_p95": float(np.quantile(gaps, 0.95)),
        "step_us_median": float(np.median(spans)), "idle_within_steps": within,
        "idle_between_steps": sum(gaps) / (sum(gaps) + float(spans.sum())),
    }  # fmt: skip


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path, nargs="+")
    line: dict[str, Any] = {}
    for path in parser.parse_args().trace:
        try:
            line = gap_line(path)
        except (OSError, ValueError, KeyError) as error:
            print(f"cannot read the gaps in {path}: {error}", file=sys.stderr)
            return 1
        took = {name: f"{line[name]:.0f}" for name in ("gap_us_median", "gap_us_p95", "step_us_median")}
        print(f"{path}: {line['steps']} steps of {line['of']}; between two of them it waits {took['gap_us_median']} us "
              f"(95 %: {took['gap_us_p95']}), a step takes {took['step_us_median']} us")  # fmt: skip
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())

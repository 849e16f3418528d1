"""What ``--trace`` costs a step, per process, in CPU time and bytes: ``python -m bench.simulate_trace_cost --rows 64``.

The scheduler's records are those of a simulated run of ``rows`` decoding requests, the other processes'
those of a step of that many rows. Medians of CPU time, so a busy machine disturbs little. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.config import save
from common.flags import build
from common.messages import TextBatch, TextRow, ToScheduler
from common.trace import TraceWriter, WorkerStep
from common.trace_channels import describe_text
from scheduler_proc.record import StepRecorder
from scheduler_proc.scheduler import Scheduler, StepOutput
from tools.simulate.cost import CostModel
from tools.simulate.loop import Simulation
from tools.simulate.worker import WorkerShape
from tools.simulate.workload import WorkloadSpec, generate

_REPEAT = 2000


class TimedRecorder(StepRecorder):
    """Notes the CPU time of every record."""

    def __init__(self, trace: TraceWriter, scheduler: Scheduler) -> None:
        super().__init__(trace, scheduler)
        self.seconds: list[float] = []

    def after(self, messages: list[ToScheduler], now: float, out: StepOutput, *, worker_full: bool,
              detokenizer_full: bool) -> None:  # fmt: skip
        """As the server's."""
        began = time.thread_time()
        super().after(messages, now, out, worker_full=worker_full, detokenizer_full=detokenizer_full)
        if out.to_worker:
            self.seconds.append(time.thread_time() - began)


def simulate(rows: int, outputs: int, trace: TraceWriter) -> tuple[float, int]:
    """(median CPU seconds of a step's record, steps) of ``rows`` requests that decode ``outputs`` tokens."""
    spec = WorkloadSpec(num_requests=rows, rate=1e6, multi_turn=0, prefix_len=0, prompt_len=64, spread=0,
                        output_len=outputs, to_the_limit=True)  # fmt: skip
    config = build({"max_running_requests": rows})
    shape = WorkerShape(num_pages=rows * (outputs + 128) // 16, max_slots=rows)
    simulation = Simulation(config, shape, CostModel(1e-2, 1e-5, 1e-5, 0), generate(spec), trace=trace)
    recorder = simulation.recording = TimedRecorder(trace, simulation.scheduler)
    result = simulation.run()
    return statistics.median(recorder.seconds), int(result["steps"])


def repeat(action: Callable[[], None]) -> float:
    """CPU seconds of one call, its share of writing to the file included."""
    began = time.thread_time()
    for _ in range(_REPEAT):
        action()
    return (time.thread_time() - began) / _REPEAT


def measure(rows: int, outputs: int, folder: Path) -> dict[str, float]:
    """Microseconds and bytes per step, by process."""
    trace = TraceWriter(folder, "scheduler", 0, 0, config=save(build({})))
    scheduler_s, steps = simulate(rows, outputs, trace)
    trace.close()
    scheduler_bytes = sum(path.stat().st_size for path in folder.glob("scheduler-*")) / steps
    worker = TraceWriter(folder, "worker", 0, 0)
    detokenizer = TraceWriter(folder, "detokenizer", 0, 0)
    text = TextBatch(
        detokenizer_generation=0,
        rows=[TextRow(f"chatcmpl-{i:032x}", 0, 40, b"\1\0\0\0", 160, " word") for i in range(rows)],
    )

    def text_out() -> None:
        record = describe_text(text)
        if record is not None:
            detokenizer.write(record)

    result = {
        "scheduler_us": scheduler_s * 1e6,
        "scheduler_bytes": scheduler_bytes,
        "worker_us": repeat(lambda: worker.write(WorkerStep(1, 1, time.time(), time.time(), rows, 0))) * 1e6,
        "detokenizer_us": repeat(text_out) * 1e6,
    }
    for writer in (worker, detokenizer):
        writer.close()
    return result


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.simulate_trace_cost")
    parser.add_argument("--rows", type=int, default=64, help="requests decoding at once")
    parser.add_argument("--outputs", type=int, default=400, help="steps, about")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args.rows, args.outputs, Path(folder))
    total = result["scheduler_us"] + result["worker_us"] + result["detokenizer_us"]
    print(f"one step with {args.rows} decoding rows, CPU time of recording it:")
    for name in ("scheduler", "worker", "detokenizer"):
        print(f"  {name:<12}{result[f'{name}_us']:8.1f} us")
    print(f"  together    {total:8.1f} us: 1 % of a step that takes {total / 10:.1f} ms")
    print(json.dumps({"rows": args.rows, **{name: round(value, 2) for name, value in result.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

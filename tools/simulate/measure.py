"""What came out of a simulation, in the numbers policies are judged by."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(slots=True)
class Outcome:
    """One request, as its client saw it. Times in simulated seconds."""

    user: int
    urgent: bool
    arrived: float
    prompt_len: int
    cached_len: int = 0
    first: float = -1.0
    """First token; -1: none."""
    last: float = -1.0
    """Latest token."""
    finished: float = -1.0
    num_tokens: int = 0
    reason: str = ""


@dataclass
class Recorder:
    """Collects while the simulation runs."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    gaps: array[float] = field(default_factory=lambda: array("f"))
    """Every inter-token latency, seconds; float32, for there are millions."""
    in_use: list[tuple[float, float]] = field(default_factory=list)
    """(time, fraction of the pages live requests hold)."""
    steps: int = 0
    busy_s: float = 0.0
    """Time the worker computed."""
    prefill_tokens: int = 0

    def tokens(self, rid: str, count: int, now: float) -> None:
        """``count`` new tokens of a request."""
        outcome = self.outcomes[rid]
        if outcome.first < 0:
            outcome.first = now
        else:
            self.gaps.append(now - outcome.last)
        if count > 1:
            self.gaps.extend([0.0] * (count - 1))
        outcome.last = now
        outcome.num_tokens += count


def jain(values: F64) -> float:
    """Jain's fairness index (Jain, Chiu, Hawe 1984): 1 when all are equal, 1/n when one has everything."""
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0


def percentile(values: F64, q: float) -> float:
    """0 for no values."""
    return float(np.percentile(values, q)) if len(values) else 0.0


def summarize(recorder: Recorder, preemptions: int) -> dict[str, float]:
    """The numbers. Times in seconds unless the name says ms."""
    done = [o for o in recorder.outcomes.values() if o.reason in ("stop", "length")]
    ttft = np.array([o.first - o.arrived for o in done])
    total = np.array([o.finished - o.arrived for o in done])
    gaps = np.asarray(recorder.gaps, dtype=np.float64)
    began = min((o.arrived for o in recorder.outcomes.values()), default=0.0)
    span = max((o.finished for o in done), default=0.0) - began
    prompt = sum(o.prompt_len for o in done)
    output = sum(o.num_tokens for o in done)
    n = max(len(done), 1)
    times, used = np.array(recorder.in_use).T if recorder.in_use else (np.zeros(0), np.zeros(0))
    weights = np.diff(times, append=times[-1:])
    urgent = np.array([o.first - o.arrived for o in done if o.urgent])
    result = {
        "requests": float(len(recorder.outcomes)),
        "finished": float(len(done)),
        "refused": float(sum(o.reason == "refused" for o in recorder.outcomes.values())),
        "simulated_s": span,
        "tokens_per_request": (prompt + output) / n,
        "output_tokens_per_s": output / span if span else 0.0,
        "hit_rate": sum(o.cached_len for o in done) / max(prompt, 1),
        "ttft_p50_ms": percentile(ttft, 50) * 1e3,
        "ttft_p90_ms": percentile(ttft, 90) * 1e3,
        "ttft_p99_ms": percentile(ttft, 99) * 1e3,
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_p99_ms": percentile(gaps, 99) * 1e3,
        "itl_max_ms": float(gaps.max()) * 1e3 if len(gaps) else 0.0,
        "e2e_p50_s": percentile(total, 50),
        "e2e_p99_s": percentile(total, 99),
        "preemptions_per_request": preemptions / n,
        "computed_per_needed": recorder.prefill_tokens / max(prompt - sum(o.cached_len for o in done), 1),
        "pool_use_mean": float((used * weights).sum() / weights.sum()) if weights.sum() else 0.0,
        "pool_use_p95": percentile(used, 95),
        "steps": float(recorder.steps),
        "worker_busy": recorder.busy_s / span if span else 0.0,
        "urgent_ttft_p99_ms": percentile(urgent, 99) * 1e3,
    }
    return {**result, **fairness([o for o in done if not o.urgent])}


def fairness(done: list[Outcome]) -> dict[str, float]:
    """How evenly users are served: of each user's mean speed (output tokens per second of waiting and
    receiving) Jain's index, and how many times longer the slowest tenth of users waits for a first token
    than the fastest tenth."""
    speeds: dict[int, list[float]] = defaultdict(list)
    waits: dict[int, list[float]] = defaultdict(list)
    for outcome in done:
        speeds[outcome.user].append(outcome.num_tokens / max(outcome.finished - outcome.arrived, 1e-9))
        waits[outcome.user].append(outcome.first - outcome.arrived)
    per_user = np.array([float(np.mean(values)) for values in speeds.values()])
    wait = np.array([float(np.mean(values)) for values in waits.values()])
    fastest = percentile(wait, 10)
    return {
        "jain_users": jain(per_user) if len(per_user) else 1.0,
        "user_ttft_p90_over_p10": percentile(wait, 90) / fastest if fastest else 1.0,
    }


COLUMNS = (
    ("output_tokens_per_s", "tok/s", "{:.0f}"),
    ("hit_rate", "hit rate", "{:.1%}"),
    ("ttft_p50_ms", "TTFT p50 ms", "{:.0f}"),
    ("ttft_p99_ms", "TTFT p99 ms", "{:.0f}"),
    ("itl_p50_ms", "ITL p50 ms", "{:.1f}"),
    ("itl_p99_ms", "ITL p99 ms", "{:.1f}"),
    ("preemptions_per_request", "preempt/req", "{:.3f}"),
    ("pool_use_mean", "pool use", "{:.1%}"),
    ("jain_users", "Jain", "{:.3f}"),
    ("user_ttft_p90_over_p10", "user spread", "{:.1f}x"),
)


def table(results: dict[str, dict[str, float]]) -> str:
    """Runs as rows, the columns that tell policies apart, in Markdown."""
    head = ["run", *(title for _, title, _ in COLUMNS)]
    rows = [[name, *(style.format(values[key]) for key, _, style in COLUMNS)] for name, values in results.items()]
    if any(values["urgent_ttft_p99_ms"] for values in results.values()):
        head.append("urgent TTFT p99 ms")
        for row, values in zip(rows, results.values(), strict=True):
            row.append(f"{values['urgent_ttft_p99_ms']:.0f}")
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in [head, *rows])
    lines = ["| " + " | ".join(line) + " |" for line in padded]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)

"""Counters of the scheduler, under SGLang's names where it has one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import InvariantError

BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 120.0
)  # fmt: skip
"""Upper bounds of both histograms: the gateway's ``LATENCY_BUCKETS``, under which it shows them."""


@dataclass
class Histogram:
    """Counts per bucket of ``BUCKETS_S`` (not cumulative), the last one for values above every bound."""

    total: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))

    def observe(self, value: float) -> None:
        """Count one value."""
        self.total += value
        self.counts[bisect_left(BUCKETS_S, value)] += 1

    def row(self) -> list[float]:
        """[sum, count, bucket counts...] as EngineStatus carries it."""
        return [self.total, float(sum(self.counts)), *map(float, self.counts)]


FINISH_REASONS = ("stop", "length", "abort", "error")
ABORT_CAUSES = ("client", "gateway_gone", "deadline", "queue_timeout", "queue_full", "admin")
FAIL_CODES = ("row_failed", "row_skipped", "worker_crash")


@dataclass
class Metrics:
    """What has happened since the process started."""

    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    num_requests_total: int = 0
    num_preemptions_total: int = 0
    num_steps_total: int = 0
    num_prefill_tokens_total: int = 0
    spec_decode_num_draft_tokens_total: int = 0
    """vLLM's name, as the next."""
    spec_decode_num_accepted_tokens_total: int = 0
    num_invariant_failures_total: int = 0
    num_bad_frames_total: int = 0
    """By all processes but the gateways, as the supervisor counts."""
    num_finished: dict[str, int] = field(default_factory=dict)
    """By reason: one of ``FINISH_REASONS``."""
    num_aborted: dict[str, int] = field(default_factory=dict)
    """By cause: one of ``ABORT_CAUSES``."""
    num_failed: dict[str, int] = field(default_factory=dict)
    """By the error's code: one of ``FAIL_CODES``."""
    step_time: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)

    def drafted(self, num_drafts: Sequence[int], num_ids: Sequence[int]) -> None:
        """Count what a step's rows computed in the hope that it would be drawn; all but the last of a row's ids was."""
        self.spec_decode_num_draft_tokens_total += sum(num_drafts)
        accepted = sum(ids - 1 for drafts, ids in zip(num_drafts, num_ids, strict=True) if drafts and ids)
        self.spec_decode_num_accepted_tokens_total += accepted

    def aborted(self, cause: str) -> None:
        """Count a request that was ended from outside, or never begun."""
        _known(cause, ABORT_CAUSES)
        self.num_aborted[cause] = self.num_aborted.get(cause, 0) + 1

    def failed(self, code: str) -> None:
        """Count a request that the engine could not go on with."""
        _known(code, FAIL_CODES)
        self.num_failed[code] = self.num_failed.get(code, 0) + 1

    def finished(self, reason: str) -> None:
        """Count an ending."""
        _known(reason, FINISH_REASONS)
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1

    def counters(self) -> dict[str, float]:
        """Flat, for EngineStatus. Reasons that have not occurred are there with 0: a rate needs a first value."""
        out: dict[str, float] = {
            "prompt_tokens_total": self.prompt_tokens_total,
            "cached_tokens_total": self.cached_tokens_total,
            "generation_tokens_total": self.generation_tokens_total,
            "num_requests_total": self.num_requests_total,
            "num_preemptions_total": self.num_preemptions_total,
            "num_steps_total": self.num_steps_total,
            "num_prefill_tokens_total": self.num_prefill_tokens_total,
            "spec_decode_num_draft_tokens_total": self.spec_decode_num_draft_tokens_total,
            "spec_decode_num_accepted_tokens_total": self.spec_decode_num_accepted_tokens_total,
            "num_invariant_failures_total": self.num_invariant_failures_total,
            "num_bad_frames_total": self.num_bad_frames_total,
        }
        out["cache_hit_rate"] = self.cached_tokens_total / max(self.prompt_tokens_total, 1)
        for reason in FINISH_REASONS:
            out[f"num_finished_requests_total_{reason}"] = self.num_finished.get(reason, 0)
        for cause in ABORT_CAUSES:
            out[f"num_aborted_requests_total_{cause}"] = self.num_aborted.get(cause, 0)
        for code in FAIL_CODES:
            out[f"num_failed_requests_total_{code}"] = self.num_failed.get(code, 0)
        return out

    def histograms(self) -> dict[str, list[float]]:
        """name -> [sum, count, bucket counts...]."""
        return {"step_time_seconds": self.step_time.row(), "queue_time_seconds": self.queue_time.row()}


def _known(name: str, names: tuple[str, ...]) -> None:
    """A reason without a metric would be counted and never shown."""
    if name not in names:
        raise InvariantError(f"{name!r} is none of the counted reasons {', '.join(names)}")

"""What the gateways count, and one ``/metrics`` answer from any of several gateways.

Two sources, each counted once however many gateways there are:

* The engine's counters and gauges come from the newest ``EngineStatus``. Every gateway holds the
  same snapshot, so whichever gateway a scrape reaches shows them, without a label, once.
* What a gateway itself measures (latencies, replies by status) differs between gateways, and with
  several behind one port nobody chooses which one a scrape reaches. So each publishes its numbers
  in ``metrics-<gateway>.json`` in the run directory, and whoever is asked shows those of all of
  them, each with a ``gateway`` label. ``sum without (gateway)`` is the server's total.

SGLang's names follow ``quintet:``, as they follow ``sglang:`` there, so its dashboards need that word replaced and no
more. Prometheus keeps the colon for recording rules, and its linter objects to it: whoever minds asks for
``/metrics?prefix=quintet_``.

TTFT: request received -> first content written. ITL: between content writes. E2E: request received
-> last byte written (for a reply that is not streamed, content counts as written when it arrives).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import EngineStatus
from gateway.metric_help import ENGINE, GATEWAY, UNKNOWN

PREFIX = "quintet:"
PREFIXES = (PREFIX, "quintet_")
"""What a scrape may choose from."""

LATENCY_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 120.0
)  # fmt: skip
"""Upper bounds in seconds; a last bucket without bound follows."""
INTERVAL_BUCKETS = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2
)  # fmt: skip

ENGINE_BUCKETS: dict[str, tuple[float, ...]] = {}
"""Buckets of the engine's histograms (``EngineStatus.histograms``) by name, where they are not
``LATENCY_BUCKETS``. A histogram's list is [sum, count, one count per bucket..., count above]."""


class Histogram:
    """Counts by bucket. ``observe`` costs a bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value (seconds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Snapshot(msgspec.Struct):
    """One gateway's numbers as published for the others."""

    gateway: str
    counters: dict[str, float]
    gauges: dict[str, float]
    replies: dict[str, int]
    histograms: dict[str, tuple[float, list[int]]]


_HISTOGRAMS = {
    "time_to_first_token_seconds": LATENCY_BUCKETS,
    "inter_token_latency_seconds": INTERVAL_BUCKETS,
    "e2e_request_latency_seconds": LATENCY_BUCKETS,
}


class GatewayMetrics:
    """This gateway's own numbers."""

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self.ttft = Histogram(LATENCY_BUCKETS)
        self.itl = Histogram(INTERVAL_BUCKETS)
        self.e2e = Histogram(LATENCY_BUCKETS)
        self.num_aborted = 0
        self.num_resubmitted = 0
        self.num_output_tokens = 0
        self.num_cut_off = 0
        self.num_open = 0
        self.num_connections = 0
        self.num_bad_frames = 0
        self.replies: dict[str, int] = {}

    def count_reply(self, status: int) -> None:
        """Count one HTTP reply."""
        key = str(status)
        self.replies[key] = self.replies.get(key, 0) + 1

    def snapshot(self) -> Snapshot:
        """Everything, to be published or shown."""
        return Snapshot(
            gateway=self.gateway,
            counters={
                "gateway_aborted_requests": self.num_aborted,
                "gateway_resubmitted_requests": self.num_resubmitted,
                "gateway_output_tokens": self.num_output_tokens,
                "gateway_cut_off_clients": self.num_cut_off,
                "gateway_bad_frames": self.num_bad_frames,
            },
            gauges={"gateway_open_requests": self.num_open, "gateway_connections": self.num_connections},
            replies=dict(self.replies),
            histograms={
                "time_to_first_token_seconds": (self.ttft.total, self.ttft.counts),
                "inter_token_latency_seconds": (self.itl.total, self.itl.counts),
                "e2e_request_latency_seconds": (self.e2e.total, self.e2e.counts),
            },
        )


class Exposition:
    """Publishes one gateway's numbers and renders those of all gateways of this run directory.

    A gateway on another host than the engine (``run_dir`` None) shows its own alone: the engine's are shown by
    the gateways of its host, and whoever scrapes both must not count them twice.
    """

    def __init__(self, run_dir: Path | None, own: GatewayMetrics) -> None:
        self._run_dir = run_dir
        self._own = own
        self._last = b""

    def publish(self) -> None:
        """Write this gateway's file if something changed; called every few seconds."""
        data = msgspec.json.encode(self._own.snapshot())
        if data == self._last or self._run_dir is None:
            return
        path = self._path_in(self._run_dir)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
        self._last = data

    def render(self, status: EngineStatus | None, prefix: str = PREFIX) -> bytes:
        """The text a scrape gets; ``prefix`` is one of ``PREFIXES``."""
        registry = CollectorRegistry()
        families = [*_engine(self._shown(status), prefix), *_gateways(self._snapshots(), prefix)]
        registry.register(_Rendered(families))
        return generate_latest(registry)

    def _shown(self, status: EngineStatus | None) -> EngineStatus | None:
        return status if self._run_dir is not None else None

    def _path_in(self, run_dir: Path) -> Path:
        return run_dir / f"metrics-{self._own.gateway}.json"

    def _snapshots(self) -> list[Snapshot]:
        found = [self._own.snapshot()]
        if self._run_dir is None:
            return found
        own_path = self._path_in(self._run_dir)
        for path in sorted(self._run_dir.glob("metrics-*.json")):
            if path == own_path:
                continue
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Snapshot))
            except (OSError, msgspec.DecodeError):
                continue  # half gone: its gateway is being restarted
        return found


class _Rendered(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _engine(status: EngineStatus | None, prefix: str) -> Iterator[Metric]:
    if status is None:
        return
    gauges = {
        "engine_ready": float(status.ready),
        "num_running_reqs": status.num_running,
        "num_queue_reqs": status.num_waiting,
        "max_total_num_tokens": status.max_total_tokens,
    }
    labelled: dict[str, CounterMetricFamily] = {}
    for name, value in {**gauges, **status.metrics}.items():
        base, total, reason = name.partition("_requests_total_")
        if total:  # num_finished_requests_total_stop: a counter with a label
            base += "_requests"
            if base not in labelled:
                labelled[base] = CounterMetricFamily(prefix + base, _help(base), labels=["reason"])
            labelled[base].add_metric([reason], value)
        elif name.endswith("_total"):
            base = name.removesuffix("_total")
            yield CounterMetricFamily(prefix + base, _help(base), value=value)
        else:
            yield GaugeMetricFamily(prefix + name, _help(name), value=value)
    yield from labelled.values()
    for name, values in status.histograms.items():
        bounds = ENGINE_BUCKETS.get(name, LATENCY_BUCKETS)
        if len(values) != len(bounds) + 3:
            continue
        family = HistogramMetricFamily(prefix + name, _help(name))
        family.add_metric([], _cumulative(bounds, values[2:]), values[0])
        yield family
    name = "process_generation"
    family_generation = GaugeMetricFamily(prefix + name, _help(name), labels=["process"])
    for role, generation in sorted(status.generations.items()):
        family_generation.add_metric([role], generation)
    yield family_generation


def _help(name: str) -> str:
    return ENGINE.get(name, UNKNOWN)


def _gateways(snapshots: list[Snapshot], prefix: str) -> Iterator[Metric]:
    for name in snapshots[0].counters:
        counter = CounterMetricFamily(prefix + name, GATEWAY[name], labels=["gateway"])
        for snapshot in snapshots:
            counter.add_metric([snapshot.gateway], snapshot.counters.get(name, 0))
        yield counter
    for name in snapshots[0].gauges:
        gauge = GaugeMetricFamily(prefix + name, GATEWAY[name], labels=["gateway"])
        for snapshot in snapshots:
            gauge.add_metric([snapshot.gateway], snapshot.gauges.get(name, 0))
        yield gauge
    name = "http_replies"
    replies = CounterMetricFamily(prefix + name, GATEWAY[name], labels=["gateway", "status"])
    for snapshot in snapshots:
        for status, count in sorted(snapshot.replies.items()):
            replies.add_metric([snapshot.gateway, status], count)
    yield replies
    for name, bounds in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(prefix + name, GATEWAY[name], labels=["gateway"])
        for snapshot in snapshots:
            total, counts = snapshot.histograms.get(name, (0.0, [0] * (len(bounds) + 1)))
            histogram.add_metric([snapshot.gateway], _cumulative(bounds, counts), total)
        yield histogram


def _cumulative(bounds: tuple[float, ...], counts: Iterable[float]) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    running = 0.0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        running += count
        buckets.append((bound, running))
    return buckets

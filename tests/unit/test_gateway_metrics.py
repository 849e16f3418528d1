"""/metrics: the engine's numbers once, the gateways' with a label, whichever gateway is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.channels import Channels
from common.messages import EngineStatus
from gateway.metrics import LATENCY_BUCKETS, Exposition, GatewayMetrics, Histogram
from tests.unit.gateway_live import live_gateway


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def status(**fields: object) -> EngineStatus:
    base = {
        "generations": {"worker-0": 2}, "ready": True, "draining": False, "num_running": 1, "num_waiting": 2,
        "max_queued": 9, "context_len": 64, "max_total_tokens": 512,
    }  # fmt: skip
    return EngineStatus(**{**base, **fields})  # type: ignore[arg-type]


def test_histogram_counts_values_in_the_first_bucket_that_holds_them() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 12.0)


def test_engine_snapshot_is_shown_with_the_prefix(tmp_path: Path) -> None:
    counts = [0.0] * (len(LATENCY_BUCKETS) + 1)
    counts[1] = 3.0
    found = samples(
        Exposition(tmp_path, GatewayMetrics("gateway-0"))
        .render(
            status(
                metrics={"prompt_tokens_total": 7, "cache_hit_rate": 0.5, "num_finished_requests_total_stop": 4},
                histograms={"step_time_seconds": [0.05, 3.0, *counts], "unknown_shape": [1.0, 1.0, 1.0]},
            )
        )
        .decode()
    )
    assert found["quintet:prompt_tokens_total", ()] == 7
    assert found["quintet:cache_hit_rate", ()] == 0.5
    assert found["quintet:num_finished_requests_total", (("reason", "stop"),)] == 4
    assert found["quintet:num_running_reqs", ()] == 1
    assert found["quintet:max_total_num_tokens", ()] == 512
    assert found["quintet:process_generation", (("process", "worker-0"),)] == 2
    assert found["quintet:step_time_seconds_count", ()] == 3
    assert found["quintet:step_time_seconds_bucket", (("le", "0.005"),)] == 0
    assert found["quintet:step_time_seconds_bucket", (("le", "0.01"),)] == 3
    assert not any("unknown_shape" in name for name, _ in found)


def test_any_gateway_shows_all_gateways_once(tmp_path: Path) -> None:
    first, second = GatewayMetrics("gateway-0"), GatewayMetrics("gateway-1")
    first.count_reply(200)
    second.count_reply(200)
    second.count_reply(503)
    second.ttft.observe(0.03)
    a, b = Exposition(tmp_path, first), Exposition(tmp_path, second)
    a.publish()
    b.publish()
    from_a, from_b = samples(a.render(None).decode()), samples(b.render(None).decode())
    assert from_a == from_b
    assert from_a["quintet:http_replies_total", (("gateway", "gateway-1"), ("status", "503"))] == 1
    assert from_a["quintet:time_to_first_token_seconds_count", (("gateway", "gateway-1"),)] == 1


def test_a_half_written_file_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics-gateway-7.json").write_text("{")
    Exposition(tmp_path, GatewayMetrics("gateway-0")).render(None)


def test_latencies_are_observed_per_request() -> None:
    with live_gateway() as pair:
        pair.chat(stream=True)
        pair.chat()
        found = samples(pair.client.get("/metrics").text)
    label = (("gateway", "gateway-0"),)
    assert found["quintet:time_to_first_token_seconds_count", label] == 2
    assert found["quintet:e2e_request_latency_seconds_count", label] == 2
    assert found["quintet:gateway_output_tokens_total", label] == 6
    assert found["quintet:gateway_open_requests", label] == 0


def test_frames_that_are_no_messages_are_counted_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with live_gateway() as pair:
        channels = Channels(pair.run_dir)
        sender = channels.sender("gateway-0")
        for frame in (b"", b"\xc1", b"\x81\xa4type\xa5Nope!", b"x" * 100_000):
            sender.send_bytes(frame)
        channels.close()
        assert pair.chat().status_code == 200
        found = samples(pair.client.get("/metrics").text)
        assert found["quintet:gateway_bad_frames_total", (("gateway", "gateway-0"),)] == 4

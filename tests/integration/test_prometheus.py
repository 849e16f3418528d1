"""What Prometheus makes of ``/metrics``: its linter, its rule checker, and a Prometheus that scrapes a live server.

The server has two gateways behind its one port, and nobody chooses which one a connection reaches.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.metric_help import ENGINE, GATEWAY
from tests.integration.server import ROOT, Server, eventually

pytestmark = pytest.mark.integration
DEPLOY = ROOT / "deploy"
NUM_TOKENS = 12
PROMPT = "one two three four five six seven eight nine ten eleven twelve"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str, query: str = "") -> str:
    """One scrape, over a connection of its own."""
    reply = httpx.get(f"{url}/metrics{query}", timeout=20)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain"), reply.text
    return reply.text


def series(text: str) -> Series:
    """(name, labels) -> value; a series that comes twice fails."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def total(found: Series, name: str) -> float:
    """Over all labels."""
    return sum(value for (one, _), value in found.items() if one == f"quintet:{name}")


def by_gateway(found: Series, name: str) -> dict[str, float]:
    """Gateway -> value."""
    out: dict[str, float] = defaultdict(float)
    for (one, labels), value in found.items():
        if one == f"quintet:{name}":
            out[dict(labels)["gateway"]] += value
    return out


def ask(url: str, **fields: Any) -> httpx.Response:
    """A completion over a connection of its own."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=100)


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    """Two gateways."""
    one = Server(
        ["--model", str(tiny_folder), "--served-model-name", "tiny", "--dtype", "float32", "--device", "cpu",
         "--cpu-threads", "1", "--gateways", "2"]
    )  # fmt: skip
    try:
        yield one.wait_ready(250)
    finally:
        one.close()


@pytest.fixture(scope="module")
def num_asked(server: Server) -> int:
    """Requests sent, until each gateway has answered some."""
    num = 0
    while num < 4 or len(by_gateway_answered(server)) < 2:
        assert ask(server.url, stream=num % 2 == 1).status_code == 200
        num += 1
        assert num < 60, "all connections reach one gateway"
    return num


def by_gateway_answered(server: Server) -> list[str]:
    """Gateways that have answered a completion."""
    counts = by_gateway(series(scrape(server.url)), "e2e_request_latency_seconds_count")
    return [name for name, count in counts.items() if count]


def settled(url: str, num: int) -> list[Series]:
    """Scrapes of whichever gateways, once all of them have everything: they publish every few seconds."""
    found: list[Series] = []

    def complete(one: Series) -> bool:
        latencies = total(one, "e2e_request_latency_seconds_count")
        return latencies == total(one, "num_finished_requests_total") == num

    def all_complete() -> bool:
        found[:] = [series(scrape(url)) for _ in range(10)]
        return all(map(complete, found))

    eventually(all_complete, 60, "all counted")
    return found


def test_each_request_and_token_is_counted_once_whichever_gateway_is_scraped(server: Server, num_asked: int) -> None:
    expected, *others = settled(server.url, num_asked)
    for name in ("num_requests_total", "time_to_first_token_seconds_count", "queue_time_seconds_count"):
        assert total(expected, name) == num_asked
    for name in ("generation_tokens_total", "gateway_output_tokens_total"):
        assert total(expected, name) == num_asked * NUM_TOKENS
    prompts = total(expected, "prompt_tokens_total")
    assert prompts % num_asked == 0 and 0 < total(expected, "cached_tokens_total") < prompts
    rate = total(expected, "cache_hit_rate")
    assert rate == pytest.approx(total(expected, "cached_tokens_total") / prompts)
    moving = ("gateway_connections", "http_replies")
    still = {key: value for key, value in expected.items() if not any(word in key[0] for word in moving)}
    for other in others:
        assert {key: other.get(key) for key in still} == still


def test_aborts_are_counted_by_cause_and_unfinished_reasons_are_there_with_zero(server: Server, num_asked: int) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", timeout=60,
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True},
    ) as reply:  # fmt: skip
        assert reply.status_code == 200
        next(line for line in reply.iter_lines() if line.startswith("data: {"))

    def counted() -> bool:
        found = series(scrape(server.url))
        return (
            found["quintet:num_aborted_requests_total", (("reason", "client"),)] == 1
            and found["quintet:num_finished_requests_total", (("reason", "abort"),)] == 1
            and total(found, "gateway_aborted_requests_total") == 1
        )

    eventually(counted, 30, "the abort")
    found = series(scrape(server.url))
    assert found["quintet:num_aborted_requests_total", (("reason", "deadline"),)] == 0
    assert found["quintet:num_failed_requests_total", (("reason", "worker_crash"),)] == 0


def test_every_metric_says_what_it_is(server: Server) -> None:
    families = list(text_string_to_metric_families(scrape(server.url)))
    words = {family.name.removeprefix("quintet:"): family.documentation for family in families}
    assert words == {**ENGINE, **GATEWAY}


@needs_promtool
def test_the_linter_objects_to_the_colon_alone_and_not_at_all_without_it(server: Server) -> None:
    def lint(query: str) -> subprocess.CompletedProcess[str]:
        text = scrape(server.url, query)
        return subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)

    colon = lint("")
    lines = (colon.stdout + colon.stderr).splitlines()
    assert lines and all(line.endswith("metric names should not contain ':'") for line in lines), lines
    plain = lint("?prefix=quintet_")
    assert (plain.returncode, plain.stdout + plain.stderr) == (0, "")


def test_both_prefixes_show_the_same_and_others_are_refused(server: Server) -> None:
    colon, plain = scrape(server.url), scrape(server.url, "?prefix=quintet_")
    assert {name for name, _ in series(plain)} == {name.replace(":", "_") for name, _ in series(colon)}
    reply = httpx.get(server.url + "/metrics?prefix=vllm:", timeout=20)
    assert reply.status_code == 400 and "'quintet:' and 'quintet_'" in reply.json()["error"]["message"]


@needs_promtool
def test_the_alert_rules_are_valid_and_fire_when_they_should(tmp_path: Path) -> None:
    for command in (["check", "rules", str(DEPLOY / "prometheus-alerts.yaml")],
                    ["test", "rules", str(ROOT / "tests" / "integration" / "alert_cases.yaml")]):  # fmt: skip
        result = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr


class Prometheus:
    """A Prometheus of this test's own that scrapes one server every second."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "prometheus-alerts.yaml")],
            "scrape_configs": [{"job_name": "quintet", "static_configs": [{"targets": [target]}]}],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={self.address}", "--log.level=warn"],
            stdout=self._log, stderr=subprocess.STDOUT, cwd=folder,
        )  # fmt: skip

    def get(self, path: str, **params: str) -> Any:
        """The ``data`` of an API answer."""
        reply = httpx.get(f"http://{self.address}/api/v1/{path}", params=params, timeout=20)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]

    def query(self, expression: str) -> list[float]:
        """The values an expression has now."""
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules with their health."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def up(self) -> bool:
        """It has started and scraped the server."""
        try:
            ready = httpx.get(f"http://{self.address}/-/ready", timeout=20).status_code == 200
            return ready and self.query('up{job="quintet"}') == [1.0]
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


@needs_prometheus
def test_prometheus_scrapes_it_and_every_rule_and_panel_can_be_evaluated(
    tmp_path: Path, server: Server, num_asked: int
) -> None:
    prometheus = Prometheus(tmp_path, server.url.removeprefix("http://"))
    try:
        eventually(prometheus.up, 60, "the first scrape")
        for _ in range(3):
            assert ask(server.url).status_code == 200
        finished = 'sum(quintet:num_finished_requests_total{reason="length"})'
        eventually(lambda: prometheus.query(finished) == [num_asked + 3], 30, "what was asked since, scraped")
        answered = "sum(quintet:e2e_request_latency_seconds_count)"
        eventually(lambda: prometheus.query(answered) == [num_asked + 3], 30, "latencies of both gateways")
        assert prometheus.query("count(quintet:num_requests_total)") == [1.0], "one series, not one per gateway"
        (target,) = prometheus.get("targets")["activeTargets"]
        assert target["health"] == "up" and target["lastError"] == ""
        eventually(lambda: {rule["health"] for rule in prometheus.rules()} == {"ok"}, 30, "every rule evaluated")
        assert len(prometheus.rules()) >= 10
        dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
        expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
        assert len(expressions) > 10
        for expression in expressions:
            text = re.sub(r"\$__rate_interval", "1m", expression).replace("$instance", ".*")
            assert "$" not in text
            eventually(lambda text=text: len(prometheus.query(text)) > 0, 20, f"values of {expression}")  # type: ignore[misc]
    finally:
        prometheus.close()

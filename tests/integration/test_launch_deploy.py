"""The files of deploy/ with the programs they are for, where those are installed."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from launcher.ports import claim_port
from tests.integration.server import ROOT, eventually

pytestmark = pytest.mark.integration
DEPLOY = ROOT / "deploy"
FAKES = ROOT / "tests" / "integration" / "fakes" / "launch_fakes.py"


class Upstream(ThreadingHTTPServer):
    """A server that streams two events, the second only when ``go_on`` is set; or answers 503."""

    def __init__(self, port: int, *, full: bool = False) -> None:
        self.full = full
        self.go_on = threading.Event()
        self.request_ids: list[str] = []
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_GET(self) -> None:  # health checks
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.full:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.server.bodies.append(body)
        self.server.request_ids.append(self.headers["X-Request-Id"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b"data: one\n\n")
        self.server.go_on.wait(20)
        self._chunk(b"data: two\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def nginx(folder: Path, port: int, upstreams: list[int]) -> Iterator[None]:
    conf = (DEPLOY / "nginx.conf").read_text()
    conf = conf.replace("listen 8080", f"listen 127.0.0.1:{port}")
    for old, new in zip((30000, 30001), upstreams, strict=True):
        conf = conf.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    paths = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""  # the folder is the test's own
    main.write_text(
        f"{user} daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {paths}\n{conf} }}"
    )
    with running(["nginx", "-e", "stderr", "-p", str(folder), "-c", str(main)], port):
        yield


@contextmanager
def haproxy(folder: Path, port: int, upstreams: list[int]) -> Iterator[None]:
    conf = (DEPLOY / "haproxy.cfg").read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    for old, new in zip((30000, 30001), upstreams, strict=True):
        conf = conf.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    main = folder / "haproxy.cfg"
    main.write_text(conf)
    with running(["haproxy", "-f", str(main)], port):
        yield


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command)
    try:
        eventually(lambda: listens(port) or process.poll() is not None, 10, "the proxy listens")
        assert process.poll() is None
        yield
    finally:
        process.terminate()
        process.wait(10)


def listens(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.connect()
    except OSError:
        return False
    connection.close()
    return True


@pytest.mark.parametrize("proxy", [nginx, haproxy], ids=["nginx", "haproxy"])
def test_a_proxy_passes_events_as_they_come_and_tries_the_next_server(proxy: object, tmp_path: Path) -> None:
    name = proxy.__name__  # type: ignore[attr-defined]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    full, good, port = (claim_port("127.0.0.1", 0) for _ in range(3))
    busy, upstream = Upstream(full, full=True), Upstream(good)
    try:
        with proxy(tmp_path, port, [full, good]):  # type: ignore[operator]
            body = json.dumps({"prompt": "x" * 4000}).encode()
            for request_id in ("mine", None):  # two requests: one of them meets the full server first
                upstream.go_on.clear()
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                headers = {"X-Request-Id": request_id} if request_id else {}
                client.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
                reply = client.getresponse()
                assert reply.status == 200
                assert reply.read1() == b"data: one\n\n", "it came before the second was written"
                upstream.go_on.set()
                assert reply.read() == b"data: two\n\n"
                client.close()
            assert upstream.request_ids[0] == "mine" and len(upstream.request_ids[1]) >= 32
            assert upstream.bodies == [body, body]
    finally:
        for one in (busy, upstream):
            one.shutdown()
            one.server_close()


def test_supervisord_starts_restarts_and_stops_the_server(tmp_path: Path) -> None:
    supervisord = Path(sys.executable).with_name("supervisord")
    if not supervisord.exists():
        pytest.skip("supervisord is not installed")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (tmp_path / "server.yaml").write_text(f"model: {model}\nload-format: dummy\nport: 0\n")
    with tempfile.TemporaryDirectory(prefix="qt-", dir="/tmp") as run_folder:
        text = (DEPLOY / "supervisord.conf").read_text()
        text = text.replace("/opt/quintet/.venv/bin/python /opt/quintet/launch.py", f"{sys.executable} {FAKES}")
        text = text.replace("/etc/quintet/server.yaml", str(tmp_path / "server.yaml")).replace("user=quintet\n", "")
        text = text.replace("/var/lib/quintet", str(tmp_path)).replace("/var/log/quintet.log", f"{tmp_path}/log")
        text = re.sub("environment=.*", f'environment=TMPDIR="{run_folder}",PYTHONPATH="{ROOT}"', text)
        head = f"[supervisord]\nnodaemon=true\nlogfile={tmp_path}/supervisord.log\npidfile={tmp_path}/pid\n\n"
        (tmp_path / "conf").write_text(head + text.replace("startsecs=5", "startsecs=0"))
        process = subprocess.Popen([str(supervisord), "-c", str(tmp_path / "conf")], stdout=subprocess.DEVNULL)
        log = tmp_path / "log"
        try:
            eventually(lambda: log.exists() and log.read_text().count("Ready on") == 1, 30, "started")
            (launcher,) = psutil.Process(process.pid).children()
            launcher.send_signal(signal.SIGKILL)
            eventually(lambda: log.read_text().count("Ready on") == 2, 30, "started again")
            everyone = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.terminate()
            assert process.wait(60) == 0
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert not alive
        eventually(lambda: not list(Path(run_folder).iterdir()), 10, "no run directory left")


@pytest.mark.parametrize(("unit", "exposure"), [("quintet.service", 1.4), ("quintet-gateway.service", 1.2)])
def test_the_systemd_units_are_as_hardened_as_the_docs_say(unit: str, exposure: float) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    out = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(DEPLOY / unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(rf"exposure level for {unit}: ([\d.]+)", out.stdout)
    assert found is not None, out.stderr
    assert float(found.group(1)) <= exposure
    operations = (ROOT / "docs" / "operations.md").read_text()
    assert re.search(rf"`deploy/{unit}` \([^)]*exposure {exposure}\)", operations)


def test_alerts_dashboard_and_compose_load_and_name_metrics_that_exist() -> None:
    from gateway import metrics

    alerts = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    named = {name for text in expressions for name in re.findall(r"quintet:(\w+)", text)}
    files = [path for package in ("gateway", "scheduler_proc") for path in (ROOT / package).glob("*.py")]
    source = "".join(path.read_text() for path in files)
    stems = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named}
    assert not [stem for stem in stems if stem not in source]
    assert metrics.PREFIX == "quintet:"
    operations = (ROOT / "docs" / "operations.md").read_text()
    assert not [rule["alert"] for rule in rules if f"### {rule['alert']}" not in operations]
    assert yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["quintet"]

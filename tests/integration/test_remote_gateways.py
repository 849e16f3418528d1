"""Gateways on other hosts: they join, stream, leave, die, and are refused without a known key."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from common.curve import make_keys
from tests.integration.client import completion_body, events, stream
from tests.integration.fakes.launch_no_model import __file__ as no_model
from tests.integration.fakes.launch_no_model import make_folder
from tests.integration.remote_gateway import RemoteGateway, free_ports
from tests.integration.server import Server, eventually

pytestmark = pytest.mark.integration
PROMPT = "to be or not to be, that is the question"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """As the shared fixture of this name, with a worker that has no model."""
    folder = make_folder(tmp_path / "tiny")
    started: list[Server] = []

    def start(*args: str, wait: bool = True) -> Server:
        started.append(Server(["--model", str(folder), "--load-format", "dummy", *args], script=Path(no_model)))
        return started[-1].wait_ready() if wait else started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["web1", "web2"])
    return tmp_path / "keys"


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., RemoteGateway]]:
    """``join(engine, keys, *args)`` starts a gateway; all end with the test."""
    started: list[RemoteGateway] = []

    def start(engine: str, folder: Path, *args: str) -> RemoteGateway:
        started.append(RemoteGateway(engine, folder, tmp_path / f"gateway-{len(started)}.log", *args))
        return started[-1]

    yield start
    for one in started:
        one.stop(signal.SIGKILL)


def listening(keys: Path, num_tokenizers: int = 1) -> tuple[str, list[str]]:
    """An address for the engine, and launch.py's arguments for it."""
    engine = f"tcp://127.0.0.1:{free_ports(1 + num_tokenizers)}"
    return engine, ["--engine-listen", engine, "--curve-keys", str(keys)]


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples."""
    total = 0.0
    for line in httpx.get(url + "/metrics", timeout=10).text.splitlines():
        found = re.fullmatch(rf"quintet:{name}(?:\{{(.*)\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total


def state(url: str) -> dict[str, float]:
    return {name: metric(url, name) for name in ("num_running_reqs", "num_queue_reqs", "num_free_pages")}


def test_join_stream_leave_and_count_once(
    server: Callable[..., Server], keys: Path, join: Callable[..., RemoteGateway]
) -> None:
    engine, args = listening(keys, 2)
    one = server(*args, "--tokenizers", "2", "--api-key", "secret-of-the-engine", wait=True)
    open_to_all = join(engine, keys / "for-web1")
    assert open_to_all.process.wait(30) == 2 and "give this one --api-key too" in open_to_all.log
    header = {"Authorization": "Bearer k"}
    gateways = [join(engine, keys / f"for-web{n}", "--api-key", "k").wait_ready() for n in (1, 2)]
    info = httpx.get(gateways[0].url + "/get_server_info", headers=header, timeout=10)
    assert "secret-of-the-engine" not in info.text and info.json()["gateway"].startswith("gateway-")
    bodies = [completion_body(PROMPT + "!" * n, max_tokens=40) for n in range(8)]

    def text(url: str, body: dict[str, object], key: str) -> str:
        answer = httpx.post(url + "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    expected = [text(one.url, body, "secret-of-the-engine") for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        for gateway in gateways:
            assert list(pool.map(lambda body, g=gateway: text(g.url, body, "k"), bodies)) == expected
    local = {"Authorization": "Bearer secret-of-the-engine"}

    def shown() -> str:
        return httpx.get(one.url + "/metrics", headers=local, timeout=10).text

    # The engine's own word on the last request may come a little after its answer.
    once = "every request once, whichever gateway took it"
    eventually(lambda: "quintet:num_requests_total 24.0" in shown(), 10, once)
    theirs = httpx.get(gateways[0].url + "/metrics", headers=header, timeout=10).text
    assert "quintet:num_requests_total" not in theirs, "the engine's numbers are shown on its host alone"
    assert 'status="200"' in theirs and theirs.count("gateway_output_tokens_total{") == 1
    assert "@" not in "".join(re.findall(r'gateway="([^"]*)"', shown())), "a gateway elsewhere shows itself"
    assert gateways[0].stop() == 0, "it leaves"
    assert text(gateways[1].url, bodies[0], "k") == expected[0]
    assert text(one.url, bodies[0], "secret-of-the-engine") == expected[0]
    assert one.log.count("was not heard of") == 0, "who says farewell is not waited for"


def test_a_killed_gateway_has_its_requests_aborted_and_their_pages_come_back(
    server: Callable[..., Server], keys: Path, join: Callable[..., RemoteGateway]
) -> None:
    engine, args = listening(keys)
    one = server(*args, "--disable-radix-cache")
    free = state(one.url)["num_free_pages"]
    doomed, other = (join(engine, keys / f"for-web{n}").wait_ready() for n in (1, 2))
    body = completion_body(PROMPT, max_tokens=1500)
    expected = stream(one.url, body)
    cut: list[Exception] = []
    begun = threading.Event()

    def read() -> None:
        try:
            for _ in events(doomed.url, "/v1/completions", {**body, "n": 4, "max_tokens": 1900}):
                begun.set()
        except (httpx.HTTPError, AssertionError) as error:
            cut.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    doomed.stop(signal.SIGKILL)
    reader.join(10)
    assert cut, "its own connections end"
    assert stream(other.url, body) == expected and stream(one.url, body) == expected
    idle = {"num_running_reqs": 0, "num_queue_reqs": 0, "num_free_pages": free}
    eventually(lambda: state(one.url) == idle, 30, "its requests are aborted and all pages are back")
    assert "was not heard of for 8 s" in one.log or "takes no text any more" in one.log
    assert join(engine, keys / "for-web1").wait_ready().is_healthy(), "its successor joins"


def test_only_known_keys_come_in_and_only_the_known_engine_is_joined(
    server: Callable[..., Server], keys: Path, join: Callable[..., RemoteGateway], tmp_path: Path
) -> None:
    engine, args = listening(keys)
    one = server(*args)
    make_keys(tmp_path / "others", ["web1"])
    strange = tmp_path / "others" / "for-web1"
    (strange / "engine.key").write_bytes((keys / "engine.key").read_bytes())  # it knows the engine, not vice versa
    unknown = join(engine, strange, "--start-timeout-s", "4")
    make_keys(tmp_path / "third", ["web1"])
    misled = keys / "for-web2"
    (misled / "engine.key").write_bytes((tmp_path / "third" / "engine.key").read_bytes())  # known, but to another
    deceived = join(engine, misled, "--start-timeout-s", "4")
    for refused in (unknown, deceived):
        assert refused.process.wait(30) == 1
        assert "did not answer within 4 s" in refused.log
    assert "refused a connection with the unknown key" in one.log
    eventually(lambda: metric(one.url, "num_bad_frames_total") > 0, 10, "refusals are counted")
    known = join(engine, keys / "for-web1").wait_ready()
    body = completion_body(PROMPT)
    assert stream(known.url, body) == stream(one.url, body)
    (keys / "known" / "web1.key").unlink()
    assert known.stop() == 0
    locked_out = join(engine, keys / "for-web1", "--start-timeout-s", "4")
    assert locked_out.process.wait(30) == 1, "a key removed is refused from then on, without a restart"


def test_a_stream_goes_on_when_the_engine_is_started_again(
    server: Callable[..., Server], keys: Path, join: Callable[..., RemoteGateway]
) -> None:
    engine, args = listening(keys)
    one = server(*args)
    port = str(one.port)
    far = join(engine, keys / "for-web1").wait_ready()
    body = completion_body(PROMPT, max_tokens=1500)
    expected = stream(one.url, body)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, far.url, body, on_event=lambda number: number == 5 and begun.set())
        assert begun.wait(30)
        one.stop(signal.SIGKILL)
        eventually(lambda: not one.leftovers(), 10, "all of it gone")
        two = server(*args, "--port", port)
        assert running.result(60) == expected
    two.stop(signal.SIGKILL)
    server(*args, "--port", port, "--context-length", "512")
    assert far.process.wait(40) == 1 and "started again with other settings" in far.log


@pytest.mark.slow
def test_a_drain_of_the_engine_waits_for_streams_of_gateways_elsewhere(
    server: Callable[..., Server], keys: Path, join: Callable[..., RemoteGateway]
) -> None:
    engine, args = listening(keys)
    one = server(*args)
    far = join(engine, keys / "for-web1").wait_ready()
    body = completion_body(PROMPT, max_tokens=1800)
    expected = stream(far.url, body)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, far.url, body, on_event=lambda number: number == 5 and begun.set())
        assert begun.wait(30)
        one.send(signal.SIGTERM)
        assert running.result(60) == expected
    assert one.wait() == 0
    eventually(lambda: not far.is_healthy(), 10, "the gateway says so while its engine is away")


def test_the_engine_wants_keys_and_free_ports(server: Callable[..., Server], keys: Path, tmp_path: Path) -> None:
    engine, args = listening(keys)
    for wrong, words in (
        (["--engine-listen", engine], "go together"),
        (["--engine-listen", engine, "--curve-keys", str(tmp_path)], "launch.py --make-curve-keys"),
        (["--engine-listen", "tcp://localhost:31000", "--curve-keys", str(keys)], "an example: tcp://0.0.0.0:31000"),
        (["--engine-listen", "ipc:///tmp/x", "--curve-keys", str(keys)], "is not tcp://HOST:PORT"),
        ([*args, "--port", engine.rpartition(":")[2]], "--port is one of them"),
    ):
        refused = server(*wrong, wait=False)
        assert refused.wait(30) == 2 and words in refused.log, refused.log

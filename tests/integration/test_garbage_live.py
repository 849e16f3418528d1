"""Garbage at every socket of a running server, more requests than it takes, and requests that kill its worker: the
streams of others go on, what is refused is refused at once, it is counted, and memory stays where it was."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq

from common.channels import MAX_MESSAGE_BYTES
from tests.integration.client import completion_body, stream
from tests.integration.fakes.launch_no_model import POISON, make_folder
from tests.integration.fakes.launch_no_model import __file__ as no_model
from tests.integration.server import Server, eventually
from tests.wire.samples import SAMPLES

pytestmark = pytest.mark.integration
GROWTH_BYTES = 96 << 20
"""More than 1,000 frames of garbage in a queue, far less than one frame of the sizes promised."""


MAX_RUNNING, MAX_QUEUED = 4, 4
FLOOD = 64
MAX_RESTARTS = 2
"""As many as a request that kills the worker causes before it is found out."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_folder(tmp_path_factory.mktemp("garbage") / "tiny")
    bounds = ["--max-running-requests", str(MAX_RUNNING), "--max-queued-requests", str(MAX_QUEUED)]
    bounds += ["--max-restarts", str(MAX_RESTARTS)]
    one = Server(["--model", str(folder), "--load-format", "dummy", *bounds], script=Path(no_model))
    try:
        yield one.wait_ready()
    finally:
        one.close()


def counters(url: str) -> dict[str, float]:
    text = httpx.get(url + "/metrics", timeout=10).text
    lines = [line.rpartition(" ") for line in text.splitlines() if "bad_frames_total" in line and line[0] != "#"]
    return {name.partition("{")[0].removeprefix("quintet:"): float(value) for name, _, value in lines}


def raw(path: Path, data: bytes) -> None:
    """Bytes that need not be ZeroMQ's protocol at all."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        connection.connect(str(path))
        try:
            connection.sendall(data)
            connection.recv(64)
        except OSError:
            pass  # it was closed on us, as it should be


def greeting() -> bytes:
    """ZMTP 3.1's greeting and the command with which a PUSH socket introduces itself."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 4) + b"PUSH"
    return b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(1) + bytes(31) + bytes([4, len(ready)]) + ready


def throw(path: Path, context: zmq.Context[zmq.Socket[bytes]], rng: random.Random) -> None:
    """Everything at one socket: no protocol, half a protocol, gigabytes promised, and frames that are no messages."""
    for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", rng.randbytes(500), greeting()[:40], b"\xff" * 64,
                 greeting() + b"\x02" + struct.pack(">Q", 1 << 40) + b"x" * 1000,
                 greeting() + b"\x02" + struct.pack(">Q", MAX_MESSAGE_BYTES * 2) + b"x" * 1000,
                 greeting() + b"\x00\xf0half"):  # fmt: skip
        raw(path, data)
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 30_000)  # what is not delivered by then would not be counted
    push.setsockopt(zmq.SNDTIMEO, 5000)
    push.connect(f"ipc://{path}")
    valid = [msgspec.msgpack.encode(sample) for sample in SAMPLES]
    for _ in range(200):
        frame = rng.choice(valid)
        push.send(frame[: rng.randrange(len(frame))])
        push.send(rng.randbytes(rng.randrange(400)))
        push.send(b"\x91" * rng.randrange(100_000))
    push.send(b"\xc1" * (8 << 20))
    push.close()


def test_streams_go_on_under_garbage_which_is_counted(server: Server) -> None:
    body = completion_body("to be or not to be", max_tokens=1500)
    expected = stream(server.url, body)
    before, pids = counters(server.url), server.pids()
    rss = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
    sockets = [path for path in server.run_dir().iterdir() if path.is_socket()]
    assert {"scheduler", "scheduler-work", "tokenizer-0", "detokenizer", "gateway-0", "worker-0", "supervisor"} == {
        path.name for path in sockets
    }
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    over = threading.Event()
    rounds = [0]

    def keep_throwing() -> None:
        rng = random.Random(7)
        while not over.is_set() or not rounds[0]:
            for path in sockets:
                throw(path, context, rng)
            rounds[0] += 1

    with ThreadPoolExecutor(4) as pool:
        garbage = pool.submit(keep_throwing)
        streams = [pool.submit(stream, server.url, body) for _ in range(3)]
        assert [one.result() for one in streams] == [expected] * 3
        over.set()
        garbage.result()
    context.term()
    assert stream(server.url, body) == expected
    floor = 600 * rounds[0]

    def counted() -> bool:
        now = counters(server.url)
        engine = now["num_bad_frames_total"] - before["num_bad_frames_total"]
        return engine >= 4 * floor and now["gateway_bad_frames_total"] - before["gateway_bad_frames_total"] >= floor

    eventually(counted, 30, "it was counted, by the gateway and by the others")
    assert server.pids() == pids, "nobody was replaced"
    grown = {name: psutil.Process(pid).memory_info().rss - rss[name] for name, pid in pids.items()}
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert server.log.count("dropped a frame") < 200, "a flood of garbage is no flood of log lines"


def test_a_flood_is_refused_at_the_queues_bound_and_who_runs_goes_on(server: Server) -> None:
    body = completion_body("to be or not to be", max_tokens=100)
    expected = stream(server.url, body)
    begun = threading.Barrier(MAX_RUNNING + 1)

    def on_event(number: int) -> None:
        if number == 1:
            begun.wait(30)

    limits = httpx.Limits(max_connections=FLOOD)
    with ThreadPoolExecutor(MAX_RUNNING + FLOOD) as pool, httpx.Client(base_url=server.url, limits=limits) as client:
        running = [pool.submit(stream, server.url, body, on_event=on_event) for _ in range(MAX_RUNNING)]
        begun.wait(30)
        asked = completion_body("one more", max_tokens=30)
        replies = list(pool.map(lambda _: client.post("/v1/completions", json=asked, timeout=60), range(FLOOD)))
        assert [one.result() for one in running] == [expected] * MAX_RUNNING
    refused = [reply for reply in replies if reply.status_code != 200]
    assert refused and len(refused) < FLOOD
    assert {(reply.status_code, reply.headers["retry-after"]) for reply in refused} == {(503, "1")}
    assert {reply.json()["error"]["code"] for reply in refused} == {"queue_full"}
    assert f"--max-queued-requests is {MAX_QUEUED}" in refused[0].json()["error"]["message"]


def test_a_request_that_kills_the_worker_fails_alone_and_its_crashes_do_not_count(server: Server) -> None:
    bodies = [completion_body(f"to be or not {number}", max_tokens=100) for number in range(MAX_RUNNING - 1)]
    expected = [stream(server.url, body) for body in bodies]
    before = server.log.count("worker-0 started")
    begun = threading.Barrier(MAX_RUNNING)

    def on_event(number: int) -> None:
        if number == 1:
            begun.wait(30)

    with ThreadPoolExecutor(len(bodies)) as pool:
        others = [pool.submit(stream, server.url, body, on_event=on_event) for body in bodies]
        begun.wait(30)
        asked = {"text": "hi", "rid": POISON, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        reply = httpx.post(server.url + "/generate", json=asked, timeout=60)
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "worker_crash", reply.text
        assert [one.result() for one in others] == expected
    assert server.log.count("worker-0 started") == before + MAX_RESTARTS
    server.wait_replaced("worker-0", server.kill("worker-0"))
    assert stream(server.url, bodies[0]) == expected[0]

"""Garbage at every socket of a running server: streams go on, it is counted, and memory stays where it was."""

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
from tests.integration.fakes.launch_no_model import __file__ as no_model
from tests.integration.fakes.launch_no_model import make_folder
from tests.integration.server import Server, eventually
from tests.wire.samples import SAMPLES

pytestmark = pytest.mark.integration
GROWTH_BYTES = 96 << 20
"""More than 1,000 frames of garbage in a queue, far less than one frame of the sizes promised."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = make_folder(tmp_path / "tiny")
    one = Server(["--model", str(folder), "--load-format", "dummy"], script=Path(no_model))
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
    push.setsockopt(zmq.LINGER, 2000)
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



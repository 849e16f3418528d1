"""What the gateway alone costs, with a fake engine that answers at once.

    python -m bench.gateway_overhead [--seconds 5] [--streams 50] [--rate 500]

Three measurements of one gateway process (the fake engine and the clients are other processes):

* whole: requests per second of short chat completions, 32 clients at once
* flood: tokens per second of streams that the engine feeds as fast as they are taken
* paced: ``--streams`` streams at ``--rate`` tokens per second together, as a real engine would give
  them (every stream one token per step); CPU time per streamed token, and the share of a core

The last line is one JSON object. CPU time is the gateway process's own (user + system).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.fake_engine import FakeEngine, Script
from common import config as config_file
from common.config import HttpConfig, RuntimeConfig, ServerConfig
from common.messages import Generate

ROOT = Path(__file__).resolve().parents[1]
WORDS = tuple(f" word{i}" for i in range(16))


def script(generate: Generate) -> Script:
    """The number of tokens asked for, one per step."""
    return Script(pieces=WORDS * ((generate.sampling.max_tokens or 16) // len(WORDS)))


def request_bytes(port: int, *, stream: bool, max_tokens: int) -> bytes:
    """A chat completion as it goes over the connection."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me something."}],
            "stream": stream,
            "max_tokens": max_tokens,
            "temperature": 0.7,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def whole_client(port: int, until: float) -> int:
    """Requests answered on one kept connection until the time is over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = request_bytes(port, stream=False, max_tokens=16)
    count = 0
    while time.monotonic() < until:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(head.decode())
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        count += 1
    writer.close()
    return count


async def stream_client(port: int, max_tokens: int) -> int:
    """Content chunks of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(port, stream=True, max_tokens=max_tokens))
    count = 0
    tail = b""
    while b"[DONE]" not in tail:
        data = await reader.read(65536)
        if not data:
            raise RuntimeError("the stream was cut off")
        count += (tail + data).count(b'"content":" word') - tail.count(b'"content":" word')
        tail = (tail + data)[-32:]
    writer.close()
    return count


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A gateway process, pinned to nothing, and its CPU time."""

    def __init__(self, run_dir: Path) -> None:
        self.port = free_port()
        config = ServerConfig(http=HttpConfig(port=self.port), runtime=RuntimeConfig(log_level="warning"))
        (run_dir / "config.json").write_bytes(config_file.save(config))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "--run-dir", str(run_dir)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._ps = psutil.Process(self.process.pid)

    async def wait_ready(self) -> None:
        """Wait until /health says ok."""
        for _ in range(300):
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                line = await reader.readline()
                writer.close()
                if b" 200 " in line:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.1)
        raise RuntimeError("the gateway did not become ready")

    def cpu_s(self) -> float:
        """User and system time so far."""
        times = self._ps.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """SIGTERM, then wait."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)


async def measure(server: Server, kind: str, seconds: float, streams: int, rate: float) -> dict[str, Any]:
    """One measurement: whole, flood or paced."""
    await server.wait_ready()
    port = server.port
    started, cpu = time.monotonic(), server.cpu_s()
    if kind == "whole":
        counts = await asyncio.gather(*[whole_client(port, started + seconds) for _ in range(32)])
        elapsed = time.monotonic() - started
        requests = sum(counts)
        return {
            "requests_per_s": round(requests / elapsed, 1),
            "cpu_us_per_request": round(1e6 * (server.cpu_s() - cpu) / requests, 1),
        }
    tokens = 16 * max(1, round(seconds * rate / streams / 16)) if kind == "paced" else 16 * max(1, int(40 * seconds))
    counts = await asyncio.gather(*[stream_client(port, tokens) for _ in range(streams)])
    elapsed, used = time.monotonic() - started, server.cpu_s() - cpu
    if sum(counts) != tokens * streams:
        raise RuntimeError(f"{sum(counts)} chunks came, {tokens * streams} tokens were generated")
    return {
        "streams": streams,
        "tokens_per_s": round(sum(counts) / elapsed, 1),
        "cpu_us_per_token": round(1e6 * used / sum(counts), 1),
        "core_share": round(used / elapsed, 4),
    }


def run_engine(run_dir: Path, step_s: float) -> None:
    """The fake engine as a process of its own, until SIGTERM."""
    with FakeEngine(run_dir, script, step_s=step_s):
        signal.sigwait({signal.SIGTERM})


def main() -> None:
    """Run the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="roughly how long each measurement takes")
    parser.add_argument("--streams", type=int, default=50, help="streams at once")
    parser.add_argument("--rate", type=float, default=500.0, help="paced: tokens per second of all streams together")
    parser.add_argument("--engine", nargs=2, metavar=("RUN_DIR", "STEP_S"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        run_engine(Path(args.engine[0]), float(args.engine[1]))
        return
    result: dict[str, Any] = {"benchmark": "gateway_overhead", "cores": os.cpu_count()}
    for kind, step_s in (("whole", 0.0), ("flood", 0.0), ("paced", args.streams / args.rate)):
        with tempfile.TemporaryDirectory(prefix="qt-bench-") as folder:
            command = [sys.executable, "-m", "bench.gateway_overhead", "--engine", folder, str(step_s)]
            engine = subprocess.Popen(command, cwd=ROOT)
            server = Server(Path(folder))
            try:
                result[kind] = asyncio.run(measure(server, kind, args.seconds, args.streams, args.rate))
            finally:
                server.stop()
                engine.terminate()
                engine.wait(10)
        print(f"{kind}: {result[kind]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

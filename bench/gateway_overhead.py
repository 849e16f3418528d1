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
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import children
from bench.fake_engine import FakeEngine, Script
from common.messages import Generate

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


async def measure(
    server: subprocess.Popen[bytes], port: int, kind: str, seconds: float, streams: int, rate: float
) -> dict[str, Any]:
    """One measurement: whole, flood or paced."""
    await children.wait_ready(port)
    started, cpu = time.monotonic(), children.cpu_s(server)
    if kind == "whole":
        counts = await asyncio.gather(*[whole_client(port, started + seconds) for _ in range(32)])
        elapsed = time.monotonic() - started
        requests = sum(counts)
        return {
            "requests_per_s": round(requests / elapsed, 1),
            "cpu_us_per_request": round(1e6 * (children.cpu_s(server) - cpu) / requests, 1),
        }
    tokens = 16 * max(1, round(seconds * rate / streams / 16)) if kind == "paced" else 16 * max(1, int(40 * seconds))
    counts = await asyncio.gather(*[stream_client(port, tokens) for _ in range(streams)])
    elapsed, used = time.monotonic() - started, children.cpu_s(server) - cpu
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
            engine = children.start("bench.gateway_overhead", "--engine", folder, str(step_s))
            server, port = children.start_gateway(Path(folder))
            try:
                result[kind] = asyncio.run(measure(server, port, kind, args.seconds, args.streams, args.rate))
            finally:
                children.stop(server, engine)
        print(f"{kind}: {result[kind]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""A load on a running server, with the CPU time that it took of everyone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from bench import serve_bench
from bench.serve_bench import Options, Run
from bench.servers import Running
from bench.timing import own_cpu_s


@dataclass(frozen=True)
class Load:
    """One run of the load generator."""

    run: Run
    summary: dict[str, Any]
    """As ``serve_bench.summary``, and ``cpu_s_per_1000_tokens``: CPU seconds per 1,000 output tokens of every process
    of the server, by name, and of the load generator."""
    tokens: int
    """Output tokens of all replies."""
    began: float
    """time.time()."""


def put(server: Running, options: Options) -> Load:
    """Run the load generator in this process, against the server."""
    before, own_before, began = server.cpu_seconds(), own_cpu_s(), time.time()
    run = asyncio.run(serve_bench.run(options))
    own, after = own_cpu_s() - own_before, server.cpu_seconds()
    tokens = sum(reply.completion_tokens for reply in run.replies)
    used = {name: after[name] - before.get(name, 0.0) for name in after} | {"load generator": own}
    per_token = {name: round(1000 * seconds / max(1, tokens), 3) for name, seconds in used.items()}
    return Load(run, serve_bench.summary(run) | {"cpu_s_per_1000_tokens": per_token}, tokens, began)

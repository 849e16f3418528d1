"""The workload end to end: through the server over HTTP, and through transformers' own continuous batching."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from bench import servers
from bench.gpu_gaps import gap_line
from bench.gpu_shapes import Load, prompts

PROFILED: dict[str, dict[str, Any]] = {
    "quintet, profiled": {},
    "quintet, profiled, with penalties and log-probabilities": {"frequency_penalty": 0.5, "logprobs": 1},
}
"""The first is drawn as soon as its forward pass is launched; the other when the ids before are known."""


def serve_table(folder: Path, shape: dict[str, Any], load: Load, device: str, log: Path) -> list[dict[str, Any]]:
    """Requests per second of the server, without and with a shared prefix; then the gap between its steps."""
    flags = ["--load-format", "dummy", "--dtype", "bfloat16", "--device", device]
    if device == "cpu":
        flags += ["--worker-path", "generic", "--max-total-tokens", "4096"]
    out = []
    with servers.serve(servers.quintet(*flags, model=str(folder)), log_path=str(log)) as running:
        for shared in (False, True):
            ids = prompts(load, shape["vocab_size"], shared)
            asyncio.run(send_all(running.url, ids[: min(4, len(ids))], load))  # the first steps compile kernels
            asyncio.run(flush(running.url))
            took, tokens = asyncio.run(send_all(running.url, ids, load))
            out.append(line("quintet", shared, len(ids), took, tokens))
        ids = prompts(load, shape["vocab_size"], False)[: load.concurrency]
        for name, wants in PROFILED.items():
            out.append({"server": name, **asyncio.run(gaps(running.url, ids, load, folder / "profile", wants))})
    return out


async def gaps(url: str, ids: list[list[int]], load: Load, traces: Path, wants: dict[str, Any]) -> dict[str, Any]:
    """How long the device waits between steps while it answers ``ids``, from a profile of the worker.

    ``wants``: more that each request asks for.
    """
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300), raise_for_status=True) as session:
        async with session.post(url + "/start_profile", json={"output_dir": str(traces)}):
            pass
        await send_all(url, ids, load, wants)
        async with session.post(url + "/stop_profile") as response:
            trace = Path((await response.json())["message"])
    return gap_line(trace)


def line(name: str, shared: bool, count: int, took: float, tokens: int) -> dict[str, Any]:
    """One line of the table."""
    what = f"{name}, {'a shared prefix' if shared else 'nothing shared'}"
    return {"server": what, "req_s": count / took, "out_tok_s": tokens / took, "s": took}


async def flush(url: str) -> None:
    """Forget cached prefixes."""
    import aiohttp

    async with aiohttp.ClientSession() as session, session.post(url + "/flush_cache") as response:
        response.raise_for_status()


async def send_all(
    url: str, ids: list[list[int]], load: Load, wants: dict[str, Any] | None = None
) -> tuple[float, int]:
    """(seconds, output tokens) of all prompts, ``load.concurrency`` at a time. Raises if any fails."""
    import aiohttp

    gate, tokens = asyncio.Semaphore(load.concurrency), 0

    async def send(session: Any, prompt: list[int]) -> None:
        nonlocal tokens
        body = {"model": "default", "prompt": prompt, "max_tokens": load.new_tokens, "ignore_eos": True,
                "temperature": 0.0, **(wants or {})}  # fmt: skip
        async with gate, session.post(url + "/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {answer}")
            tokens += answer["usage"]["completion_tokens"]

    started = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(*(send(session, prompt) for prompt in ids))
    return time.perf_counter() - started, tokens


def transformers_table(shape: dict[str, Any], load: Load, device: str) -> list[dict[str, Any]]:
    """The same through ``generate_batch``."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen2Config

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
    model.eval()
    config = GenerationConfig(max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = {} if device == "cuda" else {"num_blocks": 64, "max_batch_tokens": 128, "page_size": 16}
    out = []
    for shared in (False, True):
        ids = prompts(load, shape["vocab_size"], shared)
        batching = ContinuousBatchingConfig(max_requests_per_batch=load.concurrency, **small)
        started = time.perf_counter()
        answers = model.generate_batch(inputs=ids, generation_config=config, continuous_batching_config=batching)
        took = time.perf_counter() - started
        tokens = sum(len(answer.generated_tokens) for answer in answers.values())
        if tokens != len(ids) * load.new_tokens:
            raise RuntimeError(f"transformers gave {tokens} tokens, {len(ids)} x {load.new_tokens} were asked for")
        out.append(line("transformers generate_batch", shared, len(ids), took, tokens))
    return out

"""The same request with the same seed gives the same answer, bit for bit, on the batch-invariant path.

Alone, in a full batch, with a warm and a cold cache, its prompt whole and in chunks, after a
preemption, with one thread and with two, with drafts and without. ``docs/reproducibility.md`` says what holds where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.client import TIMEOUT_S
from tests.integration.server import Server

pytestmark = pytest.mark.integration
SHARED = "The quick brown fox jumps over the lazy dog. " * 6
REQUESTS: list[dict[str, Any]] = [
    {"prompt": SHARED + "Where is the station?", "seed": 1},
    {"prompt": SHARED + "for i in range", "seed": 2, "top_p": 0.9, "frequency_penalty": 0.3},
    {"prompt": "to be", "seed": 3, "n": 2, "top_k": 50, "repetition_penalty": 1.1},
    {"prompt": [70 + i % 200 for i in range(150)], "seed": 4, "min_p": 0.01},
    {"prompt": SHARED + "Grüße", "seed": 6, "echo": True},  # the log-probabilities of the prompt, too
    {"prompt": "un deux", "temperature": 0},
    {"prompt": SHARED, "seed": 5, "regex": "[a-z日本é ]{20,60}", "ignore_eos": False},
]
NUM_TOKENS = 96


def ask(url: str, request: dict[str, Any]) -> list[Any]:
    """Text, ending and log-probabilities of every choice: equal to the last bit, as JSON keeps every float's bits."""
    body = {"model": "tiny", "temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 2, **request}
    reply = httpx.post(url + "/v1/completions", json=body, timeout=TIMEOUT_S)
    assert reply.status_code == 200, reply.text
    return [(choice["text"], choice["finish_reason"], choice["logprobs"]) for choice in reply.json()["choices"]]


def all_at_once(url: str, requests: list[dict[str, Any]]) -> list[list[Any]]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: ask(url, request), requests))


def flush(server: Server) -> None:
    assert httpx.post(server.url + "/flush_cache?timeout=20", timeout=30).status_code == 200


def metric(server: Server, name: str) -> float:
    lines = httpx.get(server.url + "/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == f"quintet:{name}")


def start(folder: Path, *args: str) -> Server:
    fixed = ["--model", str(folder), "--served-model-name", "tiny", "--device", "cpu", "--dtype", "bfloat16"]
    return Server([*fixed, *args])


@pytest.fixture(scope="module")
def servers(tiny_folder: Path) -> Iterator[Callable[[str], Server]]:
    """``roomy`` and ``cramped``, started together; skipped where bfloat16 has no batch-invariant path."""
    several = {
        "roomy": start(
            tiny_folder, "--max-total-tokens", "16384", "--cpu-threads", "1", "--speculative-algorithm", "none"
        ),
        "cramped": start(
            tiny_folder, "--max-total-tokens", "640", "--cpu-threads", "2", "--chunked-prefill-size", "48",
            "--schedule-conservativeness", "0.05", "--schedule-policy", "priority",
        ),
    }  # fmt: skip
    try:
        for one in several.values():
            one.wait_ready(200)
        if "path cpu-fast" not in several["roomy"].log:
            pytest.skip("this machine has no batch-invariant path for bfloat16")
        yield several.__getitem__
    finally:
        for one in several.values():
            one.close()


@pytest.fixture(scope="module")
def alone(servers: Callable[[str], Server]) -> list[list[Any]]:
    """Each request by itself, with nothing cached."""
    found = []
    for request in REQUESTS:
        flush(servers("roomy"))
        found.append(ask(servers("roomy").url, request))
    return found


def test_it_is_not_the_same_for_want_of_chance(alone: list[list[Any]]) -> None:
    texts = [choice[0] for reply in alone for choice in reply]
    assert len(set(texts)) == len(texts) == 8


def test_with_a_warm_cache(servers: Callable[[str], Server], alone: list[list[Any]]) -> None:
    server = servers("roomy")
    for _ in range(2):
        assert [ask(server.url, request) for request in REQUESTS] == alone
    assert metric(server, "cached_tokens_total") > 0


def test_in_a_full_batch(servers: Callable[[str], Server], alone: list[list[Any]]) -> None:
    """Among many others, cold and then warm."""
    server = servers("roomy")
    others = [{"prompt": f"{i} is not {i}", "seed": 100 + i, "max_tokens": 40 + 5 * i} for i in range(18)]
    flush(server)
    for _ in range(2):
        assert all_at_once(server.url, [*REQUESTS, *others])[: len(REQUESTS)] == alone


def test_after_preemption_in_chunks_with_drafts_and_other_threads(
    servers: Callable[[str], Server], alone: list[list[Any]]
) -> None:
    """Requests that matter more come while others run in a pool that is full."""
    server = servers("cramped")
    several = [{**request, "priority": priority} for priority in (-50, 0, 50) for request in REQUESTS]
    for _ in range(2):
        assert all_at_once(server.url, several) == alone * 3
    assert metric(server, "num_preemptions_total") > 0
    assert metric(server, "spec_decode_num_accepted_tokens_total") > 0
    assert metric(servers("roomy"), "spec_decode_num_draft_tokens_total") == 0
    flush(server)
    assert [ask(server.url, request) for request in REQUESTS] == alone

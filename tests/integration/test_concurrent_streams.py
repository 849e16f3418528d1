"""Many streams at once: each is what it would be alone, and afterwards every page is free or cached."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import openai
import pytest

from tests.integration.client import completion_body
from tests.integration.server import Server, eventually

pytestmark = pytest.mark.integration
SHARED = "to be or not to be, that is the question. "
NUM_STREAMS = 64
SMALL_POOL = ("--max-total-tokens", "384", "--schedule-conservativeness", "0.01")
"""24 pages of 16 and bold admission: more are let in than can grow, so some are preempted."""


def bodies() -> list[dict[str, Any]]:
    """Half with one shared prefix, some sampled, some with penalties, stop strings, echo."""
    found = []
    for i in range(NUM_STREAMS):
        prompt = f"{SHARED * 2}{i % 7}" if i % 2 else f"{i} Where is the station?"
        body = completion_body(prompt, max_tokens=12 + i * 7 % 30, temperature=0.9 if i % 4 > 1 else 0, seed=i)
        if i % 5 == 0:
            body["stop"] = ["a", "St"]
        if i % 7 == 0:
            body |= {"presence_penalty": 0.7, "repetition_penalty": 1.2}
        if i % 9 == 0:
            body["echo"] = True
        found.append(body)
    return found


async def read(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, str | None, int]:
    """A stream's text, ending and number of tokens, by the official client."""
    own = {key: value for key, value in body.items() if key in ("ignore_eos", "repetition_penalty")}
    standard = {key: value for key, value in body.items() if key not in own}
    stream = await client.completions.create(
        **standard, extra_body=own, stream=True, stream_options={"include_usage": True}
    )
    text, reason, num_tokens = "", None, -1
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    return text, reason, num_tokens


def run(server: Server, work: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=120) as client:
            return await work(client)

    return asyncio.run(main())


def all_at_once(server: Server) -> list[tuple[str, str | None, int]]:
    async def work(client: openai.AsyncOpenAI) -> Any:
        return await asyncio.gather(*[read(client, body) for body in bodies()])

    found: list[tuple[str, str | None, int]] = run(server, work)
    return found


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(server.url + "/get_server_info", timeout=30).json()["scheduler"]
    return found


def is_idle(server: Server) -> bool:
    """Nothing runs or waits, and the page equation holds with no page held by a request."""
    now = state(server)
    metrics, page_size = now["metrics"], now["worker"]["page_size"]
    assert metrics["num_invariant_failures_total"] == 0
    if metrics["num_running_reqs"] or metrics["num_queue_reqs"]:
        return False
    free = metrics["num_free_pages"] * page_size
    return bool(free + metrics["num_cached_tokens"] == now["worker"]["num_pages"] * page_size)


@pytest.fixture(scope="module")
def alone(shared_server: Server) -> list[tuple[str, str | None, int]]:
    """What each request gives when it has the server for itself."""

    async def work(client: openai.AsyncOpenAI) -> Any:
        return [await read(client, body) for body in bodies()]

    found: list[tuple[str, str | None, int]] = run(shared_server, work)
    return found


def test_sixty_four_streams_with_shared_and_different_prefixes(shared_server: Server, alone: list[Any]) -> None:
    assert all_at_once(shared_server) == alone
    eventually(lambda: is_idle(shared_server), 5, "every page free or cached")
    flushed = httpx.post(shared_server.url + "/flush_cache?timeout=5", timeout=30)
    assert flushed.status_code == 200
    now = state(shared_server)
    assert now["metrics"]["num_free_pages"] == now["worker"]["num_pages"]


@pytest.mark.parametrize(
    "args",
    [SMALL_POOL, (*SMALL_POOL, "--disable-radix-cache", "--chunked-prefill-size", "32", "--page-size", "32")],
    ids=["radix", "no-radix-small-chunks-large-pages"],
)
def test_preemption_in_a_tiny_pool_changes_no_byte(
    server: Callable[..., Server], alone: list[Any], args: tuple[str, ...]
) -> None:
    one = server(*args)
    assert all_at_once(one) == alone
    eventually(lambda: is_idle(one), 5, "every page free or cached")
    assert state(one)["metrics"]["num_preemptions_total"] > 0
    too_long = {**completion_body("", max_tokens=1), "prompt": [5] * 385, "stream": True}
    refused = httpx.post(one.url + "/v1/completions", json=too_long, timeout=30)
    assert refused.status_code == 400
    assert "385" in refused.text and "384" in refused.text
    outgrows = {**completion_body("", max_tokens=300), "prompt": [5] * 300, "ignore_eos": True}
    choice = httpx.post(one.url + "/v1/completions", json=outgrows, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "length" and "384 tokens" in choice["finish_message"]


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.4], ids=["queued", "prefilling", "decoding"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_who_leaves_in_any_phase_gives_the_pages_back(shared_server: Server, after_s: float, streamed: bool) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=shared_server.url, timeout=60) as client:
            tasks = [
                asyncio.ensure_future(
                    client.post(
                        "/v1/completions",
                        json=completion_body(f"{i} {SHARED * 8}", max_tokens=500, stream=streamed, n=1 + i % 3),
                    )
                )
                for i in range(12)
            ]
            await asyncio.sleep(after_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: is_idle(shared_server), 10, "the pages are back")


def test_connections_that_are_reset_leave_nothing_behind(shared_server: Server) -> None:
    for i in range(30):
        connection = socket.create_connection(("127.0.0.1", shared_server.port))
        data = httpx.Request("POST", shared_server.url, json=completion_body(f"reset {i}", max_tokens=500)).content
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
        connection.sendall((head + data)[: len(head) + len(data) - i % 2])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    eventually(lambda: is_idle(shared_server), 10, "the pages are back")
    assert "Traceback" not in shared_server.log


def test_streams_go_on_while_others_leave_and_the_cache_is_flushed(shared_server: Server, alone: list[Any]) -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        async def leave(body: dict[str, Any]) -> None:
            stream = await client.completions.create(model="tiny", prompt=body["prompt"], max_tokens=200, stream=True)
            async for _ in stream:
                await stream.close()
                return

        async def flush() -> None:
            async with httpx.AsyncClient(base_url=shared_server.url, timeout=60) as plain:
                for _ in range(10):
                    reply = await plain.post("/flush_cache?timeout=0.01")
                    assert reply.status_code in (200, 409)

        kept = [read(client, body) for body in bodies()[::2]]
        results = await asyncio.gather(*kept, flush(), *[leave(body) for body in bodies()[1::2]])
        return results[: len(kept)]

    assert run(shared_server, work) == alone[::2]
    eventually(lambda: is_idle(shared_server), 10, "every page free or cached")


def test_a_call_is_aborted_by_its_id_and_no_other(shared_server: Server) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=shared_server.url, timeout=60) as client:

            async def generate(rid: str, n: int) -> httpx.Response:
                sampling = {"max_new_tokens": 900, "n": n, "ignore_eos": True}
                return await client.post("/generate", json={"text": "Where?", "rid": rid, "sampling_params": sampling})

            mine, other = asyncio.ensure_future(generate("call", 3)), asyncio.ensure_future(generate("call-", 1))
            while (await client.post("/abort_request", json={"rid": "call"})).status_code != 200:
                await asyncio.sleep(0.02)
            assert {choice["meta_info"]["finish_reason"]["type"] for choice in (await mine).json()} == {"abort"}
            assert (await generate("call-", 1)).status_code == 409
            assert (await other).json()["meta_info"]["finish_reason"] == {"type": "length", "length": 900}

    asyncio.run(main())
    eventually(lambda: is_idle(shared_server), 10, "the pages are back")

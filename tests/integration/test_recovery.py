"""Kill or stop a process while streams run: each stream ends with the bytes of an undisturbed run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.client import Assembled, completion_body, post, stream
from tests.integration.conftest import CPU_ARGS
from tests.integration.server import Server, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
NUM_TOKENS = 1500
KILL_AT = 15
"""Events after which the process is killed: early enough that most of the stream is still to come."""
RECORDS: dict[str, Any] = {
    "type": "array", "minItems": 2000, "items": {
        "type": "object", "additionalProperties": False, "required": ["a_rather_long_key", "name", "is_final"],
        "properties": {
            "a_rather_long_key": {"type": "integer", "minimum": 0, "maximum": 999},
            "name": {"type": "string", "maxLength": 9}, "is_final": {"type": "boolean"},
        },
    },
}  # fmt: skip
"""Of which no word is as short as the streams: they end within it."""
BODIES: dict[str, dict[str, Any]] = {
    "greedy": completion_body("to be or not to be", max_tokens=NUM_TOKENS),
    "sampled": completion_body("Where is the station?", max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.9, seed=11),
    "constrained": completion_body(
        "A list:", max_tokens=NUM_TOKENS, temperature=1.0, seed=3, ignore_eos=False, json_schema=RECORDS
    ),
    "stopped": completion_body("un deux trois", max_tokens=NUM_TOKENS, temperature=0.7, seed=5, stop=["zzzz"]),
}


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path) -> Iterator[Server]:
    # bfloat16: the batch-invariant path where this machine has it, so sampled streams must be equal too.
    args = ["--model", str(tiny_folder), *CPU_ARGS, "--dtype", "bfloat16", "--hang-timeout-s", "4"]
    args += ["--max-total-tokens", "16384"]
    server = Server(args)
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def undisturbed(fleet: Server) -> dict[str, Assembled]:
    """What each body gives when nothing happens; checked to be of full length."""
    with ThreadPoolExecutor(len(BODIES)) as pool:
        found = dict(zip(BODIES, pool.map(lambda body: stream(fleet.url, body), BODIES.values()), strict=True))
    assert all(one.usage["completion_tokens"] == NUM_TOKENS for one in found.values())
    return found


def metric(fleet: Server, name: str) -> float:
    """An engine metric's value."""
    lines = httpx.get(fleet.url + "/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"quintet:{name} "))


def is_idle(fleet: Server) -> bool:
    """Nothing runs or waits, and every process is ready."""
    try:
        health = httpx.get(fleet.url + "/health", timeout=5)
        return health.status_code == 200 and metric(fleet, "num_running_reqs") == 0
    except httpx.HTTPError:
        return False


def disturb(fleet: Server, name: str, number: int) -> dict[str, Assembled]:
    """Run all bodies at once, signal the process when each of them has begun; what the clients have at the end.

    A request that comes while the process is away waits for its successor and is served, too.
    """
    pid, log_len, prefilled = fleet.pids()[name], len(fleet.log), metric(fleet, "num_prefill_tokens_total")
    late: list[Future[httpx.Response]] = []

    def strike() -> None:
        fleet.kill(name, number)
        late.append(pool.submit(post, fleet.url, "/v1/completions", completion_body("and another", max_tokens=5)))

    begun = threading.Barrier(len(BODIES), action=strike)

    def on_event(number: int) -> None:
        if number == KILL_AT:
            begun.wait(30)

    def one(body: dict[str, Any]) -> Assembled:
        return stream(fleet.url, body, on_event=on_event)

    with ThreadPoolExecutor(len(BODIES) + 1) as pool:
        found = dict(zip(BODIES, pool.map(one, BODIES.values()), strict=True))
    reply = late[0].result()
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 5
    fleet.wait_replaced(name, pid)
    # The streams were still open when it died: they were submitted, or computed, again.
    if name == "tokenizer-0":
        return found  # what runs has no need of it
    if name == "worker-0":
        assert metric(fleet, "num_prefill_tokens_total") > prefilled + len(BODIES) * KILL_AT
    else:
        assert "open requests again" in fleet.log[log_len:]
    return found


@pytest.mark.parametrize("name", ["tokenizer-0", "detokenizer-0", "scheduler-0", "worker-0"])
def test_streams_survive_a_kill(fleet: Server, undisturbed: dict[str, Assembled], name: str) -> None:
    assert disturb(fleet, name, signal.SIGKILL) == undisturbed
    eventually(lambda: is_idle(fleet), 60, "idle again")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detokenizer-0", "scheduler-0"])
def test_streams_survive_a_process_that_stops_answering(
    fleet: Server, undisturbed: dict[str, Assembled], name: str
) -> None:
    assert disturb(fleet, name, signal.SIGSTOP) == undisturbed
    assert f"{name} is hung" in fleet.log


def test_a_request_that_waits_for_its_whole_answer_survives_too(
    fleet: Server, undisturbed: dict[str, Assembled]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, fleet.url, "/v1/completions", BODIES["sampled"])  # which drafts do not make short
        eventually(lambda: not is_idle(fleet), 10, "it runs")
        fleet.wait_replaced("scheduler-0", fleet.kill("scheduler-0"))
        reply = waiting.result(60).json()
    assert reply["choices"][0]["text"] == undisturbed["sampled"].text
    assert reply["usage"]["completion_tokens"] == NUM_TOKENS


def test_a_killed_gateway_loses_only_its_own_connections(fleet: Server, undisturbed: dict[str, Assembled]) -> None:
    pid = fleet.pids()["gateway-0"]

    def kill_once(number: int) -> None:
        if number == KILL_AT:
            fleet.kill("gateway-0")

    with pytest.raises((httpx.HTTPError, AssertionError)):
        stream(fleet.url, BODIES["greedy"], on_event=kill_once)
    fleet.wait_replaced("gateway-0", pid)
    eventually(lambda: is_idle(fleet), 30, "its requests aborted")
    assert stream(fleet.url, BODIES["greedy"]) == undisturbed["greedy"]

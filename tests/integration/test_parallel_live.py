"""A server on two ranks: its streams, and what becomes of them when a rank dies or hangs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration import client
from tests.integration.client import Assembled, completion_body, post, stream
from tests.integration.conftest import CPU_ARGS
from tests.integration.server import Server, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
NUM_TOKENS = 200
KILL_AT = 15
BODY = completion_body("to be or not to be", max_tokens=NUM_TOKENS)
SHORT = {
    "sampled": completion_body("Where is the station?", temperature=0.9, top_p=0.9, seed=11, max_tokens=24),
    "logprobs": completion_body("un deux trois", max_tokens=8, logprobs=2),
    "regex": completion_body("a number:", max_tokens=24, ignore_eos=False, regex="[0-9]{3}-[0-9]{4}"),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that start again on a busy machine take their time."""
    monkeypatch.setattr(client, "TIMEOUT_S", 400.0)


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Iterator[Server]:
    server = Server(["--model", str(tiny_folder), *CPU_ARGS, "--tp-size", "2", "--hang-timeout-s", "10"])
    try:
        yield server.wait_ready(400)
    finally:
        server.close()


@pytest.fixture(scope="module")
def undisturbed(pair: Server) -> Assembled:
    found = stream(pair.url, BODY)
    assert found.usage["completion_tokens"] == NUM_TOKENS
    return found


def is_ready(server: Server) -> bool:
    try:
        return httpx.get(server.url + "/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_one_rank_and_two_give_the_same(pair: Server, undisturbed: Assembled, shared_server: Server) -> None:
    assert "--tp-size 2: the generic path, split over the ranks" in pair.log
    assert "512 x 16" in pair.log and "on each of 2 ranks" in pair.log
    assert stream(shared_server.url, BODY) == undisturbed
    for body in SHORT.values():
        replies = [post(server.url, "/v1/completions", body).json() for server in (shared_server, pair)]
        texts = [reply["choices"][0]["text"] for reply in replies]
        assert texts[0] == texts[1] and texts[0], replies
        if "logprobs" in body:
            values = [reply["choices"][0]["logprobs"]["token_logprobs"] for reply in replies]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("worker-1", signal.SIGKILL),
        pytest.param("worker-0", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("worker-1", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_streams_go_on_when_a_rank_dies_or_stops(
    pair: Server, undisturbed: Assembled, name: str, number: signal.Signals
) -> None:
    pids = {rank: pair.pids()[rank] for rank in ("worker-0", "worker-1")}

    def on_event(count: int) -> None:
        if count == KILL_AT:
            pair.kill(name, number)

    assert stream(pair.url, BODY, on_event=on_event) == undisturbed
    for rank, pid in pids.items():
        pair.wait_replaced(rank, pid, 200)
    eventually(lambda: is_ready(pair), 200, "ready again")
    if number == signal.SIGSTOP:
        assert f"{name} is hung" in pair.log


def test_a_scheduler_that_dies_leaves_the_ranks_together(pair: Server, undisturbed: Assembled) -> None:
    pids = {rank: pair.pids()[rank] for rank in ("worker-0", "worker-1")}

    def on_event(count: int) -> None:
        if count == KILL_AT:
            pair.kill("scheduler-0")

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda hook: stream(pair.url, BODY, on_event=hook), (on_event, None, None)))
    assert found == [undisturbed] * 3
    assert {rank: pair.pids()[rank] for rank in pids} == pids


def test_it_ends_on_sigterm_without_a_rank_being_killed(pair: Server) -> None:
    assert pair.stop() == 0
    assert pair.leftovers() == []
    assert "did not end within" not in pair.log

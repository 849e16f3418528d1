"""The real server's end: drained, killed, or never begun. And two gateways behind one port."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.client import completion_body, post, stream
from tests.integration.server import Server, eventually

pytestmark = pytest.mark.integration


def test_two_gateways_share_a_port_and_a_drain_finishes_what_runs(server: Callable[..., Server]) -> None:
    one = server("--gateways", "2")
    bodies = [completion_body(f"to be or not {n}", max_tokens=400) for n in range(8)]
    expected = [stream(one.url, body) for body in bodies]
    second = server("--port", str(one.port), wait=False)
    assert second.wait() == 2 and f"127.0.0.1:{one.port} is in use" in second.last_line
    began = [0] * len(bodies)

    def note(index: int) -> Callable[[int], None]:
        def on_event(number: int) -> None:
            began[index] = number

        return on_event

    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [pool.submit(stream, one.url, body, on_event=note(n)) for n, body in enumerate(bodies)]
        eventually(lambda: all(began), 30, "all streams begun")
        one.send(signal.SIGTERM)
        assert [each.result() for each in running] == expected
    assert one.wait() == 0
    assert one.leftovers() == []
    with pytest.raises(httpx.HTTPError):
        post(one.url, "/v1/completions", bodies[0])


def test_kill_of_the_real_supervisor_leaves_nothing(server: Callable[..., Server]) -> None:
    one = server()
    assert len(one.pids()) == 5
    assert one.stop(signal.SIGKILL) == -signal.SIGKILL
    eventually(lambda: not one.leftovers(), 10, "nothing left")


def test_a_second_signal_cuts_the_drain_short_and_every_stream_is_told(server: Callable[..., Server]) -> None:
    one = server()
    body = completion_body("to be or not", max_tokens=1000, n=64, stream=True)  # more than a moment of work
    with httpx.stream("POST", one.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        one.send(signal.SIGTERM)
        eventually(lambda: "draining: 1 requests open" in one.log, 10, "it drains")
        one.send(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    assert '"code":"draining"' in last
    assert one.wait() == 0
    assert one.leftovers() == [] and "killing it" not in one.log

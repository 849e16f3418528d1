"""The whole system answering over HTTP, with a tiny random model: real processes, real sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.client import Assembled, completion_body, events, post, stream
from tests.integration.server import Server, eventually

pytestmark = pytest.mark.integration
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def metric(server: Server, name: str) -> float:
    """Sum of a metric over its labels."""
    lines = httpx.get(server.url + "/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == f"quintet:{name}")


def chat_body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **more}


def assert_no_page_is_lost(server: Server) -> None:
    """After a flush of the cache every page is free: none is held by a request that is gone."""
    total = server.pages()
    eventually(lambda: metric(server, "num_running_reqs") == 0, 10, "nothing runs")
    eventually(lambda: httpx.post(server.url + "/flush_cache", timeout=10).status_code == 200, 10, "the cache flushed")
    eventually(lambda: metric(server, "num_free_pages") == total, 10, "every page free")
    assert metric(server, "num_invariant_failures_total") == 0


def test_streamed_and_whole_answers_are_equal(shared_server: Server) -> None:
    for body in (completion_body("to be or not"), completion_body("to be", temperature=1.0, seed=3, max_tokens=40)):
        whole = post(shared_server.url, COMPLETIONS, body).json()
        streamed = stream(shared_server.url, body)
        assert streamed.text == whole["choices"][0]["text"] != ""
        assert streamed.finish_reason == whole["choices"][0]["finish_reason"] == "length"
        assert streamed.usage["completion_tokens"] == whole["usage"]["completion_tokens"] == body["max_tokens"]
        assert streamed.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_chat_is_the_rendered_template_completed(shared_server: Server) -> None:
    chat = post(shared_server.url, CHAT, chat_body("Where is the station?", ignore_eos=True)).json()
    rendered = "<|im_start|>user\nWhere is the station?<|im_end|>\n<|im_start|>assistant\n"
    asked = {"model": "tiny", "messages": chat_body("Where is the station?")["messages"]}
    ids = post(shared_server.url, "/tokenize", asked)
    assert ids.status_code == 200, ids.text
    body = completion_body(ids.json()["tokens"], max_tokens=24)
    text = post(shared_server.url, COMPLETIONS, body).json()
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == len(ids.json()["tokens"]) < len(rendered)


def test_a_repeated_prefix_is_cached_and_changes_nothing(shared_server: Server) -> None:
    prompt = "Grüße aus Köln, schöne Straße. " * 12
    first = post(shared_server.url, COMPLETIONS, completion_body(prompt)).json()
    second = post(shared_server.url, COMPLETIONS, completion_body(prompt)).json()
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    prompt_tokens = first["usage"]["prompt_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (prompt_tokens - 1) // 16 * 16


def test_stop_strings_end_the_text_before_them(shared_server: Server) -> None:
    body = completion_body("un deux", max_tokens=48)
    full = stream(shared_server.url, body)
    stop = full.text[20:23]
    cut = stream(shared_server.url, {**body, "stop": [stop]})
    assert cut.finish_reason == "stop"
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.usage["completion_tokens"] <= full.usage["completion_tokens"]


def test_sixty_four_streams_at_once_all_finish_as_they_would_alone(shared_server: Server) -> None:
    bodies = [completion_body(f"{'to be or not ' * (n % 3)}{n % 16} for i in range", max_tokens=16) for n in range(64)]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda body: stream(shared_server.url, body), bodies))
    alone: dict[str, Assembled] = {}
    for body, got in zip(bodies, together, strict=True):
        expected = alone.get(body["prompt"]) or alone.setdefault(body["prompt"], stream(shared_server.url, body))
        assert got.text == expected.text and got.usage["completion_tokens"] == 16
    assert_no_page_is_lost(shared_server)


def test_more_than_fits_waits_its_turn(shared_server: Server) -> None:
    bodies = [completion_body(f"{n} question " * 60, max_tokens=700) for n in range(14)]  # about 1.7 pools of tokens
    with ThreadPoolExecutor(len(bodies)) as pool:
        results = list(pool.map(lambda body: stream(shared_server.url, body), bodies))
    assert [one.usage["completion_tokens"] for one in results] == [700] * len(bodies)
    assert_no_page_is_lost(shared_server)


def test_who_leaves_is_aborted_and_gives_the_pages_back(shared_server: Server) -> None:
    for leave_after in (0, 3):
        stream_events = events(shared_server.url, COMPLETIONS, completion_body("to be", max_tokens=900))
        for _ in range(leave_after):
            next(stream_events)
        stream_events.close()
        eventually(lambda: metric(shared_server, "num_running_reqs") == 0, 5, "aborted")
    assert_no_page_is_lost(shared_server)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, completion_body(""), 400),
        (COMPLETIONS, completion_body("x", temperature=-1), 400),
        (COMPLETIONS, completion_body("x", model="other"), 404),
        (COMPLETIONS, completion_body("x", no_such_field=1), 400),
        (COMPLETIONS, completion_body("word " * 5000), 400),
        (COMPLETIONS, completion_body("word " * 5000, stream=True), 400),
        (COMPLETIONS, completion_body([5, 99999]), 400),
        (CHAT, {"model": "tiny", "messages": []}, 400),
    ],
)
def test_what_is_wrong_is_refused_before_a_stream_starts(
    shared_server: Server, path: str, body: dict[str, Any], status: int
) -> None:
    reply = post(shared_server.url, path, body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["message"] and error["type"] and "param" in error and "code" in error


def test_health_models_and_metrics_answer(shared_server: Server) -> None:
    assert httpx.get(shared_server.url + "/health", timeout=10).status_code == 200
    models = httpx.get(shared_server.url + "/v1/models", timeout=10).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    before = metric(shared_server, "generation_tokens_total")
    post(shared_server.url, COMPLETIONS, completion_body("x", max_tokens=10))
    eventually(lambda: metric(shared_server, "generation_tokens_total") == before + 10, 5, "tokens counted")

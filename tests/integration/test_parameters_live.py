"""What the parameters promise, on a live server: log-probabilities and their places, counts, bounds, choices."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.integration.client import TIMEOUT_S
from tests.integration.server import Server, eventually

pytestmark = pytest.mark.integration
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Where is the station?"}]
ATOL = 2e-3
"""The generic path adds in another order when it computes a prompt whole."""


@pytest.fixture(scope="module")
def client(session_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=session_server.url, timeout=TIMEOUT_S, trust_env=False) as one:
        yield one


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(client: httpx.Client, prompt: Any, **more: Any) -> Any:
    return post(client, COMPLETIONS, prompt=prompt, **{"max_tokens": 16, "seed": 3, "ignore_eos": True, **more})


def chunks(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    text = client.post(path, json={**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def generated(client: httpx.Client, ids: list[int], **sampling: Any) -> tuple[list[int], list[float], int]:
    """Output ids, their log-probabilities, and how much of the prompt was cached."""
    params = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 5, **sampling}
    reply = post(client, "/generate", input_ids=ids, sampling_params=params, return_logprob=True)
    meta = reply["meta_info"]
    return reply["output_ids"], [value for value, _, _ in meta["output_token_logprobs"]], meta["cached_tokens"]


def scored(client: httpx.Client, ids: list[int]) -> list[float]:
    """The log-probability of each id but the first, from the prompt alone."""
    table = complete(client, ids, echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert len(table["tokens"]) == len(ids) and table["token_logprobs"][0] is None
    return table["token_logprobs"][1:]  # type: ignore[no-any-return]


def counter(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == f"quintet:{name}")


def settled(client: httpx.Client, name: str) -> float:
    """A counter once what ran before is in it: the engine tells its own a few times a second."""
    eventually(lambda: counter(client, "num_running_reqs") == 0, 10, "nothing runs")
    values = [counter(client, name)]
    while len(values) < 4 or len(set(values[-4:])) > 1:
        time.sleep(0.2)
        values.append(counter(client, name))
    return values[-1]


# ------------------------------------------------------------------ log-probabilities


def test_log_probabilities_are_those_of_the_same_tokens_scored_as_a_prompt(client: httpx.Client) -> None:
    """Cold and with the prompt cached, whatever filters, penalties and biases made of the distribution afterwards."""
    prompt = [70 + i % 150 for i in range(60)]
    for sampling in (
        {"temperature": 1.0},
        {"temperature": 2.0, "top_p": 0.8, "top_k": 50, "min_p": 0.01, "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {"80": 60.0}, "frequency_penalty": 2.0},
    ):
        ids, values, _ = generated(client, prompt, **sampling)
        again, cached_values, num_cached = generated(client, prompt, **sampling)
        assert (again, num_cached >= 48) == (ids, True)
        np.testing.assert_allclose(cached_values, values, atol=ATOL)
        np.testing.assert_allclose(scored(client, prompt + ids)[-len(ids) :], values, atol=ATOL)
    assert 80 in ids and min(values) < -3, "what a bias forces is not likely for that"


@pytest.mark.parametrize("skip", [False, True])
def test_a_completions_table_has_twenty_and_says_where_each_token_is(client: httpx.Client, skip: bool) -> None:
    for echo in (False, True):
        asked = {"logprobs": 20, "echo": echo, "max_tokens": 40, "skip_special_tokens": skip, "logit_bias": {"0": 3}}
        choice = complete(client, "the quick brown fox", **asked)["choices"][0]
        text, table = choice["text"], choice["logprobs"]
        offsets = table["text_offset"]
        assert offsets[0] == 0 and offsets == sorted(offsets) and "<|pad|>" in table["tokens"]
        ends = [*offsets[1:], len(text)]
        for token, start, end in zip(table["tokens"], offsets, ends, strict=True):
            if "\ufffd" not in token + text[start:end]:
                assert text[start:end] == ("" if skip and token == "<|pad|>" else token)
        rows = list(zip(table["tokens"], table["token_logprobs"], table["top_logprobs"], strict=True))
        for token, value, top in rows[echo:]:  # the prompt's first token has none
            # Tokens that are parts of characters all read U+FFFD, and a table by token has one of them.
            assert top[token] >= value and len(top) <= 21
            assert len(top) >= 20 or "\ufffd" in top
            assert sum(np.exp(list(top.values()))) < 1.001


def test_chat_has_twenty_most_likely_in_order_with_their_bytes(client: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    items = post(client, CHAT, **body, logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]["content"]
    assert len(items) == 8
    for item in items:
        top = item["top_logprobs"]
        values = [one["logprob"] for one in top]
        assert len(top) == 20 and values == sorted(values, reverse=True)
        assert all(bytes(one["bytes"]).decode("utf-8", "replace") == one["token"] for one in [item, *top])
        assert {key: item[key] for key in ("token", "logprob", "bytes")} == top[0], "greedy takes the most likely"


@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_without_new_tokens_gives_each_prompt_and_counts_nothing(
    client: httpx.Client, logprobs: int | None
) -> None:
    ids = post(client, "/tokenize", prompt="to be or not")["tokens"]
    asked = {"echo": True, "max_tokens": 0, "logprobs": logprobs}
    for prompt, num in (("to be or not", 1), (ids, 1), (["to be or not", "x"], 2), ([ids, [70]], 2)):
        whole = complete(client, prompt, **asked)
        assert [choice["index"] for choice in whole["choices"]] == list(range(num))
        assert whole["choices"][0]["text"] == "to be or not"
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
        assert whole["usage"]["completion_tokens"] == 0 < whole["usage"]["prompt_tokens"]
        streamed = chunks(client, COMPLETIONS, prompt=prompt, **asked)
        parts = [choice for chunk in streamed for choice in chunk["choices"] if choice["index"] == 0]
        assert "".join(part["text"] for part in parts) == "to be or not"
        tables = [part["logprobs"] for part in parts if part["logprobs"]]
        assert (tables[0] if tables else None) == whole["choices"][0]["logprobs"]
        if logprobs is not None:
            assert tables[0]["token_logprobs"][1:] == pytest.approx(scored(client, ids), abs=ATOL)


def test_a_prompt_that_fills_the_context_is_scored_and_one_token_more_is_refused(client: httpx.Client) -> None:
    context = post(client, "/tokenize", prompt="x")["max_model_len"]
    prompt = [70 + i % 190 for i in range(context)]
    values = scored(client, prompt)
    assert len(values) == context - 1 and values[:40] == pytest.approx(scored(client, prompt[:41]), abs=ATOL)
    refused = client.post(COMPLETIONS, json={"prompt": [*prompt, 70], "echo": True, "max_tokens": 0})
    assert refused.status_code == 400 and str(context) in refused.json()["error"]["message"]


# ------------------------------------------------------------------ choices, counts, bounds


def test_choices_of_a_seed_repeat_differ_and_share_the_prompt(client: httpx.Client) -> None:
    prompt = [90 + i % 130 for i in range(200)]
    before = settled(client, "num_prefill_tokens_total")
    replies = [complete(client, prompt, n=4, seed=11, temperature=1) for _ in range(2)]
    first, again = ([choice["text"] for choice in reply["choices"]] for reply in replies)
    assert first == again and len(set(first)) == 4
    assert complete(client, prompt, seed=11, temperature=1)["choices"][0]["text"] == first[0]
    assert complete(client, prompt, seed=12, temperature=1)["choices"][0]["text"] != first[0]
    assert [reply["usage"]["prompt_tokens"] for reply in replies] == [200, 200]
    assert replies[0]["usage"]["completion_tokens"] == 4 * 16
    # Computed once, and each choice, each later call a part of a page.
    assert settled(client, "num_prefill_tokens_total") - before < 200 + 10 * 16


def test_every_form_of_a_prompt_gives_the_same_text(client: httpx.Client) -> None:
    texts = ["to be or not", "un deux trois"]
    ids = [post(client, "/tokenize", prompt=text)["tokens"] for text in texts]
    alone = [complete(client, text, temperature=0)["choices"][0]["text"] for text in texts]
    assert [complete(client, one, temperature=0)["choices"][0]["text"] for one in ids] == alone
    for several in (texts, ids):
        assert [choice["text"] for choice in complete(client, several, temperature=0)["choices"]] == alone


def test_sixteen_stop_strings_are_watched_for_and_a_seventeenth_is_refused(client: httpx.Client) -> None:
    text = complete(client, "to be", max_tokens=40)["choices"][0]["text"]
    never = [f"<never {i}>" for i in range(15)]
    cut = complete(client, "to be", max_tokens=40, stop=[*never, text[10:13]])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(text[10:13])], "stop")
    for path, prompt in ((COMPLETIONS, {"prompt": "to be"}), (CHAT, {"messages": USER})):
        for stream in (False, True):
            refused = client.post(path, json={**prompt, "stop": [*never, "a", "b"], "stream": stream})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "stop" and "16" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_in_every_chunk_counts_up_to_the_last(client: httpx.Client, path: str) -> None:
    prompt = {"messages": USER} if path == CHAT else {"prompt": "to be or not"}
    body = {**prompt, "n": 2, "max_tokens": 12, "ignore_eos": True, "seed": 1}
    whole = post(client, path, **body)["usage"]
    for last, options in (
        (1, {"include_usage": True, "continuous_usage_stats": True}),
        (0, {"continuous_usage_stats": True}),
    ):
        found = chunks(client, path, **body, stream_options=options)
        usages = [chunk["usage"] for chunk in found]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[-1] == 24 == whole["completion_tokens"]
        assert {usage["prompt_tokens"] for usage in usages} == {whole["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
        assert sum(not chunk["choices"] for chunk in found) == last


# ------------------------------------------------------------------ endpoints


def test_health_generate_is_true_under_load_and_counts_as_nothing(client: httpx.Client) -> None:
    names = ("num_requests_total", "generation_tokens_total", "prompt_tokens_total")
    before = [settled(client, name) for name in names]
    for _ in range(3):
        assert client.get("/health_generate").status_code == 200
    assert [counter(client, name) for name in names] == before
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": [70 + n] * 20, "max_tokens": 900, "ignore_eos": True} for n in range(8)]
        running = [pool.submit(post, client, COMPLETIONS, **body) for body in bodies]
        eventually(lambda: counter(client, "num_running_reqs") > 0, 10, "they run")
        statuses = []
        while not all(one.done() for one in running):
            statuses.append(client.get("/health_generate").status_code)
        assert statuses and set(statuses) == {200}
        assert [one.result()["usage"]["completion_tokens"] for one in running] == [900] * 8
    expected = [before[0] + 8, before[1] + 8 * 900, before[2] + 8 * 20]
    eventually(lambda: [counter(client, name) for name in names] == expected, 10, "the eight and nothing else")


def test_no_origin_is_allowed_unless_named(client: httpx.Client) -> None:
    origin = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    for method, path in (("OPTIONS", CHAT), ("GET", "/v1/models")):
        reply = client.request(method, path, headers=origin)
        assert not any(name.startswith("access-control") for name in reply.headers)


def test_answers_to_http_1_0_and_to_offers_of_http_2(session_server: Server) -> None:
    """As ApacheBench and nginx ask, and as Java's client does."""
    body = json.dumps({"prompt": "to be", "max_tokens": 5, "seed": 1, "stream": True}).encode()
    offer = b"Connection: close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    texts = []
    for version, headers in ((b"1.0", b""), (b"1.1", offer)):
        with socket.create_connection(("127.0.0.1", session_server.port), timeout=30) as connection:
            head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n" % (version, len(body))
            connection.sendall(head + headers + b"\r\n" + body)
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        answer, _, content = data.partition(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and content.rstrip().endswith((b"data: [DONE]", b"\r\n0"))
        assert (b"chunked" in answer) is (version == b"1.1")
        lines = [line[6:] for line in content.splitlines() if line.startswith(b"data: {")]
        texts.append("".join(json.loads(line)["choices"][0]["text"] for line in lines))
    assert texts[0] == texts[1] != ""

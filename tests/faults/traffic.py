"""What the soak's clients do: good requests whose answers are known, and everything that clients should not do.

Each action returns a word for how it ended and raises ``Broken`` where it ended in no allowed way.
"""

from __future__ import annotations

import http.client
import json
import random
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from tests.faults.streams import Reply, Stream, connect

FLOOD = 48
LEAVE_WAIT_S = 30.0
_COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 12}
_PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
_DRAWN: dict[str, Any] = {**_PLAIN, "temperature": 0.8, "seed": 3}
KNOWN: dict[str, dict[str, Any]] = {
    "greedy": {**_PLAIN, "prompt": "un deux trois"},
    "sampled": {**_DRAWN, "prompt": "Where is the station?"},
    "n=2": {**_DRAWN, "prompt": "to be or not to be", "n": 2},
    "json": {**_DRAWN, "prompt": "Colours:", "max_tokens": 400, "ignore_eos": False, "json_schema": _COLOURS},
    "long prompt": {**_PLAIN, "prompt": "It is over there, by the river. " * 60, "max_tokens": 10},
    "stopped": {**_DRAWN, "prompt": "for i in", "max_tokens": 200, "stop": ["e", "zz"]},
}
"""Requests whose answer is always the same."""
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "x", "no_such_field": 1}),
    ("/v1/completions", {"prompt": [10**7]}),
    ("/v1/completions", {"prompt": "x " * 100_000}),
    ("/v1/completions", {"prompt": "x", "json_schema": {"type": "no such type"}}),
    ("/v1/completions", {"prompt": "x", "regex": "(["}),
    ("/v1/chat/completions", {"messages": "none"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 10**6}),
    ("/generate", {"text": "x", "input_ids": [1]}),
    ("/no/such/path", {}),
    ("/v1/completions", "no object"),
]
"""(path, body): each is answered with a status from 400 to 499."""
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
GARBAGE = [b"\x16\x03\x01\x02\x00\x01\x00", b"GET", _HEAD % 50 + b"{", b"\0" * 5000]


class Broken(AssertionError):
    """A request that did not end as it must."""


class Traffic:
    """One client's actions. ``cut``: whether a gateway has died since a time.monotonic(), the only excuse for a
    connection that breaks."""

    def __init__(self, url: str, seed: int, answers: dict[str, Reply], cut: Callable[[float], bool]) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._answers = answers
        self._cut = cut
        self._actions: list[tuple[int, Callable[[], str]]] = [
            (10, self.known), (4, self.leaves), (3, self.deadline), (4, self.bad), (1, self.flood), (1, self.garbage),
            (2, self.whole), (2, self.slow), (2, self.aborted),
        ]  # fmt: skip

    def act(self) -> tuple[str, str]:
        """Do something; its name and how it ended. Raises Broken."""
        action = self._random.choices([a for _, a in self._actions], [weight for weight, _ in self._actions])[0]
        began = time.monotonic()
        try:
            return action.__name__, action()
        except (OSError, http.client.HTTPException) as error:
            if self._cut(began):
                return action.__name__, "cut"
            raise Broken(f"{action.__name__}: the connection broke and no gateway had died: {error!r}") from error

    # ------------------------------------------------------------------ good ones

    def known(self) -> str:
        """A stream whose every byte is known."""
        name = self._random.choice(list(KNOWN))
        began = time.monotonic()
        stream = Stream(self._url, "", KNOWN[name])
        stream.start()
        stream.join()
        if stream.failure is not None or (stream.status == 200 and b"[DONE]" not in stream.raw):
            if self._cut(began):
                return "cut"
            raise Broken(f"known {name}: {stream.failure!r}, {stream.raw[-200:]!r}")
        if stream.status == 503:
            return "refused"
        if (got := stream.reply()) != self._answers[name]:
            raise Broken(f"known {name}: {got} instead of {self._answers[name]}")
        return "ok"

    def whole(self) -> str:
        """The same without a stream."""
        name = self._random.choice(list(KNOWN))
        status, body = self._post("/v1/completions", KNOWN[name])
        if status == 503:
            return "refused"
        texts = {c["index"]: c["text"] for c in json.loads(body)["choices"]} if status == 200 else None
        if texts != self._answers[name].texts:
            raise Broken(f"whole {name}: {status}, {texts} instead of {self._answers[name].texts}")
        return "ok"

    # ------------------------------------------------------------------ those who leave

    def leaves(self) -> str:
        """A client that disconnects in the middle, or before anything has come."""
        stream = Stream(self._url, "", {**KNOWN["greedy"], "max_tokens": 2000, "n": self._random.choice((1, 2))})
        events = self._random.choice((0, 1, 20))
        stream.start()
        time.sleep(0.02)
        deadline = time.monotonic() + LEAVE_WAIT_S
        while stream.num_events < events and not stream.over_at and time.monotonic() < deadline:
            time.sleep(0.005)
        stream.leave()
        stream.join()
        return "left"

    def slow(self) -> str:
        """A client that reads nothing for a while, and then leaves."""
        where = urlsplit(self._url)
        with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
            body = json.dumps({**KNOWN["greedy"], "max_tokens": 3000, "stream": True, "logprobs": 5}).encode()
            connection.sendall(_HEAD % len(body) + body)
            time.sleep(self._random.uniform(0.2, 2.0))
        return "left"

    def deadline(self) -> str:
        """A request with less time than it needs."""
        body = {**KNOWN["sampled"], "max_tokens": 4000, "timeout": self._random.uniform(0.01, 0.6)}
        status, reply = self._post("/v1/completions", body)
        if status == 200 and json.loads(reply)["choices"][0]["finish_reason"] in ("abort", "length"):
            return "ended"
        if status in (503, 504):
            return "refused"
        raise Broken(f"deadline: {status} {reply[:300]!r}")

    def aborted(self) -> str:
        """A request that an operator ends while it runs."""
        rid = secrets.token_hex(8)
        sampling = {"max_new_tokens": 3000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self._post, "/generate", {"text": "un deux", "rid": rid, "sampling_params": sampling})
            time.sleep(self._random.uniform(0.0, 0.3))
            self._post("/abort_request", {"rid": rid})
            status, reply = waiting.result()
        if status not in (200, 503):
            raise Broken(f"aborted: {status} {reply[:300]!r}")
        return "ended" if status == 200 else "refused"

    # ------------------------------------------------------------------ those who should not

    def bad(self) -> str:
        """A request that is refused for what it says."""
        path, body = self._random.choice(BAD)
        status, reply = self._post(path, body)
        if status == 503:
            return "refused"
        if not 400 <= status < 500 or "error" not in json.loads(reply):
            raise Broken(f"bad {path} {str(body)[:80]}: {status} {reply[:300]!r}")
        return "ok"

    def flood(self) -> str:
        """Far more at once than fits into the queue: each is served or refused."""
        with ThreadPoolExecutor(FLOOD) as pool:
            began = time.monotonic()
            found = list(pool.map(lambda _: self._try_post(KNOWN["greedy"]), range(FLOOD)))
        wrong = [status for status in found if status not in (200, 503, 429)]
        if wrong and not (set(wrong) == {0} and self._cut(began)):
            raise Broken(f"flood: statuses {sorted(set(wrong))}")
        return "ok"

    def garbage(self) -> str:
        """Bytes that are no request, and a connection that ends."""
        where = urlsplit(self._url)
        with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
            connection.sendall(self._random.choice(GARBAGE))
            time.sleep(0.05)
        return "left"

    def _post(self, path: str, body: Any) -> tuple[int, bytes]:
        connection = connect(self._url)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _try_post(self, body: Any) -> int:
        try:
            return self._post("/v1/completions", body)[0]
        except (OSError, http.client.HTTPException):
            return 0

"""A gateway with a fake engine behind it, for the tests of ``gateway/``."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.fake_engine import FakeEngine, Script
from bench.live_gateway import LiveGateway
from common.config import HttpConfig, ServerConfig
from common.messages import Generate, SamplingParams

CHAT = [{"role": "user", "content": "hi"}]


def eventually(condition: Callable[[], bool], what: str = "condition", timeout_s: float = 10.0) -> None:
    """Wait until ``condition()`` holds; fail the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.002)


class Live:
    """The pair and a client. ``engine.script`` may be changed between requests."""

    def __init__(self, engine: FakeEngine, gateway: LiveGateway, run_dir: Path) -> None:
        self.engine = engine
        self.gateway = gateway
        self.run_dir = run_dir
        self.url = gateway.url
        self.client = httpx.Client(base_url=gateway.url, timeout=20, trust_env=False)

    @property
    def open(self) -> dict[str, Any]:
        """The gateway's open requests."""
        return self.gateway.gateway.engine.open

    @property
    def arrived(self) -> bool:
        """Requests are open and the engine has each of them: what it does with them is decided."""
        return bool(self.open) and set(self.open) <= {generate.rid for generate in self.engine.generates}

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        """POST JSON."""
        return self.client.post(path, json=body, **kwargs)

    def chat(self, **fields: Any) -> httpx.Response:
        """A chat completion."""
        return self.post("/v1/chat/completions", {"messages": CHAT, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        """A completion."""
        return self.post("/v1/completions", {"prompt": "hi", **fields})

    def sent(self, **fields: Any) -> Generate:
        """The message the engine got for a chat completion that was accepted."""
        response = self.chat(**fields)
        assert response.status_code == 200, response.text
        return self.engine.generates[-1]

    def sampling(self, **fields: Any) -> SamplingParams:
        """The sampling parameters the engine got."""
        return self.sent(**fields).sampling

    def raw(self, body: dict[str, Any]) -> socket.socket:
        """A chat completion on a bare connection: the test decides when to read and when to leave."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.gateway.port), timeout=10)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    @contextlib.contextmanager
    def script(self, script: Callable[[Generate], Script], *, auto: bool = True) -> Iterator[None]:
        """Another script for a while."""
        old, old_auto = self.engine.script, self.engine.auto
        self.engine.script, self.engine.auto = script, auto
        try:
            yield
        finally:
            self.engine.script, self.engine.auto = old, old_auto


class Stream:
    """A streamed chat read in a thread."""

    def __init__(self, live: Live, **fields: Any) -> None:
        self._live = live
        self.response: Any = None
        body = {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        all_of_it = len(live.engine.generates) + int(fields.get("n", 1))
        self._thread.start()
        eventually(lambda: len(live.engine.generates) >= all_of_it, "the request arrives")

    def _run(self, body: dict[str, Any]) -> None:
        self.response = self._live.post("/v1/chat/completions", body)

    def chunks(self) -> list[Any]:
        self._thread.join(20)
        assert self.response is not None, "the stream did not end"
        assert self.response.status_code == 200, self.response.text
        return events(self.response.text)


@contextlib.contextmanager
def live_gateway(
    script: Callable[[Generate], Script] | None = None,
    *,
    config: ServerConfig | None = None,
    engine_options: dict[str, Any] | None = None,
    **http: Any,
) -> Iterator[Live]:
    """Start both; ``http`` are fields of ``HttpConfig``."""
    config = config or ServerConfig(http=HttpConfig(port=0, **http))
    with tempfile.TemporaryDirectory(prefix="qt-gw-") as folder:
        options = {"num_tokenizers": config.http.tokenizers, **(engine_options or {})}
        with (
            FakeEngine(Path(folder), script or (lambda _: Script()), **options) as engine,
            LiveGateway(Path(folder), config) as gateway,
        ):
            live = Live(engine, gateway, Path(folder))
            with live.client:
                if options.get("ready", True):
                    eventually(lambda: live.client.get("/health").status_code == 200, "the gateway is ready")
                yield live


def events(text: str) -> list[Any]:
    """The events of an SSE body; the end mark as the string ``[DONE]``."""
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def joined(chunks: list[Any], index: int = 0, key: str = "content") -> str:
    """A streamed chat choice's text."""
    return "".join(
        choice["delta"].get(key) or ""
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk["choices"]
        if choice["index"] == index
    )

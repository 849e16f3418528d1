"""Streams as a client sees them: read in a thread, timed, put together when they are over.

``http.client`` and one thread each: a reader that costs little leaves the two cores to the server, and
a connection that stays open can ask which gateway it has reached before it is used.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

READ_TIMEOUT_S = 300.0
"""No read waits longer: a stream that is never answered fails its cell instead of the whole run."""
CONNECT_TRIES = 200


@dataclass
class Reply:
    """What a client has assembled when its stream is over. Equal when every byte, ending and count is."""

    texts: dict[int, str] = field(default_factory=dict)
    """By index of the choice."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    """Without the number of cached tokens, which is a matter of speed."""


def connect(url: str, gateway: str = "") -> http.client.HTTPConnection:
    """A connection, to a certain gateway where one is named: the kernel chooses, so we try until it is that one."""
    where = urlsplit(url)
    for _ in range(CONNECT_TRIES):
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=READ_TIMEOUT_S)
        if not gateway or server_info(connection)["gateway"] == gateway:
            return connection
        connection.close()
    raise AssertionError(f"{CONNECT_TRIES} connections to {url} and none reached {gateway}")


def server_info(connection: http.client.HTTPConnection) -> dict[str, Any]:
    """``/get_server_info``: ``gateway`` is who answered, ``scheduler`` the engine's state at this moment."""
    connection.request("GET", "/get_server_info")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    return found


class Stream:
    """One streamed completion. ``start`` sends it; a thread reads until it is over."""

    def __init__(self, url: str, gateway: str, body: dict[str, Any]) -> None:
        """Connects; raises AssertionError when the gateway cannot be reached."""
        self.gateway = gateway
        self._body = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        self._connection = connect(url, gateway)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._reads: list[tuple[float, bytes]] = []
        self.status = 0
        """HTTP status; 0 until the headers have come, which is when the request is accepted."""
        self.num_events = 0
        self.over_at = 0.0
        """time.monotonic() of the end, however it came; 0 while it is open."""
        self.failure: Exception | None = None

    def start(self) -> None:
        """Send the request."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            self.status = response.status
            while data := response.read1(1 << 16):
                self._reads.append((time.monotonic(), data))
                self.num_events += data.count(b"data: ")
        except (OSError, http.client.HTTPException) as error:
            self.failure = error
        finally:
            self._connection.close()
            self.over_at = time.monotonic()

    def leave(self) -> None:
        """Disconnect, as a client does that has had enough."""
        connection = self._connection.sock
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has ended by itself
                pass

    def join(self) -> None:
        """Wait for the end; raises AssertionError when it does not come."""
        self._thread.join(READ_TIMEOUT_S)
        if self._thread.is_alive():
            raise AssertionError(f"a stream of {self.gateway} is still open after {READ_TIMEOUT_S:g} s")

    @property
    def first_at(self) -> float:
        """time.monotonic() of the first bytes; infinity without any."""
        return self._reads[0][0] if self._reads else float("inf")

    def pause_s(self, since: float) -> float:
        """The longest silence that ended after ``since``; the part of it before ``since`` does not count."""
        times = [since] + [at for at, _ in self._reads if at > since]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    @property
    def raw(self) -> bytes:
        """Everything that came."""
        return b"".join(data for _, data in self._reads)

    def reply(self) -> Reply:
        """Put it together; raises AssertionError for a stream that failed, broke off, or has no proper form."""
        assert self.failure is None, f"the stream broke off: {self.failure!r}"
        assert self.status == 200, f"{self.status}: {self.raw.decode()}"
        blocks = self.raw.decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], f"the stream ends with {blocks[-2:]}"
        out = Reply()
        for block in blocks[:-2]:
            assert block.startswith("data: "), block
            event = json.loads(block[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                index = choice["index"]
                assert index not in out.finish_reasons, f"choice {index} goes on after its end"
                out.texts[index] = out.texts.get(index, "") + choice["text"]
                if choice["finish_reason"]:
                    out.finish_reasons[index] = choice["finish_reason"]
            if event.get("usage"):
                out.usage = {name: n for name, n in event["usage"].items() if isinstance(n, int)}
        return out

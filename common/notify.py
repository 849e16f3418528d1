"""Tell systemd what we are doing (sd_notify's protocol: datagrams to ``$NOTIFY_SOCKET``)."""

from __future__ import annotations

import os
import socket
import time


class Notifier:
    """Silent where systemd did not ask (no ``NOTIFY_SOCKET``)."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        env = dict(os.environ) if environ is None else environ
        self._address = env.get("NOTIFY_SOCKET", "")
        watchdog_us = env.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(watchdog_us) / 2e6 if watchdog_us.isdigit() else 0.0
        self._last_ping = 0.0

    @property
    def ping_every_s(self) -> float:
        """Call ``ping`` this often; infinity where no watchdog waits for it."""
        return self._watchdog_s / 2 if self._watchdog_s else float("inf")

    def ready(self, status: str) -> None:
        """Start-up is over."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """One line for ``systemctl status``."""
        self._send(f"STATUS={status}")

    def stopping(self, status: str) -> None:
        """The drain has begun."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def ping(self) -> None:
        """Keep the watchdog quiet; sends at half its interval."""
        now = time.monotonic()
        if self._watchdog_s and now - self._last_ping >= self._watchdog_s:
            self._last_ping = now
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.connect(address)
                sock.sendall(message.encode())
        except OSError:
            pass  # systemd went away or the socket is full: nothing of ours depends on it

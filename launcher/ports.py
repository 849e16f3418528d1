"""Is the port free? Asked before anything is loaded, so that a second server fails at once."""

from __future__ import annotations

import errno
import socket

import psutil

from common.errors import ConfigError


def claim_port(host: str, port: int) -> int:
    """The port to serve on: ``port`` if it is free on ``host``; for 0 one that the system chose.

    Raises ``ConfigError`` that names the address, and the process that holds it where it can be seen.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r}: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of a server just ended may linger; a listening socket still refuses us.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise ConfigError(_explain(host, port, error)) from None
        return int(probe.getsockname()[1])


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is in use{_holder(port)}; stop that server or choose another --port"
    if error.errno == errno.EACCES:
        return f"{host}:{port}: not permitted; ports below 1024 belong to root, choose another --port"
    return f"{host}:{port}: {error.strerror}; choose another --host or --port"


def _holder(port: int) -> str:
    """`` by process 123 (name)`` where we may see it, else nothing."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and getattr(connection.laddr, "port", 0) == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""


def url_host(host: str) -> str:
    """The host as a client on this machine writes it in a URL."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host

"""How messages travel: one-way PUSH/PULL channels with bounds, that never block a loop.

Every process binds its inboxes (PULL sockets; ``common/inboxes.py`` lists them with their bounds) and
connects a PUSH socket to each inbox it writes to. ``Sender.send`` returns False instead of waiting when the
channel is full: the caller keeps its cursor where it is and the next send catches up. So nothing is dropped, and
nothing grows without bound.

Addresses are ``ipc://`` sockets in a fresh 0700 run directory. A receiver bound again by a
restarted process takes over the address; senders reconnect by themselves. What was queued for the
dead process may reach its successor, which recognises it by generation or epoch, or be lost with
it, and then the cursors above this layer send it again.

Across hosts the addresses are ``tcp://``, and only with CURVE keys (``common/curve.py``).

Whatever does not decode as a message of the inbox, is larger than ``MAX_MESSAGE_BYTES``, or does not even
speak ZeroMQ's protocol is dropped and counted (``Receiver.num_bad``).
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from common import messages
from common.curve import Curve, key_from_hex
from common.errors import ConfigError
from common.inboxes import BOUNDS, INBOX_TYPES, inbox_address, is_remote, kind_of, split_tcp

log = logging.getLogger(__name__)

M = TypeVar("M")

MAX_MESSAGE_BYTES = 256 << 20
"""A frame above this is counted and dropped."""
_MARGIN_BYTES = 16 << 20
"""A frame above ``MAX_MESSAGE_BYTES`` by more than this is not even read: ZeroMQ closes its connection."""
HEARTBEAT_S = 2.0
"""Across hosts: how often a silent connection is tried; three times that without an answer ends it."""
_WARN_EVERY_S = 5.0


class Sender:
    """The writing end of a channel. Not thread-safe. ``address`` may name the receiver's key."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, bound: int, curve: Curve | None = None
    ) -> None:
        self.address = address
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, bound)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        place, _, key = address.partition("#")
        if place.startswith("tcp://"):
            _prepare_tcp(self._socket)
            _need(curve).as_client(self._socket, key_from_hex(key))
        self._socket.connect(place)

    def send(self, message: messages.Message) -> bool:
        """Queue a message; False, with nothing queued, when the channel is full."""
        return self.send_bytes(self._encoder.encode(message))

    def send_bytes(self, frame: bytes) -> bool:
        """As ``send``, for a message already encoded (one encoding for several receivers)."""
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 200) -> None:
        """Close; what is queued is still sent for up to ``linger_ms``."""
        self._socket.close(linger=linger_ms)


class Receiver(Generic[M]):
    """The reading end: an inbox this process binds. Not thread-safe.

    A frame that does not decode as one of the inbox's message types, or that ``accepts`` refuses, is
    counted in ``num_bad`` and dropped; it cannot harm the process.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        types: Any,
        bound: int,
        curve: Curve | None = None,
        accepts: Callable[[M], bool] | None = None,
    ) -> None:
        self.address = address
        """Where it is bound: with the port that was chosen, where 0 was asked for."""
        self._num_bad = 0
        self._warned_at = 0.0
        self._accepts = accepts
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(types)
        self.socket = context.socket(zmq.PULL)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self.socket.setsockopt(zmq.RCVHWM, bound)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + _MARGIN_BYTES)
        if address.startswith("tcp://"):
            _prepare_tcp(self.socket)
            _need(curve).as_server(self.socket, context)
        self._refusals = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self.socket.bind(address)
        if address.startswith("tcp://"):
            self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def num_bad(self) -> int:
        """Frames dropped, and connections refused because they spoke no ZeroMQ or had no known key."""
        while not self.socket.closed and self._refusals.poll(0):
            recv_monitor_message(self._refusals, zmq.NOBLOCK)
            self._num_bad += 1
        return self._num_bad

    def receive(self, limit: int = 1024) -> list[M]:
        """Everything that has arrived, oldest first, at most ``limit`` frames; never waits."""
        out: list[M] = []
        for _ in range(limit):
            if not self._poller.poll(0):  # a third of the time of an exception
                break
            frame = self.socket.recv(zmq.NOBLOCK)
            if len(frame) > MAX_MESSAGE_BYTES:
                self._drop(frame, f"more than {MAX_MESSAGE_BYTES}")
                continue
            try:
                message = self._decoder.decode(frame)
            except MemoryError:
                raise  # no frame can cause it (lengths are checked first): this process has no memory left
            except Exception as error:  # whatever it is (RecursionError too), the frame alone is at fault
                self._drop(frame, str(error))
                continue
            if self._accepts is not None and not self._accepts(message):
                self._drop(frame, "not for this inbox to take")
                continue
            out.append(message)
        return out

    def _drop(self, frame: bytes, why: str) -> None:
        self._num_bad += 1
        now = time.monotonic()
        if now - self._warned_at >= _WARN_EVERY_S:  # a flood of them must not become a flood of log lines
            self._warned_at = now
            log.warning(
                "%s: dropped a frame of %d bytes: %s (%d so far)", self.address, len(frame), why, self._num_bad
            )

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something arrives or ``timeout_s`` passes; True if something is there."""
        return bool(self._poller.poll(max(0, int(timeout_s * 1000))))

    def fileno(self) -> int:
        """ZeroMQ's edge-triggered descriptor: readable means *try receive() until it is empty*."""
        return int(self.socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the inbox; what is queued in it is lost. Closing it again does nothing."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._refusals.close(linger=0)
            self.socket.close(linger=0)


class Waiter:
    """Sleeps until one of several inboxes has something. For a loop's lifetime: ``Channels.wait_any`` for once."""

    def __init__(self, receivers: list[Receiver[Any]]) -> None:
        self._receivers = {receiver.socket: receiver for receiver in receivers}
        self._poller = zmq.Poller()
        for socket in self._receivers:
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> list[Receiver[Any]]:
        """Those that have something; none when ``timeout_s`` has passed.

        ZeroMQ counts whole milliseconds; the rest is slept deaf. Who wakes too early finds nothing to do and looks
        again and again until it is time; a whole millisecond too late is long for a batch that a worker waits for.
        """
        until = time.monotonic() + timeout_s
        events = self._poller.poll(max(0, int(timeout_s * 1000)))
        if not events and (rest_s := until - time.monotonic()) > 0:
            time.sleep(rest_s)
            events = self._poller.poll(0)
        return [self._receivers[socket] for socket, _ in events]


class Channels:
    """A process's ZeroMQ context and the channels opened on it.

    ``run_dir`` holds the ipc sockets. ``curve`` gives the keys for tcp addresses; it is called when the first is
    used. One instance per process, used from one thread.
    """

    def __init__(self, run_dir: Path | str, curve: Callable[[], Curve] | None = None) -> None:
        self.run_dir = Path(run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open: list[Sender | Receiver[Any]] = []
        self._read_keys = curve
        self._curve: Curve | None = None

    def address_of(self, inbox: str) -> str:
        """Where an inbox is that is known by name alone."""
        return inbox_address(self.run_dir, inbox)

    def sender(self, inbox: str, address: str | None = None) -> Sender:
        """Connect to an inbox, by name or (a gateway elsewhere) by address.

        Raises ``ConfigError`` for a tcp address without keys.
        """
        address = address or self.address_of(inbox)
        sender = Sender(self._context, address, BOUNDS[kind_of(inbox)], self._keys_for(address))
        self._open.append(sender)
        return sender

    def receiver(
        self, inbox: str, address: str | None = None, accepts: Callable[[Any], bool] | None = None
    ) -> Receiver[Any]:
        """Bind an inbox. Raises ``zmq.ZMQError`` (EADDRINUSE) only for tcp addresses: an ipc address is taken over.

        Raises ``ConfigError`` for a tcp address without keys.
        """
        kind = kind_of(inbox)
        address = address or self.address_of(inbox)
        receiver: Receiver[Any] = Receiver(
            self._context, address, INBOX_TYPES[kind], BOUNDS[kind], self._keys_for(address), accepts
        )
        self._open.append(receiver)
        return receiver

    def is_gateway_elsewhere(self, gateway: str, address: str) -> bool:
        """Whether name and address are those of a gateway on another host whose key is known.

        A host by number: to look a name up would hold all channels up.
        """
        place, _, key = address.partition("#")
        try:
            ipaddress.ip_address(split_tcp(place)[0])
            return is_remote(gateway) and _need(self._keys_for(place)).knows(key_from_hex(key))
        except ValueError:
            return False

    def _keys_for(self, address: str) -> Curve | None:
        if address.startswith("tcp://") and self._curve is None and self._read_keys is not None:
            self._curve = self._read_keys()
        return self._curve

    @property
    def num_bad(self) -> int:
        """``Receiver.num_bad`` of all inboxes of this process."""
        return sum(channel.num_bad for channel in self._open if isinstance(channel, Receiver))

    @staticmethod
    def wait_any(receivers: list[Receiver[Any]], timeout_s: float) -> bool:
        """Sleep until one of the receivers has something or ``timeout_s`` passes."""
        poller = zmq.Poller()
        for receiver in receivers:
            poller.register(receiver.socket, zmq.POLLIN)
        return bool(poller.poll(max(0, int(timeout_s * 1000))))

    def close(self) -> None:
        """Close every channel; queued messages are still sent for a moment."""
        for channel in self._open:
            channel.close()
        self._open.clear()
        if self._curve is not None:
            self._curve.close()
        self._context.term()


def _prepare_tcp(sock: zmq.Socket[bytes]) -> None:
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(3000 * HEARTBEAT_S))
    sock.setsockopt(zmq.HANDSHAKE_IVL, 5000)


def _need(curve: Curve | None) -> Curve:
    if curve is None:
        raise ConfigError("a tcp channel needs CURVE keys: --curve-keys DIR, made by launch.py --make-curve-keys DIR")
    return curve

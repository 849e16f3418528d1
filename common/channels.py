"""How messages travel: one-way PUSH/PULL channels with bounds, that never block a loop.

Every process owns one inbox (a PULL socket it binds) and connects a PUSH socket to each inbox it
writes to. ``Sender.send`` returns False instead of waiting when the channel is full: the caller
keeps its cursor where it is and the next send catches up. So nothing is dropped, and nothing
grows without bound.

==================  =====================  =======  ==================================================
inbox (bound by)    written by             bound    at the bound
==================  =====================  =======  ==================================================
tokenizer-<i>       gateways, scheduler    1,024    the gateway answers 503 with Retry-After
scheduler           tokenizers, gateways,  4,096    tokenizer: stops reading its inbox until it fits;
                    detokenizer, launcher           gateway: lease and control retried; detokenizer:
                                                    keeps the stop hit and retries
scheduler-work      workers                64       the worker waits (at most two steps are in flight)
worker-<r>          scheduler              16       no further step is sent
detokenizer         scheduler              256      cursors stay; the next TokenBatch carries more
gateway-<id>        tokenizers,            1,024    cursors stay; full for ``GATEWAY_STUCK_S``: the
                    detokenizer, scheduler          gateway is declared gone
supervisor          all                    1,024    the heartbeat is skipped
==================  =====================  =======  ==================================================

Addresses are ``ipc://`` sockets in a fresh 0700 run directory. A receiver bound again by a
restarted process takes over the address; senders reconnect by themselves. What was queued for the
dead process may reach its successor, which recognises it by generation or epoch, or be lost with
it, and then the cursors above this layer send it again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from common import messages

log = logging.getLogger(__name__)

M = TypeVar("M")

MAX_MESSAGE_BYTES = 256 << 20
"""A frame above this is dropped by ZeroMQ and its connection closed."""
GATEWAY_STUCK_S = 5.0

BOUNDS = {
    "tokenizer": 1024,
    "scheduler": 4096,
    "scheduler-work": 64,
    "worker": 16,
    "detokenizer": 256,
    "gateway": 1024,
    "supervisor": 1024,
}

INBOX_TYPES: dict[str, Any] = {
    "tokenizer": messages.ToTokenizer,
    "scheduler": messages.ToScheduler,
    "scheduler-work": messages.ToScheduler,
    "worker": messages.ToWorker,
    "detokenizer": messages.ToDetokenizer,
    "gateway": messages.ToGateway,
    "supervisor": messages.ToSupervisor,
}


def kind_of(inbox: str) -> str:
    """``worker-0`` -> ``worker``; ``scheduler-work`` and ``scheduler`` are their own kinds."""
    if inbox in BOUNDS:
        return inbox
    kind = inbox.split("-", 1)[0]
    if kind not in BOUNDS:
        raise ValueError(f"unknown inbox {inbox!r}; known kinds are {', '.join(BOUNDS)}")
    return kind


def inbox_address(run_dir: Path | str, inbox: str) -> str:
    """The local address of an inbox, e.g. ``ipc:///tmp/quintet-x/worker-0``."""
    kind_of(inbox)
    return f"ipc://{Path(run_dir) / inbox}"


class Sender:
    """The writing end of a channel. Not thread-safe."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, bound: int) -> None:
        self.address = address
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, bound)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(address)

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

    A frame that does not decode as one of the inbox's message types is counted in ``num_bad``
    and dropped; it cannot harm the process.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, types: Any, bound: int) -> None:
        self.address = address
        self.num_bad = 0
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(types)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, bound)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.bind(address)

    def receive(self, limit: int = 1024) -> list[M]:
        """Everything that has arrived, oldest first, at most ``limit``; never waits."""
        out: list[M] = []
        while len(out) < limit:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                out.append(self._decoder.decode(frame))
            except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
                self.num_bad += 1
                log.warning("%s: dropped a frame of %d bytes: %s", self.address, len(frame), error)
        return out

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something arrives or ``timeout_s`` passes; True if something is there."""
        return bool(self.socket.poll(max(0, int(timeout_s * 1000))))

    def fileno(self) -> int:
        """ZeroMQ's edge-triggered descriptor: readable means *try receive() until it is empty*."""
        return int(self.socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the inbox; what is queued in it is lost."""
        self.socket.close(linger=0)


class Channels:
    """A process's ZeroMQ context and the channels opened on it.

    ``run_dir`` holds the ipc sockets. One instance per process, used from one thread.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open: list[Sender | Receiver[Any]] = []

    def sender(self, inbox: str, address: str | None = None) -> Sender:
        """Connect to an inbox, by name or (a gateway elsewhere) by address."""
        sender = Sender(self._context, address or inbox_address(self.run_dir, inbox), BOUNDS[kind_of(inbox)])
        self._open.append(sender)
        return sender

    def receiver(self, inbox: str, address: str | None = None) -> Receiver[Any]:
        """Bind an inbox. Raises ``zmq.ZMQError`` (EADDRINUSE) only for tcp addresses: an ipc address is taken over."""
        kind = kind_of(inbox)
        receiver: Receiver[Any] = Receiver(
            self._context, address or inbox_address(self.run_dir, inbox), INBOX_TYPES[kind], BOUNDS[kind]
        )
        self._open.append(receiver)
        return receiver

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
        self._context.term()

"""Channels: order, bounds, frames that are not messages, a receiver that comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq

from common.channels import Channels, Sender
from common.inboxes import BOUNDS, INBOX_TYPES, inbox_address, kind_of
from common.messages import Abort, Heartbeat, TokenBatch

WAIT_S = 5.0


@pytest.fixture
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Channels]:
    opened = Channels(tmp_path_factory.mktemp("c"))
    yield opened
    opened.close()


def beat(progress: int) -> Heartbeat:
    return Heartbeat(role="worker", index=0, generation=0, pid=1, ready=True, progress=progress)


def raw_sender(channels: Channels, inbox: str) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = channels._context
    sock = context.socket(zmq.PUSH)
    sock.setsockopt(zmq.LINGER, 0)
    sock.connect(inbox_address(channels.run_dir, inbox))
    return sock


def test_every_inbox_kind_has_a_bound_and_types() -> None:
    assert set(BOUNDS) == set(INBOX_TYPES)
    kinds = [kind_of(inbox) for inbox in ("worker-3", "scheduler-work", "gateway-a-b")]
    assert kinds == ["worker", "scheduler-work", "gateway"]
    with pytest.raises(ValueError, match="unknown inbox 'cache-0'"):
        kind_of("cache-0")


def test_messages_arrive_in_order(channels: Channels) -> None:
    inbox = channels.receiver("supervisor")
    sender = channels.sender("supervisor")
    for number in range(100):
        assert sender.send(beat(number))
    got: list[int] = []
    while len(got) < 100 and inbox.wait(WAIT_S):
        got += [message.progress for message in inbox.receive(limit=7)]
    assert got == list(range(100))
    assert inbox.receive() == []


def test_a_full_channel_says_so_and_loses_nothing(channels: Channels) -> None:
    sender = Sender(channels._context, inbox_address(channels.run_dir, "supervisor"), bound=8)
    channels._open.append(sender)
    sent = 0
    while sent < 1000 and sender.send(beat(sent)):
        sent += 1
    assert 0 < sent < 1000, "nobody reads: the bound is reached"
    inbox = channels.receiver("supervisor")
    got: list[int] = []
    while len(got) < sent and inbox.wait(WAIT_S):
        got += [message.progress for message in inbox.receive()]
    assert got == list(range(sent))
    deadline = time.monotonic() + WAIT_S
    while not sender.send(beat(0)):  # room is told to the sender by ZeroMQ's own thread
        assert time.monotonic() < deadline, "there is room again"


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"not msgpack at all", b"\x81\xa4type\xa4Nope", b"\x80" * 1000, msgspec.msgpack.encode(beat(1))[:-3],
     msgspec.msgpack.encode(Abort(rid="r", gateway="g")), msgspec.msgpack.encode({"type": "Heartbeat", "role": 7})],
)  # fmt: skip
def test_a_frame_that_is_no_message_is_counted_and_dropped(channels: Channels, frame: bytes) -> None:
    inbox = channels.receiver("supervisor")
    raw = raw_sender(channels, "supervisor")
    raw.send(frame)
    raw.send(msgspec.msgpack.encode(beat(5)))
    got: list[Heartbeat] = []
    while not got and inbox.wait(WAIT_S):
        got += inbox.receive()
    assert [message.progress for message in got] == [5]
    assert inbox.num_bad == 1
    raw.close()


def test_a_receiver_bound_again_takes_the_address_over(channels: Channels) -> None:
    first = channels.receiver("detokenizer")
    sender = channels.sender("detokenizer")
    first.close()
    with closing(Channels(channels.run_dir)) as successor:
        second = successor.receiver("detokenizer")
        deadline = time.monotonic() + WAIT_S
        got: list[TokenBatch] = []
        while not got:  # what was on its way to the dead one is lost; the cursors above this layer send it again
            assert time.monotonic() < deadline and sender.send(TokenBatch(scheduler_generation=3, step=1))
            second.wait(0.05)
            got = second.receive()
        assert got[0].scheduler_generation == 3


def test_wait_any_wakes_for_either(channels: Channels) -> None:
    one, two = channels.receiver("scheduler"), channels.receiver("supervisor")
    assert not Channels.wait_any([one, two], 0.0)
    channels.sender("supervisor").send(beat(1))
    assert Channels.wait_any([one, two], WAIT_S)
    assert one.receive() == [] and len(two.receive()) == 1


def test_sockets_lie_in_the_run_directory(channels: Channels) -> None:
    channels.receiver("scheduler-work")
    assert (Path(channels.run_dir) / "scheduler-work").is_socket()

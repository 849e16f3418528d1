"""Whatever arrives at a socket: what is no message is counted and dropped, what is one harms nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.channels import MAX_MESSAGE_BYTES as _LIMIT
from common.channels import Channels, Receiver
from common.inboxes import BOUNDS, INBOX_TYPES, inbox_address
from tests.property.frames import garbage, mutilated
from tests.wire.samples import SAMPLES

NAMES = {"tokenizer": "tokenizer-0", "worker": "worker-0", "rank": "rank-1", "gateway": "gateway-0",
         "remote-tokenizer": "remote-tokenizer-0"}  # fmt: skip
"""Kinds of inboxes that are numbered."""


class Wire:
    """An inbox and a socket of somebody who may write anything to it."""

    def __init__(self, run_dir: Path, kind: str) -> None:
        self.channels = Channels(run_dir)
        self.kind = kind
        name = NAMES.get(kind, kind)
        self.inbox: Receiver[Any] = self.channels.receiver(name)
        self._context = zmq.Context()
        self.stranger = self._context.socket(zmq.PUSH)
        self.stranger.setsockopt(zmq.LINGER, 0)
        self.stranger.connect(inbox_address(run_dir, name))
        decoder = msgspec.msgpack.Decoder(INBOX_TYPES[kind])
        self.last = next(frame for sample in SAMPLES if _decodes(decoder, frame := msgspec.msgpack.encode(sample)))

    def deliver(self, frames: list[bytes], *, as_parts: bool = False) -> list[Any]:
        """Send the frames (``as_parts``: of one message) and a last good message; what the inbox made of them."""
        if as_parts:
            self.stranger.send_multipart(frames)
        else:
            for frame in frames:
                self.stranger.send(frame)
        self.stranger.send(self.last)
        got: list[Any] = []
        before = self.inbox.num_bad
        while len(got) + self.inbox.num_bad - before <= len(frames):
            assert self.inbox.wait(5.0), "a frame neither arrived nor was counted"
            got += self.inbox.receive()
        return got

    def close(self) -> None:
        self.stranger.close()
        self._context.term()
        self.channels.close()


def _decodes(decoder: Any, frame: bytes) -> bool:
    try:
        decoder.decode(frame)
    except msgspec.ValidationError:
        return False
    return True


@pytest.fixture(scope="module", params=sorted(BOUNDS))
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    one = Wire(tmp_path_factory.mktemp("w"), request.param)
    yield one
    one.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_frame_is_taken_or_counted_and_the_next_message_arrives(wire: Wire, data: st.DataObject) -> None:
    frames = data.draw(st.lists(st.one_of(garbage(), mutilated(INBOX_TYPES[wire.kind])), min_size=1, max_size=8))
    got = wire.deliver(frames)
    assert msgspec.msgpack.encode(got[-1]) == wire.last


def test_parts_of_a_message_are_frames_like_others(wire: Wire) -> None:
    assert len(wire.deliver([b"", b"\xc1", b"x" * 100], as_parts=True)) == 1


def test_an_oversized_frame_is_counted_and_dropped(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.channels.MAX_MESSAGE_BYTES", 1 << 16)
    before = wire.inbox.num_bad
    padded = {"type": "Heartbeat", "padding": b"x" * (1 << 16)}
    assert len(wire.deliver([msgspec.msgpack.encode(padded)])) == 1
    assert wire.inbox.num_bad == before + 1
    assert _LIMIT > 1 << 16

"""The process's loop with real channels: a worker, a detokenizer and a gateway at the other ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.channels import Channels, Waiter
from common.config import SchedulerConfig, ServerConfig
from common.messages import Control, ControlReply, EngineStatus, GatewayAddress, GatewayLease, Heartbeat, TokenBatch
from common.process import ProcessContext
from scheduler_proc.fakes import FakeReader, FakeWorker
from scheduler_proc.main import main
from tests.unit.sched_support import PAGE, VOCAB, expected, request


class SetBack:
    """The module ``time`` after the system's clock was set back by an hour."""

    monotonic, sleep = time.monotonic, time.sleep

    @staticmethod
    def time() -> float:
        return time.time() - 3600.0


P6 = [7, 8, 9, 10, 11, 12]


@dataclass
class Others:
    """Everyone the scheduler talks to, in one thread."""

    channels: Channels
    worker: FakeWorker = field(
        default_factory=lambda: FakeWorker(page_size=PAGE, context_len=512, vocab_size=VOCAB, max_slots=8)
    )
    reader: FakeReader = field(default_factory=FakeReader)
    heard: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inboxes = {
            name: self.channels.receiver(name)
            for name in ("worker-0", "detokenizer", "tokenizer-0", "gateway-0", "supervisor")
        }
        self.to_scheduler = self.channels.sender("scheduler")
        self.results = self.channels.sender("scheduler-work")
        self.results.send(self.worker.ready())  # type: ignore[arg-type]

    def until(self, done: Any, limit_s: float = 20.0) -> None:
        """Play everyone's part until ``done()``."""
        end = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end, "it did not happen"
            Channels.wait_any(list(self.inboxes.values()), 0.05)
            for name, inbox in self.inboxes.items():
                for message in inbox.receive():
                    self.heard.append((name, message))
                    if name == "worker-0":
                        for answer in self.worker.handle(message):
                            self.results.send(answer)  # type: ignore[arg-type]
                    elif isinstance(message, TokenBatch):
                        self.reader.read(message)

    def has(self, inbox: str, kind: type) -> bool:
        return any(name == inbox and isinstance(message, kind) for name, message in self.heard)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Others]:
    config = ServerConfig(scheduler=SchedulerConfig(chunked_prefill_size=64))
    channels = Channels(tmp_path)
    others = Others(channels)
    context = ProcessContext("scheduler", 0, 0, config, tmp_path, Channels(tmp_path))
    threshold = gc.get_threshold()
    thread = threading.Thread(target=main, args=(context,))
    thread.start()
    yield others
    context.request_stop()
    thread.join(10)
    assert not thread.is_alive()
    context.channels.close()
    channels.close()
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_a_request_travels_through(others: Others) -> None:
    address = others.inboxes["gateway-0"].address
    others.to_scheduler.send(GatewayLease(gateway="gateway-0", address=address, generation=0))
    others.to_scheduler.send(request("a", P6, 9))
    others.until(lambda: "a" in others.reader.streams and others.reader.streams["a"].finish)
    assert others.reader.streams["a"].ids == expected(P6, 9)
    others.until(lambda: others.has("gateway-0", EngineStatus))
    assert others.has("tokenizer-0", GatewayAddress) and others.has("detokenizer", GatewayAddress)
    others.to_scheduler.send(Control(request_id="i", gateway="gateway-0", action="info"))
    others.until(lambda: others.has("gateway-0", ControlReply))


def test_it_tells_the_supervisor_when_it_is_ready(others: Others) -> None:
    others.until(lambda: any(name == "supervisor" and beat.ready for name, beat in others.heard))
    beat = next(beat for name, beat in others.heard if name == "supervisor" and beat.ready)
    assert (beat.role, beat.info["max_total_tokens"]) == ("scheduler", 256)
    assert beat.info["worker_crashes_forgiven"] == 0


def test_heartbeats_and_statuses_go_on_when_the_clock_is_set_back(
    others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = GatewayLease(gateway="gateway-0", address=others.inboxes["gateway-0"].address, generation=0)
    others.to_scheduler.send(lease)
    others.until(lambda: any(name == "supervisor" and beat.ready for name, beat in others.heard))
    monkeypatch.setattr("scheduler_proc.main.time", SetBack)
    for name, kind in (("supervisor", Heartbeat), ("gateway-0", EngineStatus)):
        others.heard.clear()
        others.until(lambda name=name, kind=kind: others.has(name, kind), limit_s=5.0)  # type: ignore[misc]


def test_it_sleeps_until_a_batch_is_due_and_no_shorter(tmp_path: Path) -> None:
    channels = Channels(tmp_path)
    inboxes = [channels.receiver("scheduler-work"), channels.receiver("scheduler")]
    waiter = Waiter(inboxes)
    for timeout_s in (0.0, 0.0004, 0.0027):  # whole milliseconds would be 0, 0 and 2
        began = time.monotonic()
        assert waiter.wait(timeout_s) == []
        assert time.monotonic() - began >= timeout_s
    channels.sender("scheduler").send(GatewayLease(gateway="gateway-0", address="ipc://nowhere", generation=0))
    assert waiter.wait(10.0) == inboxes[1:]
    assert len(inboxes[1].receive()) == 1
    channels.close()

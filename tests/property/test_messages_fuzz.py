"""Messages of the right types with any values, as a gateway on another host could send them: nobody falls over.

Through the wire's own encoding, so that what the types refuse is refused. The tokenizer and the scheduler are the
real ones; what the tokenizer makes of a request goes on to the scheduler. And a gateway takes whatever an engine says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.config import ServerConfig
from common.inboxes import INBOX_TYPES
from common.messages import (
    GatewayLease,
    Generate,
    Grammar,
    IdsPrompt,
    SamplingParams,
    TextParams,
    Tokenized,
    pack_i32,
)
from gateway.engine import Engine
from gateway.metrics import GatewayMetrics
from gateway.request import Exchange, OpenRequest
from scheduler_proc.main import Mail
from tests.property.frames import messages
from tests.unit.sched_support import Rig
from tests.unit.test_tokenizer_server import Bench

FUZZ = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def over_the_wire(batch: list[Any], kind: str) -> list[Any]:
    """What of the messages the receiving end would hand on."""
    decoder = msgspec.msgpack.Decoder(INBOX_TYPES[kind])
    arrived = []
    for message in batch:
        try:
            arrived.append(decoder.decode(msgspec.msgpack.encode(message)))
        except (msgspec.ValidationError, msgspec.DecodeError, OverflowError, UnicodeEncodeError):
            continue  # dropped there, or not even to be sent
    return arrived


def for_the_fake_worker(message: Any) -> Any:
    """It reads a grammar's text as the number of ids that the grammar forces."""
    if not isinstance(message, Tokenized) or message.grammar is None:
        return message
    grammar = msgspec.structs.replace(message.grammar, text=str(len(message.grammar.text) % 4))
    return msgspec.structs.replace(message, grammar=grammar)


CONSTRAINED = Generate(
    rid="a", gateway="g@x", prompt=IdsPrompt(ids=pack_i32([1, 2])), sampling=SamplingParams(max_tokens=8),
    text=TextParams(), grammar=Grammar(kind="regex", text="[a-z]+"),
)  # fmt: skip


@FUZZ
@given(st.lists(messages(INBOX_TYPES["remote-tokenizer"]), max_size=6))
@example([CONSTRAINED])
def test_tokenizer_and_scheduler_survive_any_request(batch: list[Any]) -> None:
    bench, rig = Bench(), Rig()
    rig.step(GatewayLease(gateway="gateway-0", address="ipc:///x/gateway-0", generation=0))
    for message in over_the_wire(batch, "remote-tokenizer"):
        bench.server.handle(message)
    bench.finish_jobs()
    bench.outbox.flush(0.0)
    bench.outbox.flush(100.0)
    passed_on = [m for m in bench.scheduler.sent if isinstance(m, Tokenized) or type(m).__name__ == "Abort"]
    rig.step(*map(for_the_fake_worker, over_the_wire(passed_on, "scheduler")))
    for _ in range(20):
        rig.turn()  # checks the invariants each time


@FUZZ
@given(st.lists(messages(INBOX_TYPES["remote-scheduler"]), max_size=8))
def test_the_scheduler_survives_any_lease_and_order(batch: list[Any]) -> None:
    rig = Rig()
    rig.step(*over_the_wire(batch, "remote-scheduler"))
    for _ in range(5):
        rig.turn()


@FUZZ
@given(st.lists(messages(INBOX_TYPES["remote-scheduler"]), max_size=8))
def test_no_lease_makes_the_scheduler_connect_where_it_should_not(batch: list[Any]) -> None:
    with_address = [msgspec.structs.replace(m, address=m.address or "tcp://x") if isinstance(m, GatewayLease) else m
                    for m in over_the_wire(batch, "remote-scheduler")]  # fmt: skip
    channels = _Nowhere()
    mail = Mail(channels, 1)  # type: ignore[arg-type]
    mail.inboxes[0].arrived = with_address  # type: ignore[attr-defined]
    handed_on = mail.receive()
    assert not [m for m in handed_on if isinstance(m, GatewayLease)], "no such address is in the run directory"
    assert channels.connected == set()


class _Inbox:
    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.socket = object()
        """Registered with a poller, never polled."""

    def receive(self) -> list[Any]:
        return self.arrived


class _Nowhere:
    """Channels that note who is connected to beside the engine's own processes."""

    run_dir = "/run/q"

    def __init__(self) -> None:
        self.connected: set[str] = set()

    def receiver(self, *_: Any) -> _Inbox:
        return _Inbox()

    def sender(self, inbox: str, address: str | None = None) -> None:
        if inbox.startswith("gateway"):
            self.connected.add(str(address))


def _gateway(channels: Any) -> tuple[Engine, OpenRequest]:
    engine = Engine(channels, ServerConfig(), "gateway-0", GatewayMetrics("gateway-0"))
    exchange = Exchange(0.0, 1 << 20)
    generate = Generate(
        rid="a", gateway="gateway-0", prompt=IdsPrompt(ids=pack_i32([1])), sampling=SamplingParams(), text=TextParams()
    )
    record = OpenRequest(generate, exchange, 0)
    record.tokenizer = 0
    exchange.records.append(record)
    engine.open["a"] = record
    engine.exchanges.add(exchange)
    return engine, record


@FUZZ
@given(st.lists(messages(INBOX_TYPES["gateway"]), max_size=6))
def test_a_gateway_survives_any_answer(batch: list[Any]) -> None:
    engine, record = _gateway(_Silent())
    arrived = over_the_wire(batch, "gateway")
    engine._inbox.arrived = arrived  # type: ignore[attr-defined]

    async def take() -> None:
        engine.drain()
        engine.tick(1.0)

    asyncio.run(take())
    assert record.finish is not None or engine.open.get("a") is record


class _Silent:
    """Channels into which everything goes and out of which comes what the test put there."""

    def receiver(self, inbox: str) -> Any:
        found = _Box()
        found.address = inbox
        return found

    def sender(self, _: str) -> Any:
        return _Box()


class _Box:
    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.address = ""
        self.num_bad = 0

    def send(self, _: Any) -> bool:
        return True

    def receive(self, limit: int = 1024) -> list[Any]:
        out, self.arrived = self.arrived[:limit], self.arrived[limit:]
        return out

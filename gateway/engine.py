"""The gateway's side of the engine's channels: submit, abort, resubmit, and dispatch what arrives.

Everything runs on the event loop's thread. ZeroMQ's descriptor is edge triggered, so ``drain``
reads until the inbox is empty (in turns, so that a flood does not stop the loop); ``tick`` drains
too, in case an edge was missed, and repeats what could not be sent: aborts until their ending
arrives, resubmissions that met a full channel.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib

from common.channels import Channels
from common.config import ServerConfig
from common.errors import RequestError
from common.messages import (
    Abort,
    ControlReply,
    EngineStatus,
    ErrorInfo,
    Finish,
    GatewayLease,
    Message,
    Rejected,
    TextBatch,
    TextReply,
    TextRow,
    TokenizerReady,
)
from common.trace import Finished, TraceWriter
from common.trace_channels import describe_arrival
from gateway.fleet import Fleet
from gateway.metrics import GatewayMetrics
from gateway.questions import Questions
from gateway.request import Delta, Exchange, OpenRequest

log = logging.getLogger(__name__)

TICK_S = 0.2
"""How often ``tick`` is called while something is open."""
DRAIN_LIMIT = 64
ABORT_REPEAT_S = 1.0
LEASE_S = 1.0
STALL_S = 60.0
"""A client that takes nothing at all for this long while we have something for it is cut off."""
SILENCE_LIMIT_S = 30.0
"""New requests are taken, and wait, for so long without a word of the scheduler: a dead one is replaced within a
second or two, a stopped one is found out within ten."""
_MAX_GAPS = 3


class Engine:
    """The open requests of one gateway and its channels to the engine. One instance per process."""

    def __init__(
        self, channels: Channels, config: ServerConfig, gateway: str, metrics: GatewayMetrics, generation: int = 0
    ) -> None:
        self.config = config
        self.gateway = gateway
        self.metrics = metrics
        self.open: dict[str, OpenRequest] = {}
        self.exchanges: set[Exchange] = set()
        self.fleet = Fleet()
        self.model: TokenizerReady | None = None
        """What a tokenizer said of the model; None until one is ready."""
        self.draining = False
        self.num_turns = 0
        """Progress for the heartbeat."""
        self.last_output = 0.0
        """time.monotonic() of the last token of any request."""
        self._generation = generation
        self._inbox = channels.receiver(gateway)
        self._tokenizers = [channels.sender(f"tokenizer-{i}") for i in range(config.http.tokenizers)]
        self._scheduler = channels.sender("scheduler")
        self.questions = Questions(gateway, self._scheduler, self._tokenizers, self.check_accepting)
        self.trace: TraceWriter | None = None
        """Set by the process when ``--trace`` is on."""
        self._touched: dict[Exchange, None] = {}
        """Exchanges that have something new of the messages being taken in, in order."""
        self._next_lease = 0.0

    # ---------------------------------------------------------------- what a request may ask

    def check_accepting(self) -> TokenizerReady:
        """What is known of the model, if new requests are taken.

        While a part of the engine is being restarted they are, and wait for it: in the scheduler's queue when the
        worker is away, in the channels when another part is, each within its bound.

        Raises:
            RequestError: 503 with Retry-After: draining, starting for the first time, or silent for too long.
        """
        status = self.fleet.status
        if self.draining or (status is not None and status.draining):
            raise RequestError("the server is shutting down", status=503, code="draining", retry_after_s=5)
        if self.model is None or not self.fleet.was_ready:
            raise RequestError("the engine is not ready yet", status=503, code="not_ready", retry_after_s=1)
        if time.monotonic() - self.fleet.heard > SILENCE_LIMIT_S:
            raise RequestError("the engine does not answer", status=503, code="engine_silent", retry_after_s=1)
        return self.model

    def check_available(self) -> None:
        """Every part of the engine answers, as far as is known.

        Raises:
            RequestError: 503 as ``check_accepting``, and also while a part is being restarted.
        """
        self.check_accepting()
        if not self.fleet.is_fresh(time.monotonic()):
            raise RequestError("the engine does not answer", status=503, code="engine_silent", retry_after_s=1)
        if self.fleet.status is None or not self.fleet.status.ready:
            raise RequestError("the engine is not ready", status=503, code="not_ready", retry_after_s=1)

    def submit(self, exchange: Exchange) -> None:
        """Send every generation of an exchange to its tokenizer.

        When the first does not fit into the channel nothing is sent; later ones wait for the next tick.

        Raises:
            RequestError: 503 (see ``check_accepting``; or the channel is full), 409 for a rid that is open.
        """
        self.check_accepting()
        for record in exchange.records:
            if record.rid in self.open:
                raise RequestError(f"the rid {record.rid!r} is already in use", status=409, param="rid")
        for position, record in enumerate(exchange.records):
            record.tokenizer = zlib.crc32(record.rid.encode()) % len(self._tokenizers)
            sent = self._tokenizers[record.tokenizer].send(record.generate)
            if not sent and position == 0:
                raise RequestError(
                    "the server is overloaded: the tokenizer's queue is full",
                    status=503,
                    code="overloaded",
                    retry_after_s=1,
                )
            record.unsent = not sent
            self.open[record.rid] = record
            if self.trace is not None:
                self.trace.write(describe_arrival(record.generate, record.generate.received))
        self.exchanges.add(exchange)

    def release(self, exchange: Exchange, reason: str = "client disconnected") -> None:
        """The exchange is over: abort what of it still runs. Safe to call at any time."""
        self.exchanges.discard(exchange)
        for record in exchange.records:
            # By identity: an exchange refused for its rid must not end the request that has it.
            if self.open.get(record.rid) is record and not record.aborting:
                record.aborting = True
                record.abort_reason = reason
                self.metrics.num_aborted += not record.internal
                self._send_abort(record, time.monotonic())

    def fail_all(self, error: ErrorInfo) -> None:
        """End every open request with an error (the drain time is over)."""
        for record in list(self.open.values()):
            if not record.aborting:
                self._fail(record, error)

    def has_open(self, rid: str) -> bool:
        """Whether a request of this rid, or a call of this id, is open here and not given up."""
        return any(
            rid in (record.rid, record.generate.group) and not record.aborting for record in self.open.values()
        )

    # ---------------------------------------------------------------- what arrives

    def drain(self) -> None:
        """Take in what has arrived; after ``DRAIN_LIMIT`` messages the loop's other tasks get their turn."""
        messages = self._inbox.receive(DRAIN_LIMIT)
        if len(messages) == DRAIN_LIMIT:
            asyncio.get_running_loop().call_soon(self.drain)
        for message in messages:
            self._take(message)
        if self._touched:
            touched, self._touched = self._touched, {}
            for exchange in touched:
                exchange.deliver()
        self.num_turns += 1

    def tick(self, now: float) -> None:
        """Do what time asks for: leases, repeated aborts, unsent resubmissions, stalled clients."""
        self.drain()
        if now >= self._next_lease:
            self._next_lease = now + LEASE_S
            self.send_lease()
        for record in list(self.open.values()):
            if record.aborting:
                if now >= record.abort_at:
                    self._send_abort(record, now)
            elif record.is_overdue(time.time()):
                words = "the request's deadline has passed before the engine took it up"
                self._fail(record, ErrorInfo(status=504, message=words, code="deadline", retry_after_s=1))
            elif record.unsent:
                record.unsent = not self._tokenizers[record.tokenizer].send(record.message())
        for exchange in list(self.exchanges):
            if exchange.sending_since and now - exchange.sending_since > STALL_S and exchange.cut_off is not None:
                exchange.leave()
                exchange.cut_off()

    def tick_in_s(self, now: float) -> float:
        """How long ``tick`` has nothing to do, unless something is opened meanwhile."""
        return TICK_S if self.open or self.exchanges else max(0.0, self._next_lease - now)

    def send_lease(self, *, closing: bool = False) -> None:
        """Tell the scheduler that this gateway lives, and where. A full channel: the next one tells it."""
        self._scheduler.send(
            GatewayLease(
                gateway=self.gateway, address=self._inbox.address, generation=self._generation, closing=closing
            )
        )

    def fileno(self) -> int:
        """The inbox's edge-triggered descriptor, for ``loop.add_reader``."""
        return self._inbox.fileno()

    def update_gauges(self) -> None:
        """Bring the metrics' gauges up to date."""
        self.metrics.num_open = len(self.open)
        self.metrics.num_bad_frames = self._inbox.num_bad

    # ---------------------------------------------------------------- inside

    def _take(self, message: Message) -> None:
        if isinstance(message, TextBatch):
            now = time.monotonic()
            for row in message.rows:
                self._take_row(row, now)
        elif isinstance(message, EngineStatus):
            self._take_status(message)
        elif isinstance(message, Rejected):
            self._take_rejected(message)
        elif isinstance(message, (TextReply, ControlReply)):
            self.questions.take(message)
        elif isinstance(message, TokenizerReady):
            self.model = message

    def _take_row(self, row: TextRow, now: float) -> None:
        record = self.open.get(row.rid)
        if record is None:
            return
        if record.aborting:
            # Whatever attempt it ends: our Abort follows our last Generate through the same channels.
            if row.finish is not None:
                self._end(record, row.finish)
            return
        if row.attempt != record.attempt:
            return
        record.heard = True
        known = record.num_ids
        exchange = record.exchange
        delta = record.apply_next(row)
        if delta is None:
            if record.has_gap(row):
                self._heal(record)
                return
            delta = record.apply(row)
            if record.finish is not None:
                self._end(record, record.finish)
        if row.ids:
            self.last_output = now
            if not record.internal:
                self.metrics.num_output_tokens += record.num_ids - known  # after a resubmission some come again
        if delta is not None:
            exchange.add(delta)
            self._touched[exchange] = None
        elif row.accepted is not None:
            self._touched[exchange] = None

    def _heal(self, record: OpenRequest) -> None:
        """Something before a row never arrived: ask for everything again, a few times at most."""
        record.num_gaps += 1
        log.warning("%s: output is missing before id %d; submitting it again", record.rid, record.num_ids)
        if record.num_gaps <= _MAX_GAPS:
            self._resubmit(record)
            return
        self._fail(record, ErrorInfo(status=500, message="part of the output was lost inside the server"))

    def _fail(self, record: OpenRequest, error: ErrorInfo) -> None:
        """Tell the client an error of ours, and the engine to stop."""
        record.finish = Finish(reason="error", error=error)
        record.exchange.push(Delta(record.choice, "", b"", [], [], record.finish))
        record.aborting = True
        record.abort_reason = error.message
        self._send_abort(record, time.monotonic())

    def _take_rejected(self, message: Rejected) -> None:
        record = self.open.get(message.rid)
        if record is None or (message.attempt != record.attempt and not record.aborting):
            return
        finish = Finish(reason="error", error=message.error)
        record.finish = finish
        self._end(record, finish)
        record.exchange.push(Delta(record.choice, "", b"", [], [], finish))

    def _end(self, record: OpenRequest, finish: Finish) -> None:
        del self.open[record.rid]
        record.finish = finish
        if self.trace is not None:
            self.trace.write(Finished(time.time(), record.rid, finish.reason, record.num_ids))

    def _take_status(self, status: EngineStatus) -> None:
        lost = self.fleet.take_status(status, time.monotonic())
        if not lost.everything and not lost.tokenizers:
            return
        records = [
            record
            for record in self.open.values()
            if not record.aborting
            and (lost.everything or (record.tokenizer in lost.tokenizers and not record.heard))
        ]
        if records:
            log.warning("%s; submitting %d open requests again", lost.why, len(records))
        records.sort(key=lambda record: not record.ids)  # streams that pause before the prompts of those never begun
        for record in records:
            self._resubmit(record)

    def _resubmit(self, record: OpenRequest) -> None:
        record.attempt += 1
        record.heard = False
        self.metrics.num_resubmitted += 1
        if self.trace is not None:
            self.trace.write(describe_arrival(record.message(), time.time()))
        record.unsent = not self._tokenizers[record.tokenizer].send(record.message())

    def _send_abort(self, record: OpenRequest, now: float) -> None:
        if record.unsent and record.attempt == 0:
            # It never reached the engine, so there is nothing to end there.
            self._end(record, Finish(reason="abort"))
            return
        message = Abort(rid=record.rid, gateway=self.gateway, reason=record.abort_reason)
        sent = self._tokenizers[record.tokenizer].send(message)
        record.abort_at = now + (ABORT_REPEAT_S if sent else TICK_S)

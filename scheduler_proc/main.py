"""The scheduler process: channels and clock around ``Scheduler.step``."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from typing import Any

import msgspec

from common.channels import Channels, Receiver, Sender, Waiter
from common.errors import InvariantError
from common.inboxes import inbox_address, is_remote, remote_address
from common.messages import Control, EngineStatus, GatewayAddress, GatewayLease
from common.process import ProcessContext
from scheduler_proc.record import StepRecorder
from scheduler_proc.scheduler import Scheduler, StepOutput

log = logging.getLogger(__name__)

RETRY_S = 0.005
"""How soon a full channel is tried again."""
FORGIVEN = "worker_crashes_forgiven"
"""Key of ``Heartbeat.info``: worker crashes laid to one request's charge, which the supervisor does not count."""
NUM_OPEN = "num_open"
"""Key of ``Heartbeat.info``: requests without an ending, those of gateways on other hosts too."""
CHECK_S = 10.0
"""The invariant is checked when idle, at most this often, and only if there was work since."""


class Clock:
    """``time.time()``, but as if the system's clock were never set back: that must neither undo what has expired nor
    stop what is done every so often until the clock has caught up."""

    def __init__(self) -> None:
        self._offset = float("-inf")

    def __call__(self) -> float:
        self._offset = max(self._offset, time.time() - time.monotonic())
        return time.monotonic() + self._offset


class Outbox:
    """A channel with the messages it has not taken yet, in order. They are few: see ``full``."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.unsent: deque[bytes] = deque()

    @property
    def full(self) -> bool:
        """Something is left from an earlier step; make no more for it."""
        return bool(self.unsent)

    def put(self, frame: bytes) -> None:
        """Send, or keep until the channel takes it."""
        if self.unsent or not self.sender.send_bytes(frame):
            self.unsent.append(frame)

    def flush(self) -> None:
        """Send what the channel takes."""
        while self.unsent and self.sender.send_bytes(self.unsent[0]):
            self.unsent.popleft()


class Mail:
    """The scheduler's channels: two inboxes, a third for other hosts, and an outbox for each process it writes to."""

    def __init__(self, channels: Channels, num_tokenizers: int, engine_listen: str = "") -> None:
        self._channels = channels
        self._encoder = msgspec.msgpack.Encoder()
        self.inboxes: list[Receiver[Any]] = [channels.receiver("scheduler-work"), channels.receiver("scheduler")]
        self.worker = Outbox(channels.sender("worker-0"))
        self.tokenizers = [Outbox(channels.sender(f"tokenizer-{i}")) for i in range(num_tokenizers)]
        self.detokenizer = Outbox(channels.sender("detokenizer"))
        self.gateways: dict[str, Outbox] = {}
        if engine_listen:
            address = remote_address(engine_listen, "scheduler")
            self.inboxes.append(channels.receiver("remote-scheduler", address, self._is_from_elsewhere))
        self._waiter = Waiter(self.inboxes)
        self._ready = self.inboxes
        """Those that have something, as ``wait`` found."""

    def receive(self) -> list[Any]:
        """Everything that has arrived, the worker's results first: they free what others wait for."""
        messages: list[Any] = []
        for inbox in self.inboxes:
            if inbox not in self._ready:
                continue
            here = inbox not in self.inboxes[2:]
            for message in inbox.receive():
                if isinstance(message, GatewayLease):
                    if here and not self._is_local(message):
                        continue
                    self._open_gateway(message)
                messages.append(message)
        return messages

    def _is_local(self, lease: GatewayLease) -> bool:
        """A gateway of this host listens in the run directory; whatever else a lease says is not connected to."""
        name = lease.address.rpartition("/")[2]
        local = name.startswith("gateway-") and lease.address == inbox_address(self._channels.run_dir, name)
        if not local:
            log.warning("dropped the lease of %s: %r is no inbox of the run directory", lease.gateway, lease.address)
        return local

    def _is_from_elsewhere(self, message: GatewayLease | Control) -> bool:
        """What comes from another host speaks for a gateway there, at an address whose key is known."""
        if isinstance(message, GatewayLease):
            return self._channels.is_gateway_elsewhere(message.gateway, message.address)
        return is_remote(message.gateway)

    def _open_gateway(self, lease: GatewayLease) -> None:
        outbox = self.gateways.get(lease.gateway)
        if outbox is not None and (outbox.sender.address != lease.address or lease.closing):
            outbox.sender.close(0)
            del self.gateways[lease.gateway]
            outbox = None
        if outbox is None and not lease.closing:
            name = lease.gateway if lease.gateway.startswith("gateway-") else f"gateway-{lease.gateway}"
            self.gateways[lease.gateway] = Outbox(self._channels.sender(name, lease.address))

    def send(self, out: StepOutput) -> None:
        """Send what a step wants sent, after what is still unsent."""
        for order in out.to_worker:
            self.worker.put(self._encoder.encode(order))
        if out.addresses:
            self._tell_addresses(out.addresses)
        if out.tokens is not None:
            self.detokenizer.put(self._encoder.encode(out.tokens))
        for gateway, reply in out.replies:
            if gateway in self.gateways:
                self.gateways[gateway].put(self._encoder.encode(reply))
        if out.status is not None:
            self._broadcast(out.status)
        for outbox in self._full():
            outbox.flush()

    def _tell_addresses(self, addresses: list[GatewayAddress]) -> None:
        for address in addresses:
            frame = self._encoder.encode(address)
            for outbox in [*self.tokenizers, self.detokenizer]:
                outbox.put(frame)
        last_word = {address.gateway: address.gone for address in addresses}
        for gateway in [name for name, gone in last_word.items() if gone and name in self.gateways]:
            self.gateways.pop(gateway).sender.close(0)

    def _broadcast(self, status: EngineStatus) -> None:
        frame = self._encoder.encode(status)
        for outbox in self.gateways.values():
            if not outbox.full:
                outbox.sender.send_bytes(frame)

    def _full(self) -> list[Outbox]:
        outboxes = (self.worker, *self.tokenizers, self.detokenizer, *self.gateways.values())
        return [outbox for outbox in outboxes if outbox.unsent]

    @property
    def unsent(self) -> bool:
        """Some channel is full."""
        return bool(self._full())

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message arrives or the time has passed."""
        self._ready = self._waiter.wait(timeout_s)


def main(context: ProcessContext) -> None:
    """Receive, step, send, sleep; until told to stop."""
    config = context.config
    scheduler = Scheduler(config, context.generation)
    scheduler.state.run = context.run_dir.name
    mail = Mail(context.channels, config.http.tokenizers, config.hosts.engine_listen)
    tune_gc()
    progress = 0
    clock = Clock()
    last_check, checked_step = clock(), 0
    told_ready = False
    recorder = None if context.trace is None else StepRecorder(context.trace, scheduler)
    while not context.stopping:
        messages = mail.receive()
        now = clock()
        worker_full, detokenizer_full = mail.worker.full, mail.detokenizer.full
        if recorder is not None:
            recorder.before()
        out = scheduler.step(messages, now, worker_full=worker_full, detokenizer_full=detokenizer_full, max_batches=1)
        mail.send(out)
        if recorder is not None:
            recorder.after(messages, now, out, worker_full=worker_full, detokenizer_full=detokenizer_full)
        for level, words in out.log:
            log.log(logging.getLevelNamesMapping()[level.upper()], "%s", words)
        progress += 1
        if not context.beat_in_s or scheduler.ready != told_ready:
            told_ready = scheduler.ready
            context.beat(ready=told_ready, progress=progress, info=_info(scheduler))
        if scheduler.idle and now - last_check > CHECK_S and scheduler.state.step != checked_step:
            last_check, checked_step = now, scheduler.state.step
            _check(scheduler)
        timeout_s = min(max(out.wake_at - clock(), 0.0), context.beat_in_s)
        mail.wait(RETRY_S if mail.unsent else timeout_s)


def tune_gc() -> None:
    """Collect garbage rarely: nearly nothing here is cyclic, and a collection walks every node of the tree."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def _info(scheduler: Scheduler) -> dict[str, Any]:
    """For the supervisor: the start-up table, and crashes it should not count as the worker's fault."""
    pool = scheduler.state.pool
    info: dict[str, Any] = {FORGIVEN: scheduler.state.excused_crashes, NUM_OPEN: len(scheduler.state.reqs)}
    if pool is not None:
        info |= {
            "num_pages": pool.allocator.num_pages,
            "page_size": pool.page_size,
            "max_total_tokens": pool.max_tokens,
            "max_running_requests": pool.max_running,
        }
    return info


def _check(scheduler: Scheduler) -> None:
    """A leak must not stop a server; it must not stay unseen either."""
    try:
        scheduler.check_invariants()
    except InvariantError as error:
        scheduler.state.metrics.num_invariant_failures_total += 1
        log.error("bookkeeping is wrong, please report this: %s", error)

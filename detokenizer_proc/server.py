"""The detokenizer's state: live requests, and what has to be said about them.

This is the one place where an accepted request ends: at the scheduler's finish, at a stop string, whichever
comes first; what arrives for it afterwards is dropped.
"""

from __future__ import annotations

import logging
from collections import deque

from common.messages import BeginOutput, GatewayAddress, GatewayStuck, StopHit, TokenBatch, TokenRow
from detokenizer_proc.decoding import Vocabulary
from detokenizer_proc.outbox import Outbox, SendsMessages
from detokenizer_proc.stream import Stream

log = logging.getLogger(__name__)


class Detokenizer:
    """Handles every message of the detokenizer's inbox; ``flush`` sends what came of them."""

    def __init__(self, vocabulary: Vocabulary, outbox: Outbox, scheduler: SendsMessages) -> None:
        self._vocabulary = vocabulary
        self._outbox = outbox
        self._scheduler = scheduler
        self._streams: dict[str, Stream] = {}
        self._reports: deque[StopHit | GatewayStuck] = deque()
        self._scheduler_generation = -1
        self.num_handled = 0

    @property
    def num_live(self) -> int:
        """Requests without an ending."""
        return len(self._streams)

    @property
    def waiting(self) -> bool:
        """A full channel keeps something from being sent."""
        return bool(self._reports) or self._outbox.waiting

    def handle(self, message: TokenBatch | GatewayAddress) -> None:
        """Take in one message."""
        self.num_handled += 1
        if isinstance(message, GatewayAddress):
            # That a gateway is gone comes with a TokenBatch too, in order with its successor's requests.
            if not message.gone:
                self._outbox.move(message.gateway, message.address)
            return
        if not self._is_current(message.scheduler_generation):
            return
        for gateway in message.gone_gateways:
            self._drop_gateway(gateway)
        for begin in message.begins:
            self._begin(begin)
        for row in message.rows:
            self._advance(row)
        for refused in message.refused:
            self._outbox.box(refused.gateway).refuse(refused)

    def _is_current(self, generation: int) -> bool:
        """A new scheduler knows none of the requests it has not begun itself: their gateways submit them again."""
        if generation < self._scheduler_generation:
            return False
        if generation > self._scheduler_generation:
            if self._streams:
                log.info("scheduler generation %d: dropped %d requests of the one before", generation, self.num_live)
            self._streams.clear()
            self._scheduler_generation = generation
        return True

    def _begin(self, begin: BeginOutput) -> None:
        known = self._streams.get(begin.rid)
        if known is not None and begin.attempt < known.begin.attempt:
            return
        stream = self._streams[begin.rid] = Stream(begin, self._vocabulary)
        row = stream.new_row()
        row.accepted = (begin.prompt_len, begin.cached_len)
        self._outbox.box(begin.gateway).rows[begin.rid] = row

    def _advance(self, row: TokenRow) -> None:
        stream = self._streams.get(row.rid)
        if stream is None or row.attempt != stream.begin.attempt:
            return  # ended here already, or of an attempt that is over
        box = self._outbox.box(stream.begin.gateway)
        if row.rid not in box.rows and stream.advance_plain(row, box.rows):
            return
        out = box.pending(row.rid)
        if out is None:
            out = box.rows[row.rid] = stream.new_row()
        hit = stream.advance(row, out)
        if hit is not None:
            self._reports.append(hit)
        if stream.ended:
            del self._streams[row.rid]

    def flush(self, now: float) -> None:
        """Send everything that the channels take; ``now`` is a monotonic time in seconds."""
        for gateway in self._outbox.flush(now):
            log.warning("%s takes no text any more: declared gone", gateway)
            self._drop_gateway(gateway)
            self._reports.append(GatewayStuck(gateway=gateway))
        while self._reports and self._scheduler.send(self._reports[0]):
            self._reports.popleft()

    def _drop_gateway(self, gateway: str) -> None:
        """Forget a gateway's requests, without endings: nobody is there to read them."""
        for rid in [rid for rid, stream in self._streams.items() if stream.begin.gateway == gateway]:
            del self._streams[rid]
        self._outbox.drop(gateway)

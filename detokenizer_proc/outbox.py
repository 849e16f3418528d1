"""What the gateways have not been sent yet, and how it reaches them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from common.inboxes import GATEWAY_STUCK_S
from common.messages import Message, RefusedRow, TextBatch, TextRow
from detokenizer_proc.rows import PendingRow

log = logging.getLogger(__name__)

_MAX_ROWS = 4096
"""Rows in one message; the rest follows in the next."""


class SendsMessages(Protocol):
    """The part of ``common.channels.Sender`` that is used."""

    def send(self, message: Message) -> bool:
        """False, with nothing queued, when the channel is full."""
        ...

    def close(self) -> None:
        """Close the channel."""
        ...


class GatewayBox:
    """One gateway's undelivered rows. One message carries everything that has come together."""

    def __init__(self, sender: SendsMessages, generation: int) -> None:
        self.sender = sender
        self._generation = generation
        self.rows: dict[str, PendingRow | TextRow] = {}
        """By rid: a request's cursor. A ``TextRow`` is one that was complete at once."""
        self._refused: dict[tuple[str, int], TextRow] = {}
        self._full_since: float | None = None

    def refuse(self, row: RefusedRow) -> None:
        """Pass on a refusal; the same one again, while it waits, changes nothing."""
        self._refused[row.rid, row.attempt] = TextRow(
            rid=row.rid, attempt=row.attempt, index=0, ids=b"", text_offset=0, text="", finish=row.finish
        )

    def pending(self, rid: str) -> PendingRow | None:
        """A request's row that waits, to be added to; None when none does."""
        row = self.rows.get(rid)
        if isinstance(row, TextRow):
            row = self.rows[rid] = PendingRow.from_wire(row)
        return row

    @property
    def waiting(self) -> bool:
        """Something is to be sent."""
        return bool(self.rows or self._refused)

    def flush(self, now: float) -> bool:
        """Send what there is; False when the channel has been full for ``GATEWAY_STUCK_S``."""
        while self.rows or self._refused:
            rows = self.rows if len(self.rows) <= _MAX_ROWS else dict(islice(self.rows.items(), _MAX_ROWS))
            batch = [
                row if isinstance(row, TextRow) else row.to_wire()
                for row in rows.values()
                if isinstance(row, TextRow) or not row.empty
            ]
            batch += self._refused.values()
            if batch and not self.sender.send(TextBatch(detokenizer_generation=self._generation, rows=batch)):
                self._full_since = now if self._full_since is None else self._full_since
                return now - self._full_since <= GATEWAY_STUCK_S
            if rows is self.rows:
                rows.clear()
            for rid in rows:
                del self.rows[rid]
            self._refused.clear()
        self._full_since = None
        return True


class Outbox:
    """All gateways. ``connect(gateway, address)`` opens a channel, ``local_address`` says where a gateway
    listens that was not announced."""

    def __init__(
        self,
        connect: Callable[[str, str], SendsMessages],
        local_address: Callable[[str], str],
        generation: int,
    ) -> None:
        self._connect = connect
        self._local_address = local_address
        self._generation = generation
        self._boxes: dict[str, GatewayBox] = {}
        self._addresses: dict[str, str] = {}

    def box(self, gateway: str) -> GatewayBox:
        """A gateway's box; its channel is opened when it is first needed."""
        box = self._boxes.get(gateway)
        if box is None:
            sender = self._connect(gateway, self._address(gateway))
            box = self._boxes[gateway] = GatewayBox(sender, self._generation)
        return box

    def _address(self, gateway: str) -> str:
        return self._addresses.get(gateway) or self._local_address(gateway)

    def move(self, gateway: str, address: str) -> None:
        """A gateway listens elsewhere; what it was not sent stays."""
        if self._address(gateway) == address:
            return  # a second socket to the same place would let rows overtake each other
        self._addresses[gateway] = address
        if (box := self._boxes.get(gateway)) is not None:
            box.sender.close()
            box.sender = self._connect(gateway, address)

    def drop(self, gateway: str) -> None:
        """A gateway is gone, and what it was not sent with it."""
        if (box := self._boxes.pop(gateway, None)) is not None:
            box.sender.close()
        self._addresses.pop(gateway, None)

    def flush(self, now: float) -> list[str]:
        """Send what there is to whoever takes it; returns the gateways that have been stuck for too long."""
        return [name for name, box in self._boxes.items() if not box.flush(now)]

    @property
    def waiting(self) -> bool:
        """Something could not be sent yet."""
        return any(box.waiting for box in self._boxes.values())

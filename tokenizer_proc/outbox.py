"""What the tokenizer still has to hand out: kept in order until the channels take it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from common.inboxes import GATEWAY_STUCK_S
from common.messages import Message

log = logging.getLogger(__name__)


class SendsMessages(Protocol):
    """The part of ``common.channels.Sender`` that is used."""

    def send(self, message: Message) -> bool:
        """False, with nothing queued, when the channel is full."""
        ...

    def close(self) -> None:
        """Close the channel."""
        ...


class Outbox:
    """Messages to the scheduler and to the gateways.

    ``connect(gateway, address)`` opens a channel, ``local_address`` says where a gateway listens that was
    not announced: nothing ("") for one on another host, whose messages wait until it is. While
    ``blocked`` is true the owner must not take in new requests.
    """

    def __init__(
        self,
        scheduler: SendsMessages,
        connect: Callable[[str, str], SendsMessages],
        local_address: Callable[[str], str],
    ) -> None:
        self._scheduler = scheduler
        self._connect = connect
        self._local_address = local_address
        self._addresses: dict[str, str] = {}
        self._to_scheduler: deque[Message] = deque()
        self._gateways: dict[str, SendsMessages] = {}
        self._to_gateways: dict[str, deque[Message]] = {}
        self._full_since: dict[str, float] = {}

    @property
    def blocked(self) -> bool:
        """The scheduler's channel is full: something waits for it."""
        return bool(self._to_scheduler)

    @property
    def idle(self) -> bool:
        """Nothing waits for any channel."""
        return not self._to_scheduler and not self._to_gateways

    @property
    def gateways(self) -> list[str]:
        """The gateways known so far."""
        return list(self._gateways)

    def knows(self, gateway: str) -> bool:
        """A channel to this gateway is open."""
        return gateway in self._gateways

    def open_gateway(self, gateway: str, address: str = "") -> None:
        """Open the channel to a gateway, or move it to another address."""
        address = address or self._local_address(gateway)
        if not address:
            return
        old = self._gateways.get(gateway)
        if old is not None and self._addresses[gateway] == address:
            return
        if old is not None:
            old.close()
        self._addresses[gateway] = address
        self._gateways[gateway] = self._connect(gateway, address)

    def close_gateway(self, gateway: str) -> None:
        """A gateway is gone. What waits for it stays until it is given up: a successor under the same name
        may be there already, and news of the two come by different ways."""
        if gateway not in self._to_gateways and (old := self._gateways.pop(gateway, None)) is not None:
            old.close()
            self._addresses.pop(gateway, None)

    def to_scheduler(self, message: Message) -> None:
        """Queue a message for the scheduler."""
        if self._to_scheduler or not self._scheduler.send(message):
            self._to_scheduler.append(message)

    def to_gateway(self, gateway: str, message: Message) -> None:
        """Queue a message for a gateway."""
        if not self.knows(gateway):
            self.open_gateway(gateway)
        waiting = self._to_gateways.get(gateway)
        if waiting is not None:
            waiting.append(message)
        elif not self.knows(gateway) or not self._gateways[gateway].send(message):
            self._to_gateways[gateway] = deque([message])

    def offer_all(self, message: Message) -> None:
        """Send to the scheduler and every gateway whose channel takes it now; for what is repeated anyway."""
        self._scheduler.send(message)
        for gateway, sender in self._gateways.items():
            if gateway not in self._to_gateways:
                sender.send(message)

    def flush(self, now: float) -> None:
        """Send what waits, oldest first. What a gateway has not taken for ``GATEWAY_STUCK_S`` is dropped:
        the detokenizer declares such a gateway gone, and its requests are aborted."""
        while self._to_scheduler and self._scheduler.send(self._to_scheduler[0]):
            self._to_scheduler.popleft()
        for gateway in list(self._to_gateways):
            waiting, sender = self._to_gateways[gateway], self._gateways.get(gateway)
            moved = False
            while waiting and sender is not None and sender.send(waiting[0]):
                waiting.popleft()
                moved = True
            if not waiting:
                del self._to_gateways[gateway]
                self._full_since.pop(gateway, None)
            elif moved:
                self._full_since[gateway] = now
            elif now - self._full_since.setdefault(gateway, now) > GATEWAY_STUCK_S:
                log.warning("%s takes no messages: dropped %d replies to it", gateway, len(waiting))
                del self._to_gateways[gateway]
                del self._full_since[gateway]

"""Which gateways live, where they listen, and what happens when one goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import Finish, GatewayAddress, GatewayLease, RefusedRow
from scheduler_proc.life import Life
from scheduler_proc.state import State

LEASE_S = 8.0
"""A gateway not heard of for this long is gone. It renews every second; a machine under load may be late."""
PAUSE_S = 2.0
"""Between two steps; the loop turns for each heartbeat."""
_REMEMBER_GONE = 4096


@dataclass
class Gateway:
    """One gateway that holds a lease."""

    address: str
    generation: int
    expires: float


@dataclass
class Gateways:
    """Leases. ``addresses`` collects what tokenizers and the detokenizer must be told."""

    state: State
    life: Life
    known: dict[str, Gateway] = field(default_factory=dict)
    addresses: list[GatewayAddress] = field(default_factory=list)
    orphans: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Gateway declared gone -> (rid, attempt) it had open: should it come back, it hears of their end."""
    last_turn: float = 0.0
    """When ``expire`` was called last."""

    def renew(self, lease: GatewayLease, now: float) -> None:
        """A lease arrived: a new gateway, a sign of life, a successor, or a farewell."""
        old = self.known.get(lease.gateway)
        if lease.closing:
            if old is not None and lease.generation >= old.generation:
                self.drop(lease.gateway)
            return
        if old is not None and lease.generation < old.generation:
            return
        if old is not None and lease.generation > old.generation:
            self.drop(lease.gateway)
            self.orphans.pop(lease.gateway, None)
            old = None
        if old is None or old.address != lease.address:
            self.addresses.append(GatewayAddress(gateway=lease.gateway, address=lease.address))
        self.known[lease.gateway] = Gateway(lease.address, lease.generation, now + LEASE_S)
        for rid, attempt in self.orphans.pop(lease.gateway, []):
            finish = Finish("abort", message="the gateway was unreachable; its requests were aborted")
            self.state.refused.append(RefusedRow(rid, attempt, lease.gateway, finish))

    def replaced(self, generations: dict[str, int]) -> None:
        """The supervisor has started these generations: what came before them is dead, and its lease need not run
        out first. A gateway that is not the supervisor's (on another host) is not among them."""
        for name, gateway in list(self.known.items()):
            if generations.get(name, gateway.generation) > gateway.generation:
                self.drop(name)
                self.orphans.pop(name, None)

    def expire(self, now: float) -> None:
        """Drop gateways whose lease ran out.

        When this process itself stood still (suspended, stopped), so did the reading of leases: that time
        does not count.
        """
        pause_s = now - self.last_turn
        self.last_turn = now
        if pause_s > PAUSE_S:
            for gateway in self.known.values():
                gateway.expires = max(gateway.expires, min(gateway.expires + pause_s, now + LEASE_S))
        for name in [name for name, gateway in self.known.items() if gateway.expires < now]:
            self.state.log.append(("warning", f"{name} was not heard of for {LEASE_S:g} s: its requests are aborted"))
            self.drop(name)

    def drop(self, name: str) -> None:
        """Abort a gateway's requests without an ending: nobody is there to hear it."""
        known = self.known.pop(name, None)
        mine = [req for req in self.state.reqs.values() if req.gateway == name]
        if known is None and not mine:
            return
        self.addresses.append(GatewayAddress(gateway=name, address="", gone=True))
        self.state.gone.append(name)
        self.orphans[name] = [(req.rid, req.attempt) for req in mine][:_REMEMBER_GONE]
        while len(self.orphans) > 16:
            del self.orphans[next(iter(self.orphans))]
        for req in mine:
            if req.finish is None:
                self.state.metrics.aborted("gateway_gone")
            self.life.finish(req, Finish("abort", message="gateway gone"), silent=True)
            if req.finish_handed is False:
                req.finish_handed = req.silent = True
                self.state.loose.pop(req.rid, None)
                self.state.begins.pop(req.rid, None)
                self.life.forget(req)

    def resend_addresses(self) -> None:
        """A tokenizer or the detokenizer restarted: it knows no gateway."""
        for name, gateway in self.known.items():
            self.addresses.append(GatewayAddress(gateway=name, address=gateway.address))

    def next_expiry(self) -> float:
        """When the next lease runs out; infinity with none."""
        return min([gateway.expires for gateway in self.known.values()], default=float("inf"))

"""The engine's inboxes: who binds and who writes each, its bound, its messages, its address.

==================  =====================  =======  ==================================================
inbox (bound by)    written by             bound    at the bound
==================  =====================  =======  ==================================================
tokenizer-<i>       gateways, scheduler    1,024    the gateway answers 503 with Retry-After
scheduler           tokenizers, gateways,  4,096    tokenizer: stops reading its inbox until it fits;
                    detokenizer, launcher           gateway: lease and control retried; detokenizer:
                                                    keeps the stop hit and retries
scheduler-work      workers                64       the worker waits (at most two steps are in flight)
worker-0            scheduler              16       no further step is sent
rank-<r>            worker-0               16       rank 0 waits (it is at most a step ahead)
detokenizer         scheduler              256      cursors stay; the next TokenBatch carries more
gateway-<id>        tokenizers,            1,024    cursors stay; full for ``GATEWAY_STUCK_S``: the
                    detokenizer, scheduler          gateway is declared gone
supervisor          all                    1,024    the heartbeat is skipped
remote-scheduler    gateways elsewhere     1,024    as scheduler
remote-tokenizer-i  gateways elsewhere     1,024    as tokenizer-<i>
==================  =====================  =======  ==================================================

Gateways on other hosts have inboxes of their own at ``tcp://`` addresses, which take only what such a
gateway has to say, and only with CURVE keys (``common/curve.py``). ``--engine-listen tcp://host:port``
is remote-scheduler; remote-tokenizer-<i> is i + 1 ports above. The address at which the engine answers
such a gateway names its key: ``tcp://host:port#<key in hexadecimal>``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from common import messages

GATEWAY_STUCK_S = 5.0
"""A gateway whose inbox takes nothing for so long is declared gone."""

BOUNDS = {
    "tokenizer": 1024,
    "scheduler": 4096,
    "scheduler-work": 64,
    "worker": 16,
    "rank": 16,
    "detokenizer": 256,
    "gateway": 1024,
    "supervisor": 1024,
    "remote-scheduler": 1024,
    "remote-tokenizer": 1024,
}

INBOX_TYPES: dict[str, Any] = {
    "tokenizer": messages.ToTokenizer,
    "scheduler": messages.ToScheduler,
    "scheduler-work": messages.ToScheduler,
    "worker": messages.ToWorker,
    "rank": messages.ToRank,
    "detokenizer": messages.ToDetokenizer,
    "gateway": messages.ToGateway,
    "supervisor": messages.ToSupervisor,
    "remote-scheduler": messages.ToRemoteScheduler,
    "remote-tokenizer": messages.ToRemoteTokenizer,
}


def kind_of(inbox: str) -> str:
    """``worker-0`` -> ``worker``; ``scheduler-work`` and ``scheduler`` are their own kinds."""
    if inbox in BOUNDS:
        return inbox
    kind = inbox.rpartition("-")[0] if inbox.startswith("remote-") else inbox.split("-", 1)[0]
    if kind not in BOUNDS:
        raise ValueError(f"unknown inbox {inbox!r}; known kinds are {', '.join(BOUNDS)}")
    return kind


def inbox_address(run_dir: Path | str, inbox: str) -> str:
    """The local address of an inbox, e.g. ``ipc:///tmp/quintet-x/worker-0``."""
    kind_of(inbox)
    return f"ipc://{Path(run_dir) / inbox}"


def is_remote(gateway: str) -> bool:
    """Whether the gateway of this name runs on another host: ``gateway-1f3a@web1``."""
    return "@" in gateway


def split_tcp(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. Raises ``ValueError``; for port 0 too."""
    found = re.fullmatch(r"tcp://(\[[^\[\]#]+\]|[^:\[\]#/]+):(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ValueError(f"{address!r} is not tcp://HOST:PORT with a port from 1 to 65535")
    return found[1].strip("[]"), int(found[2])


def join_tcp(host: str, port: int, key_digits: str = "") -> str:
    """``tcp://host:port``, an IPv6 address in brackets, with ``#key`` where one is given."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}" + (f"#{key_digits}" if key_digits else "")


def remote_address(engine: str, inbox: str) -> str:
    """Where an inbox of the engine is for other hosts; ``engine`` is its ``--engine-listen``.

    ``scheduler`` and ``tokenizer-<i>``, with or without ``remote-`` before them. Raises ``ValueError``.
    """
    host, port = split_tcp(engine)
    name = inbox.removeprefix("remote-")
    return join_tcp(host, port if name == "scheduler" else port + 1 + int(name.removeprefix("tokenizer-")))

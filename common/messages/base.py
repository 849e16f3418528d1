"""What all messages have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec

GatewayName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._@-]{1,96}\Z")]
"""A gateway's name: it becomes part of a socket's path and a metric's label. ``gateway-0``, ``gateway-1f3a@web1``."""
HEALTH_RID_PREFIX = "health-"
"""Requests whose rid begins with this are the gateways' own health checks: run, but counted nowhere."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all wire messages: a tagged map. Fields equal to their default are left out."""


class Record(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Base of the records inside a message: an array, positional."""

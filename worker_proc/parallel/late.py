"""Ids that rank 0 has drawn and its host has not seen: from its device to the other ranks', in the order of launches.

No host waits for them with NCCL; with gloo the device is the host.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker_proc.device_io import DeviceIo
from worker_proc.runner import I32, LATE, LateIds


class Broadcast(Protocol):
    """What of a ``RankGroup`` is needed here."""

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's, in place."""
        ...


class SharedLateIds:
    """Every rank makes one call for each step that has late ids: rank 0 ``give``, the others ``take``."""

    def __init__(self, group: Broadcast, io: DeviceIo) -> None:
        self._group, self._io = group, io

    def give(self, late: LateIds) -> LateIds:
        """Rank 0's late ids, sent to the others and in the same order."""
        with torch.inference_mode():
            sources = self._io.upload(late.sources.astype(np.int64))
            chosen = late.drawn.index_select(0, sources).to(torch.int32)
            self._group.copy_from_first(chosen)
        return _in_order(chosen, late.targets)

    def take(self, ids: I32) -> LateIds | None:
        """Rank 0's late ids, for a step whose ``ids`` [T] are ``LATE`` in their places; None without any."""
        targets = np.flatnonzero(ids == LATE).astype(np.int32)
        if not targets.size:
            return None
        with torch.inference_mode():
            chosen = torch.empty(targets.size, dtype=torch.int32, device=self._io.device)
            self._group.copy_from_first(chosen)
        return _in_order(chosen, targets)


def _in_order(chosen: Tensor, targets: I32) -> LateIds:
    return LateIds(chosen, np.arange(targets.size, dtype=np.int32), targets)

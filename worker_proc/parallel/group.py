"""The ranks of one worker and what they tell each other: ``torch.distributed`` behind four verbs."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from worker_proc.parallel.shares import Span, balanced


@dataclass(frozen=True, slots=True)
class Membership:
    """Which group a process belongs to. Every start of the group is a new one: a rank cannot join again."""

    rank: int
    size: int
    generation: int
    run_dir: Path
    """Where the ranks find each other."""
    timeout_s: float
    """Longest wait for another rank, while it loads for example. Hung ranks are the supervisor's affair."""


class RankGroup:
    """Collectives of the ranks: NCCL for tensors on a GPU, gloo on the CPU.

    Every rank must make the same calls in the same order. Results are the same bits on every rank.
    """

    def __init__(self, member: Membership, device: torch.device) -> None:
        """Meet the other ranks; waits for all of them. Once per process."""
        self.rank, self.size = member.rank, member.size
        self._device = device
        bind_to_loopback(os.environ)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL and Triton's kernels take the current one
        meeting = dist.FileStore(  # type: ignore[attr-defined]
            str(member.run_dir / f"ranks-{member.generation}"), member.size
        )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=meeting,
            rank=member.rank,
            world_size=member.size,
            timeout=timedelta(seconds=member.timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    def gather_columns(self, part: Tensor, size: int) -> Tensor:
        """Join the ranks' balanced parts of the last dimension: [..., part of size] -> [..., size]."""
        widths = [stop - start for start, stop in (self.span(size, rank) for rank in range(self.size))]
        widest = max(widths)
        padded = part if part.shape[-1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[-1]))
        parts = list(padded.new_empty((self.size, *padded.shape)).unbind(0))
        dist.all_gather(parts, padded.contiguous())
        return torch.cat([whole[..., :width] for whole, width in zip(parts, widths, strict=True)], dim=-1)

    def span(self, size: int, rank: int | None = None) -> Span:
        """The balanced share of a dimension, this rank's unless another is named."""
        return balanced(size, self.size, self.rank if rank is None else rank)

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor.item())

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's, in place."""
        dist.broadcast(tensor, 0)

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        self.least(0)


def bind_to_loopback(environ: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL's bootstrap listen on the loopback interface; what the user has set stays.

    All ranks are on this machine, and neither asks who connects.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    environ.setdefault("NCCL_SOCKET_IFNAME", loopback)

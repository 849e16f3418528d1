"""Rank 0's runner: tells the other ranks what it computes, and computes it with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from common.channels import Sender
from common.errors import InvariantError
from common.messages import RankStep, pack_i32
from worker_proc.parallel.late import SharedLateIds
from worker_proc.runner import I32, AheadRunner, LateIds, ModelRunner, PackedBatch


class LeadingRunner:
    """A ``ModelRunner`` over all ranks: wraps rank 0's own.

    Sampling, grammars and requests are rank 0's alone, so ranks cannot come to differ in them: what the
    others learn of a sampled id is that it is in the next step. Where not even rank 0's host knows it yet, the step
    has ``LATE`` in its place and the ranks' devices hand it on.
    """

    def __init__(
        self, runner: ModelRunner | AheadRunner, others: Sequence[Sender], generation: int,
        stopping: Callable[[], bool], late: SharedLateIds | None = None,
    ) -> None:  # fmt: skip
        """``others``: the inboxes of the other ranks. ``stopping``: nobody waits for a full one any more.
        ``late``: for ``forward_late``."""
        self._runner, self._others, self._generation, self._stopping = runner, others, generation, stopping
        self._late = late
        self._number = 0
        self.name, self.batch_invariant = runner.name, runner.batch_invariant
        self.page_size, self.vocab_size, self.dtype = runner.page_size, runner.vocab_size, runner.dtype
        self.tile_tokens = runner.tile_tokens

    def kv_bytes_per_page(self) -> int:
        """Of rank 0."""
        return self._runner.kv_bytes_per_page()

    def weight_bytes(self) -> int:
        """Of rank 0."""
        return self._runner.weight_bytes()

    def allocate(self, num_pages: int) -> None:
        """Rank 0's pool; each rank creates its own when it loads."""
        self._runner.allocate(num_pages)

    def forward(self, batch: PackedBatch) -> Any:
        """See ``ModelRunner``. The other ranks compute at the same time; a lost one raises RuntimeError."""
        self._tell_batch(batch)
        return self._runner.forward(batch)

    def forward_late(self, batch: PackedBatch, late: LateIds) -> Any:
        """See ``AheadRunner``."""
        if self._late is None or not hasattr(self._runner, "forward_late"):
            raise InvariantError("a step with late ids, and no way for them to the other ranks")
        self._tell_batch(batch)
        return self._runner.forward_late(batch, self._late.give(late))

    def _tell_batch(self, batch: PackedBatch) -> None:
        self._tell(
            ids=pack_i32(batch.ids),
            positions=pack_i32(batch.positions),
            query_start=pack_i32(batch.query_start),
            context_lens=pack_i32(batch.context_lens),
            page_table=pack_i32(batch.page_table.reshape(-1)),
            logit_rows=pack_i32(batch.logit_rows),
        )

    def copy_pages(self, src: I32, dst: I32) -> None:
        """Copy whole pages on every rank."""
        self._tell(copies=pack_i32(np.stack([src, dst], axis=1).reshape(-1)))
        self._runner.copy_pages(src, dst)

    def close(self) -> None:
        """Let the other ranks end too."""
        self._tell(last=True)
        self._runner.close()

    def _tell(self, **columns: Any) -> None:
        self._number += 1
        step = RankStep(generation=self._generation, number=self._number, **columns)
        for sender in self._others:
            while not sender.send(step) and not self._stopping():
                time.sleep(0.001)

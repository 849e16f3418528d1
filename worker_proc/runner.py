"""The seam between the worker's step loop and whatever computes logits.

A runner is a model, its weights and its paged KV pool. The step loop packs the rows of a
``ForwardBatch`` into one :class:`PackedBatch`; the runner writes the new tokens' K and V into
their pages, attends, and returns logits. Nothing here knows about requests, sampling or wire
messages, so runners are compared with each other on plain arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


LATE = -1
"""In the place of an id that the host does not know: no lookup takes it for one."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Tokens of one step, packed without padding: T tokens of S sequences.

    Sequence s owns the packed rows ``query_start[s]:query_start[s + 1]``; they are its positions
    ``context_lens[s] - n .. context_lens[s] - 1`` (n = number of its rows), so a row attends to
    itself, the rows of its sequence before it, and the sequence's pages before them.
    """

    ids: I32
    """[T] token ids; ``LATE`` where ``LateIds`` have one."""
    positions: I32
    """[T] position of each token in its sequence."""
    query_start: I32
    """[S + 1]."""
    context_lens: I32
    """[S] length of each sequence, this step's tokens included."""
    page_table: I32
    """[S, P] page ids in position order; entries past a sequence's last page are 0 and unused."""
    logit_rows: I32
    """[R] packed rows whose logits are wanted, ascending; R may be 0."""


@dataclass(frozen=True, slots=True)
class LateIds:
    """Ids of a step that are on the device and not yet on the host: drawn by the step before, which still runs."""

    drawn: Any
    """Tensor [R] of ids (``Drawn.ids``)."""
    sources: I32
    """[K] places in ``drawn``."""
    targets: I32
    """[K] packed rows of the batch: those whose ``ids`` are ``LATE``."""


class ModelRunner(Protocol):
    """One way of computing a model's logits (generic torch path, CPU fast path, ...)."""

    name: str
    """Shown to users: ``generic-torch``, ``cpu-fast``, ..."""
    batch_invariant: bool
    """A row's logits depend on its own tokens alone, bit for bit."""
    page_size: int
    vocab_size: int
    dtype: str
    tile_tokens: int
    """See ``WorkerReady``."""

    def kv_bytes_per_page(self) -> int:
        """Bytes one page takes over all layers."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of weights held."""
        ...

    def allocate(self, num_pages: int) -> None:
        """Create the KV pool. Called once, before any forward. Raises MemoryError with the arithmetic."""
        ...

    def forward(self, batch: PackedBatch) -> Any:
        """Run one step; float32 logits [R, vocab_size].

        A numpy array on CPU paths, a torch tensor on a GPU. Valid until the next call.
        """
        ...

    def copy_pages(self, src: I32, dst: I32) -> None:
        """Copy whole pages src[i] -> dst[i] in every layer (copy-on-write), in order."""
        ...

    def close(self) -> None:
        """Stop threads and free the pool."""
        ...


class ArgmaxRunner(ModelRunner, Protocol):
    """One that looks for the likeliest ids while it computes their logits."""

    def argmax(self, rows: I32) -> tuple[I32, NDArray[np.float32]]:
        """Of these rows of the last forward's logits the likeliest ids [n], of equal ones the lowest, and their logits.

        Where a logit is NaN, that is the id, and NaN the logit.
        """
        ...


class AheadRunner(ModelRunner, Protocol):
    """One whose device is told what to compute while the host goes on."""

    def forward_late(self, batch: PackedBatch, late: LateIds) -> Any:
        """As ``forward``, with ids that only the device has."""
        ...

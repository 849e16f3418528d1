"""Who gets what: the arithmetic of splitting a dimension, or attention heads, over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError

Span = tuple[int, int]
"""[start, stop)."""


WIDEST_UNIT = 64


def balanced(size: int, num_ranks: int, rank: int) -> Span:
    """The rank's span of ``size`` things; sizes of two ranks differ by one unit at most, and together they are all.

    The unit is the largest power of two up to ``WIDEST_UNIT`` that divides ``size`` and is not too large for
    every rank to get one: matrix products are fast, some possible at all, only at aligned widths.
    """
    unit = WIDEST_UNIT
    while unit > 1 and (size % unit or size < unit * num_ranks):
        unit //= 2
    count = size // unit
    return count * rank // num_ranks * unit, count * (rank + 1) // num_ranks * unit


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank."""

    heads: Span
    """Query heads."""
    kv_heads: Span
    """Key and value heads; other ranks may hold the same ones."""

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.kv_heads[1] - self.kv_heads[0]


def head_share(num_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> HeadShare:
    """The rank's heads: whole KV heads with all their query heads, as long as there are enough KV heads.

    With fewer KV heads than ranks each is held by as many ranks as share its query heads (the
    arrangement of Megatron-LM). 3 KV heads on 2 ranks are 1 and 2. ``ConfigError`` when that is impossible.
    """
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    groups = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        first, last = balanced(num_kv_heads, num_ranks, rank)
        return HeadShare((first * groups, last * groups), (first, last))
    if num_ranks % num_kv_heads or num_ranks // num_kv_heads > groups:
        raise ConfigError(
            f"--tp-size {num_ranks}: {num_heads} query heads and {num_kv_heads} KV heads cannot be split over so many; "
            f"it can be at most {num_kv_heads}, or a multiple of {num_kv_heads} up to {num_heads}"
        )
    per_kv_head = num_ranks // num_kv_heads
    kv_head = rank // per_kv_head
    first, last = balanced(groups, per_kv_head, rank % per_kv_head)
    return HeadShare((kv_head * groups + first, kv_head * groups + last), (kv_head, kv_head + 1))


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor along one dimension: some spans of it, in order."""

    dim: int
    """Counted from the end: -1 is the last. So it holds for one expert's matrix and for all of them stacked."""
    size: int
    """Of the whole dimension."""
    spans: tuple[Span, ...]

    @property
    def local_size(self) -> int:
        """Of the rank's part."""
        return sum(stop - start for start, stop in self.spans)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the rank's part of a tensor of shape ``whole``."""
        local = list(whole)
        local[self.dim] = self.local_size
        return tuple(local)

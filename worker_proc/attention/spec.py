"""What one attention layer needs to know besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shape of a layer's K/V and which earlier positions its queries may see.

    A query at position p sees key positions ``[lower_bound(p), p]``.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    """Sliding window: sees the last ``window`` positions, its own included. 0: no window."""
    chunk: int = 0
    """Chunked attention: sees its own chunk of ``chunk`` positions only. 0: no chunks."""
    shaped: bool = False
    """Its scores get a soft cap or sinks (see :class:`AttentionArgs`)."""

    def lower_bound(self, position: int) -> int:
        """First position that a query at ``position`` sees."""
        low = 0
        if self.window:
            low = max(low, position - self.window + 1)
        if self.chunk:
            low = max(low, position // self.chunk * self.chunk)
        return low

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes that K and V of one token take in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * itemsize


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """Per-call arguments of a layer's attention."""

    scaling: float
    softcap: float = 0.0
    """scores become ``softcap * tanh(scores / softcap)`` (Gemma 2). 0: off."""
    sinks: torch.Tensor | None = None
    """[num_heads] extra logit per head that takes probability and gives no value (gpt-oss)."""

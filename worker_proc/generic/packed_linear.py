"""Linear layers with their weights in oneDNN's own blocked layout, for bfloat16 on CPU.

Torch's eager linear reorders the weight, or uses a slower kernel for the plain layout, on every call;
a weight that was reordered once is not. The operators are private to torch, so they are tried on a
small layer first, and where that fails or gives other numbers nothing is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """Stands in for an ``nn.Linear`` whose weight [out, in] it has packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Some models ask a layer's weight for its dtype or shape; one that calculated with it would get NaN,
        # which the start-up check finds. It takes two bytes.
        self.weight = torch.full((1, 1), float("nan"), dtype=linear.weight.dtype).expand_as(linear.weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def packed_bytes(self) -> int:
        """Bytes of the packed weight (the layout's padding is not counted)."""
        return self.in_features * self.out_features * self.weight.itemsize


def packing_works() -> bool:
    """The operators exist on this build and CPU and agree with ``nn.Linear``."""
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        linear = nn.Linear(64, 96, bias=True, dtype=torch.bfloat16)
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        try:
            packed = PackedLinear(linear)
            for shape in ((1, 1, 64), (1, 37, 64)):
                x = torch.randn(shape, generator=generator).bfloat16()
                want, got = linear(x).float(), packed(x).float()
                if got.shape != want.shape or (got - want).norm() > 0.02 * want.norm():
                    return False
        except (RuntimeError, AttributeError, TypeError):
            return False
    return True


def pack_linears(model: Any) -> int:
    """Replace the bfloat16 ``nn.Linear`` layers of a CPU model in place; how many were.

    A weight that the model uses elsewhere too (tied to the embedding) is kept besides its packed copy.
    """
    if model.dtype != torch.bfloat16 or model.device.type != "cpu" or not packing_works():
        return 0
    count = 0
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                    packed = PackedLinear(child)
                    # What runs before and after a layer split over ranks (worker_proc/parallel) goes on doing so.
                    packed._forward_pre_hooks, packed._forward_hooks = child._forward_pre_hooks, child._forward_hooks
                    setattr(parent, name, packed)
                    count += 1
    return count

"""Make a model one rank's: parameters of the rank's shape, and transfers around the modules that need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.parallel.group import RankGroup
from worker_proc.parallel.plan import ShardPlan, Transfer, local_attributes

Hook = Callable[..., Any]


def shrink(model: nn.Module, plan: ShardPlan) -> None:
    """Give the parameters of ``plan.cuts`` the rank's shape, in place; on the meta device, so without values."""
    for name, cut in plan.cuts.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        whole = getattr(module, leaf)
        local = torch.empty(cut.shape(tuple(whole.shape)), dtype=whole.dtype, device="meta")
        setattr(module, leaf, nn.Parameter(local, requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None  # only training uses it, and it may lie in another rank's part
    for name, share in plan.heads.items():
        local_attributes(model.get_submodule(name), share)


def connect(model: nn.Module, plan: ShardPlan, group: RankGroup) -> None:
    """Install the transfers of ``plan`` on a loaded model."""
    for name, transfer in plan.transfers.items():
        module = model.get_submodule(name)
        before, after = _hooks(transfer, group, plan.sizes.get(name, 0))
        if before is not None:
            module.register_forward_pre_hook(before)
        if after is not None:
            module.register_forward_hook(after)
        if transfer in (Transfer.SUM, Transfer.SPLIT_SUM) and group.rank and getattr(module, "bias", None) is not None:
            module.register_parameter("bias", None)  # it is in the sum once: rank 0's


def _hooks(transfer: Transfer, group: RankGroup, size: int) -> tuple[Hook | None, Hook | None]:
    """What runs before and after a module's forward."""

    def add(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return group.sum(output)

    def join(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return group.gather_columns(output, size)

    def own_columns(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        first, last = group.span(size)
        return (args[0][..., first:last], *args[1:])

    def divide(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] / group.size, *args[1:])

    if transfer is Transfer.LOOK_UP:
        return _look_up(group, size)
    if transfer is Transfer.SPLIT_SUM:
        return own_columns, add
    if transfer is Transfer.SHARE:
        return divide, None
    return None, join if transfer is Transfer.GATHER else add


def _look_up(group: RankGroup, size: int) -> tuple[Hook, Hook]:
    """A vocabulary-parallel embedding: ids of other ranks give zeros here, and the sum fills them in."""
    first, last = group.span(size)
    foreign: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0]
        foreign.append((ids < first) | (ids >= last))
        return ((ids - first).clamp(0, last - first - 1), *args[1:])

    def after(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return group.sum(output.masked_fill(foreign.pop()[..., None], 0.0))

    return before, after

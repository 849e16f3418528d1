"""How a model is split, from the plan that transformers has for its architecture.

``model.tp_plan`` names, per module or parameter, one of transformers' parallel styles. Here each
becomes a cut of the weights, and a transfer before or after the module. What transformers leaves
open is decided here: sizes that the ranks do not divide, and attention heads, which are never split.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import nn

from common.errors import ConfigError
from worker_proc.parallel.shares import Cut, HeadShare, Span, balanced, head_share

LEAST_SPLIT = 0.25
"""A plan that splits less than this share of the weights is refused: every rank would hold nearly all of them."""
KV_NAMES = frozenset({"k_proj", "v_proj"})
FUSED_NAMES = frozenset({"qkv_proj", "query_key_value"})
HEAD_COUNTS = ("num_heads", "num_attention_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")


class Transfer(Enum):
    """What a module does between ranks."""

    SUM = "sum of the outputs"
    SPLIT_SUM = "own part of the input, then sum of the outputs"
    GATHER = "outputs joined along the last dimension"
    LOOK_UP = "own part of the vocabulary, then sum of the outputs"
    SHARE = "input divided by the number of ranks"


@dataclass(frozen=True, slots=True)
class _Style:
    """One of transformers' styles. ``weight``, ``bias``: the dimension that is cut, 0 for none."""

    weight: int = 0
    bias: int = 0
    parts: int = 1
    """Matrices that lie behind one another in the dimension; each is cut."""
    transfer: Transfer | None = None
    whole: bool = False
    """Outside the module the values are whole, so that heads need not stay together."""


_GATHERED = _Style(weight=-2, bias=-1, transfer=Transfer.GATHER, whole=True)
_SPLIT = _Style(weight=-1, transfer=Transfer.SPLIT_SUM, whole=True)
STYLES = {
    "colwise": _Style(weight=-2, bias=-1),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": _Style(weight=-1, transfer=Transfer.SUM),
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "packed_colwise": _Style(weight=-2, bias=-1, parts=2),
    "packed_rowwise": _Style(weight=-1, parts=2),
    "embedding_rowwise": _Style(weight=-2, transfer=Transfer.LOOK_UP, whole=True),
    "embedding_colwise": _Style(weight=-1, transfer=Transfer.GATHER, whole=True),
    "moe_tp_experts": _Style(transfer=Transfer.SUM),
    "all_reduce": _Style(transfer=Transfer.SUM),
    "moe_identity_expert": _Style(transfer=Transfer.SHARE),
    # What these do concerns gradients, or tensors of a kind that is not used here.
    "replicate": _Style(),
    "replicated_with_grad_allreduce": _Style(),
    "mla_kv_a_proj": _Style(),
    "local_params": _Style(),
}
"""Transformers' name -> what it means for inference."""


@dataclass
class ShardPlan:
    """The split of one model for one rank, by full names of parameters and modules."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the whole dimension that a module's transfer joins or splits."""
    heads: dict[str, HeadShare] = field(default_factory=dict)
    """Attention modules whose heads are split."""


def make_plan(model: nn.Module, num_ranks: int, rank: int) -> ShardPlan:
    """The rank's split of ``model`` (on the meta device, weights whole). ``ConfigError`` names what cannot be split."""
    name = type(model).__name__
    styles: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not styles:
        raise ConfigError(f"--tp-size {num_ranks}: transformers has no plan to split {name}; use --tp-size 1")
    unknown = sorted({style for style in styles.values() if style not in STYLES})
    if unknown:
        words = ", ".join(unknown)
        raise ConfigError(f"--tp-size {num_ranks}: the plan to split {name} has {words}; use --tp-size 1")
    plan = _Planner(model, styles, num_ranks, rank).run()
    _check_share(model, plan, num_ranks)
    return plan


def _check_share(model: nn.Module, plan: ShardPlan, num_ranks: int) -> None:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    share = sum(sizes[name] for name in plan.cuts if name in sizes) / max(1, sum(sizes.values()))
    if share < LEAST_SPLIT:
        raise ConfigError(
            f"--tp-size {num_ranks}: transformers' plan for {type(model).__name__} splits {share:.0%} of its weights, "
            f"so each rank would hold nearly all of them; use --tp-size 1"
        )


class _Planner:
    """Works out one plan; see :func:`make_plan`."""

    def __init__(self, model: nn.Module, styles: dict[str, str], num_ranks: int, rank: int) -> None:
        self._model, self._num_ranks, self._rank = model, num_ranks, rank
        self._modules = dict(model.named_modules())
        self._exact = styles
        self._config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._plan = ShardPlan()

    def run(self) -> ShardPlan:
        """Visit every module and parameter that the plan names."""
        for name, module in self._modules.items():
            if style := self._style_of(name):
                self._module(name, module, style)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            if (style := self._style_of(name)) is not None:
                dim = style.bias if parameter.dim() == 1 else style.weight
                self._cut(name, owner, leaf, tuple(parameter.shape), dim, style)
        return self._plan

    def _style_of(self, name: str) -> _Style | None:
        found = self._exact.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), self._exact.get(name))
        return None if found is None else STYLES[found]

    def _module(self, name: str, module: nn.Module, style: _Style) -> None:
        if style.transfer is not None:
            self._plan.transfers[name] = style.transfer
        if not style.weight:
            return
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ConfigError(f"--tp-size: {name} is a {type(module).__name__}; only linear layers can be split")
        owner, _, leaf = name.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            dim = style.weight if kind == "weight" else style.bias
            self._cut(f"{name}.{kind}", owner, leaf, tuple(parameter.shape), dim, style)
        self._plan.sizes[name] = module.weight.shape[style.weight]

    def _cut(self, name: str, owner: str, leaf: str, shape: tuple[int, ...], dim: int, style: _Style) -> None:
        """Note the rank's part of a parameter; ``owner`` and ``leaf`` say what it is for."""
        if not dim:
            return
        size = shape[dim]
        if style.parts > 1:
            each = size // style.parts
            first, last = balanced(each, self._num_ranks, self._rank)
            spans = tuple((part * each + first, part * each + last) for part in range(style.parts))
        else:
            spans = (self._span(owner, leaf, size, style),)
        cut = Cut(dim, size, spans)
        if any(start == stop for start, stop in spans):
            raise ConfigError(f"--tp-size {self._num_ranks}: {name} has a dimension of {size}, fewer than ranks")
        self._plan.cuts[name] = cut

    def _span(self, owner: str, leaf: str, size: int, style: _Style) -> Span:
        parent = self._modules[owner]
        if style.whole or "Attention" not in type(parent).__name__:
            return balanced(size, self._num_ranks, self._rank)
        num_heads, num_kv_heads = self._head_counts(parent)
        share = head_share(num_heads, num_kv_heads, self._num_ranks, self._rank)
        if leaf in FUSED_NAMES and num_kv_heads != num_heads:
            raise ConfigError(f"--tp-size {self._num_ranks}: {owner}.{leaf} joins {num_heads} and {num_kv_heads} heads")
        self._plan.heads[owner] = share
        count, (start, stop) = (num_kv_heads, share.kv_heads) if leaf in KV_NAMES else (num_heads, share.heads)
        if size % count:
            raise ConfigError(f"--tp-size {self._num_ranks}: {owner}.{leaf} has {size} values for {count} heads")
        return start * (size // count), stop * (size // count)

    def _head_counts(self, parent: nn.Module) -> tuple[int, int]:
        """(query heads, KV heads) of an attention module, from its own shapes where they say it."""
        key, head_dim = getattr(parent, "k_proj", None), getattr(parent, "head_dim", None)
        groups = getattr(parent, "num_key_value_groups", None)
        if isinstance(key, nn.Linear) and isinstance(head_dim, int) and isinstance(groups, int):
            num_kv_heads = key.out_features // head_dim
            return num_kv_heads * groups, num_kv_heads
        num_heads = int(self._config.num_attention_heads)
        if not isinstance(key, nn.Linear):  # fused, or multi-head latent attention: a KV head for each query head
            return num_heads, num_heads
        return num_heads, int(getattr(self._config, "num_key_value_heads", None) or num_heads)


def local_attributes(module: Any, share: HeadShare) -> None:
    """Tell an attention module how many heads it has here, where it keeps such numbers."""
    counts = dict.fromkeys(HEAD_COUNTS, share.num_heads) | dict.fromkeys(KV_HEAD_COUNTS, share.num_kv_heads)
    counts["num_key_value_groups"] = share.num_heads // share.num_kv_heads
    for attribute, value in counts.items():
        if isinstance(getattr(module, attribute, None), int):
            setattr(module, attribute, value)

"""Loading one rank's weights: of each checkpoint tensor only the rank's part is read from the (mapped) file.

Transformers' own loader renames, stacks and joins checkpoint tensors into parameters. It is given
a model whose parameters have the rank's shape, and a checkpoint whose tensors have too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from common.config import ServerConfig
from common.errors import ConfigError
from worker_proc.generic.quantized import check_complete, quantization_of
from worker_proc.parallel.group import RankGroup
from worker_proc.parallel.layers import connect, shrink
from worker_proc.parallel.plan import ShardPlan, make_plan
from worker_proc.parallel.shares import Cut


class PartOfTensor:
    """A tensor of a safetensors file as a rank sees it; read when it is asked for all of it (``[...]``)."""

    def __init__(self, source: Any, cut: Cut | None) -> None:
        """``source``: safetensors' ``get_slice``; ``cut``: None for the whole tensor."""
        self._source, self._cut = source, cut

    def get_shape(self) -> list[int]:
        """Shape of the rank's part."""
        shape = tuple(self._source.get_shape())
        return list(shape if self._cut is None else self._cut.shape(shape))

    def get_dtype(self) -> str:
        """Safetensors' name of the dtype."""
        return str(self._source.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        """The part, read now."""
        if index is not Ellipsis:
            raise TypeError("a part of a tensor is read whole: part[...]")
        if self._cut is None:
            whole: Tensor = self._source[...]
            return whole
        before = (slice(None),) * (len(self._source.get_shape()) + self._cut.dim)
        spans = [self._source[(*before, slice(start, stop))] for start, stop in self._cut.spans]
        return spans[0] if len(spans) == 1 else torch.cat(spans, dim=self._cut.dim)


def load_shard(
    config: ServerConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup,
) -> Any:
    """The rank's part of a model, on the device, with its transfers; random weights with --load-format dummy.

    Raises ``ConfigError`` if it cannot be split or its weights are not as expected.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if model_class is None:
        kind = hf_config.model_type
        raise ConfigError(f"--tp-size {group.size}: {kind} has code of its own and cannot be split; use --tp-size 1")
    if method := quantization_of(hf_config):
        raise ConfigError(f"--tp-size {group.size}: weights quantized by {method!r} cannot be split; use --tp-size 1")
    folder = None if config.model.load_format == "dummy" else Path(config.model_dir)
    plans: list[ShardPlan] = []

    def create(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        plans.append(make_plan(self, group.size, group.rank))
        shrink(self, plans[-1])

    # from_pretrained makes the model, on the meta device: this is how its parameters get the rank's shapes.
    members = {"__init__": create, "__module__": model_class.__module__}
    rank_class: Any = type(model_class.__name__, (model_class,), members)
    with ExitStack() as files:
        if folder is None:
            torch.manual_seed(config.model.random_seed + group.rank)
            tensors: dict[str, Any] = {}
        else:
            with torch.device("meta"):
                outline = model_class(hf_config)
            tensors = dict(_parts(outline, make_plan(outline, group.size, group.rank), folder, files))
        model, report = rank_class.from_pretrained(
            None, config=hf_config, state_dict=tensors, dtype=dtype, device_map={"": device}, output_loading_info=True
        )
    (plan,) = plans
    if folder is None:
        for name, parameter in model.named_parameters():
            if name not in plan.cuts:  # what every rank holds must be the same
                group.copy_from_first(parameter.data)
    else:
        check_complete(report, folder)
    connect(model, plan, group)
    return model


def _parts(model: nn.Module, plan: ShardPlan, folder: Path, files: ExitStack) -> Iterator[tuple[str, PartOfTensor]]:
    """Every checkpoint tensor by name, cut as the parameter it goes into."""
    sources = _open(folder, files)
    state: dict[str, Any] = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for key, source in sources.items():
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = key, None
        cut = plan.cuts.get(target)
        if cut is not None and pattern is not None:
            cut = cut_before(by_pattern[pattern], cut, target)
        yield key, PartOfTensor(source, cut)


def cut_before(converter: WeightConverter, cut: Cut, target: str) -> Cut:
    """The cut of a converter's sources that makes the cut of its result.

    Stacking adds a dimension in front; joining lays the sources behind one another in the packed
    dimension, so each is cut by itself. ``ConfigError`` for other conversions.
    """
    operations = converter.operations
    simple = all(isinstance(one, MergeModulelist | Concatenate) for one in operations)
    if not simple or len(converter.target_patterns) > 1:
        kinds = ", ".join(type(one).__name__ for one in operations)
        raise ConfigError(f"--tp-size: {target} is made from checkpoint tensors by {kinds}, which cannot be split")
    if any(isinstance(one, Concatenate) for one in operations):
        parts = len(converter.source_patterns)
        if parts != len(cut.spans):
            raise ConfigError(f"--tp-size: {target} joins {parts} checkpoint tensors, split as {len(cut.spans)}")
        return Cut(cut.dim, cut.size // parts, cut.spans[:1])
    return cut


def _open(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Name -> slice of every tensor in the folder's safetensors files, which stay mapped while ``files`` is open."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    found: dict[str, Any] = {}
    for name in names:
        try:
            handle = files.enter_context(safe_open(folder / name, framework="pt"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {folder / name}: {error}; --tp-size needs safetensors files") from error
        found |= {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
    return found

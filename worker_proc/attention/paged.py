"""Attention over a paged KV pool, in the form transformers' attention interface calls.

The pool of a layer is two tensors [num_pages * page_size, num_kv_heads, head_dim]; see ``plan.py``
for cells. Layers are told apart by the order of their calls in a forward pass: a model's own
``layer_idx`` need not be there, nor be unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import InvariantError
from worker_proc.attention.backend import AttentionBackend
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.runner import PackedBatch


class PagedAttention:
    """The KV pools of a model and the attention over them. ``dtype`` is the pools'.

    ``begin_step`` before and ``end_step`` after each forward pass; in between the model calls the
    instance once per layer.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        self.specs = tuple(specs)
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._plan: Any = None
        self._layer = 0

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return sum(spec.bytes_per_token(self.dtype.itemsize) for spec in self.specs)

    def allocate(self, num_pages: int, spare_pages: int = 0) -> None:
        """Create zeroed pools of ``num_pages`` pages (dropping earlier ones), and ``spare_pages`` behind them."""
        self.release()
        cells = (num_pages + spare_pages) * self.page_size
        for spec in self.specs:
            for pools, dim in ((self._keys, spec.key_dim), (self._values, spec.value_dim)):
                pools.append(torch.zeros((cells, spec.num_kv_heads, dim), dtype=self.dtype, device=self.device))

    def release(self) -> None:
        """Drop the pools."""
        self._keys.clear()
        self._values.clear()

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Copy whole pages in every layer, in order: a later copy sees an earlier one."""
        page = self.page_size
        for pool in (*self._keys, *self._values):
            for source, target in zip(src.tolist(), dst.tolist(), strict=True):
                pool[target * page : (target + 1) * page].copy_(pool[source * page : (source + 1) * page])

    def begin_step(self, batch: PackedBatch) -> None:
        """Prepare for the layers' calls of one forward pass."""
        self.begin_planned(self.backend.plan(batch))

    def begin_planned(self, plan: Any) -> None:
        """As :meth:`begin_step`, with a plan of the backend's that the caller has."""
        self._plan = plan
        self._layer = 0

    def end_step(self) -> None:
        """Check that every layer was called."""
        self._plan = None
        if self._layer != len(self.specs):
            raise InvariantError(f"{self._layer} attention layers ran, the model has {len(self.specs)}")

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Transformers' attention interface: [1, heads, T, dim] each -> [1, T, heads, dim].

        ``attention_mask`` is ignored: the layer's ``LayerSpec`` says what it sees.
        """
        plan = self._plan
        if plan is None:
            raise InvariantError("attention was called outside of a step")
        spec, keys, values = self.specs[self._layer], self._keys[self._layer], self._values[self._layer]
        self._layer += 1
        args = attention_args(query, scaling, kwargs)
        packed_query, packed_key, packed_value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        self.backend.write(packed_key, packed_value, keys, values, plan)
        return self.backend.attend(packed_query, keys, values, plan, spec, args)[None], None


def attention_args(query: Tensor, scaling: float | None, kwargs: dict[str, Any]) -> AttentionArgs:
    """The per-call arguments that change the arithmetic; the probe refuses layers that pass others."""
    return AttentionArgs(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=kwargs.get("s_aux"),
    )

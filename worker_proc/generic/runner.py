"""The generic path: transformers' own model code with our attention over pages.

Tokens of all rows are packed as [1, T] with explicit positions; everything but attention works on
tokens one by one, so no layer sees where one sequence ends and the next begins.
"""

from __future__ import annotations

import itertools
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from worker_proc.attention.backend import AttentionBackend
from worker_proc.attention.choice import AttentionNeeds, choose_backend
from worker_proc.attention.kv_types import pool_dtype
from worker_proc.attention.paged import PagedAttention
from worker_proc.generic.packed_linear import PackedLinear
from worker_proc.generic.probe import probe_layers, select_attention
from worker_proc.generic.refusals import check_supported
from worker_proc.runner import PackedBatch

_ATTENTION_NUMBERS = itertools.count()
"""Attention functions are registered in transformers by name, and each runner needs its own."""


class GenericRunner:
    """A ``ModelRunner`` for a loaded transformers model, on CPU or CUDA.

    ``model`` is in eval mode and stays the caller's; its attention implementation is set here.
    ``attention`` is --attention-backend, or a backend itself; ``kv_dtype`` is --kv-cache-dtype.
    Raises ``ConfigError`` if the model cannot be served.
    """

    batch_invariant = False

    def __init__(
        self,
        model: Any,
        page_size: int,
        context_length: int = 0,
        attention: str | AttentionBackend = "auto",
        kv_dtype: str = "auto",
    ) -> None:
        text_config = model.config.get_text_config()
        limit = context_length or getattr(text_config, "max_position_embeddings", 0)
        check_supported(type(model), text_config, limit)
        self._model = model
        self.device: torch.device = model.device
        self.name = "generic-torch"
        self.page_size = page_size
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.specs, self.vocab_size = probe_layers(model)
        pool = pool_dtype(kv_dtype, model.dtype)
        if isinstance(attention, str):
            needs = AttentionNeeds(tuple(self.specs), page_size, limit, model.dtype, pool, self.device)
            attention = choose_backend(attention, needs)
        self._attention = PagedAttention(self.specs, page_size, pool, self.device, attention)
        self._key = f"quintet_paged_{next(_ATTENTION_NUMBERS)}"
        AttentionInterface.register(self._key, self._attention)
        select_attention(model, self._key)
        self._keeps_logits = "logits_to_keep" in signature(model.forward).parameters

    def kv_bytes_per_page(self) -> int:
        """Bytes one page takes over all layers."""
        return self._attention.bytes_per_token() * self.page_size

    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, shared ones once."""
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        packed: int = sum(module.packed_bytes() for module in self._model.modules() if isinstance(module, PackedLinear))
        sizes: dict[int, int] = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        return packed + sum(sizes.values())

    def allocate(self, num_pages: int) -> None:
        """Create the KV pool; ``MemoryError`` says what it would have taken."""
        try:
            self._attention.allocate(num_pages)
        except RuntimeError as error:
            need = num_pages * self.kv_bytes_per_page()
            raise MemoryError(
                f"the KV pool of {num_pages} pages x {self.kv_bytes_per_page()} bytes = {need / 2**30:.2f} GiB does "
                f"not fit on {self.device}; lower --max-total-tokens or --mem-fraction-static"
            ) from error

    def forward(self, batch: PackedBatch) -> Any:
        """Logits float32 [R, vocab_size] of ``batch.logit_rows``: NumPy on CPU, a tensor elsewhere."""
        with torch.inference_mode():
            self._attention.begin_step(batch)
            keep = torch.from_numpy(batch.logit_rows.astype(np.int64)).to(self.device)
            kwargs = {"logits_to_keep": keep} if self._keeps_logits else {}
            output = self._model(
                input_ids=torch.from_numpy(batch.ids.astype(np.int64)).to(self.device)[None],
                position_ids=torch.from_numpy(batch.positions.astype(np.int64)).to(self.device)[None],
                use_cache=False,
                **kwargs,
            )
            self._attention.end_step()
            logits = output.logits[0].float()
            if not self._keeps_logits:
                logits = logits[keep]
            return logits.numpy() if self.device.type == "cpu" else logits

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Copy whole pages in every layer, in order."""
        with torch.inference_mode():
            self._attention.copy_pages(src, dst)

    def close(self) -> None:
        """Free the pool."""
        self._attention.release()

"""The generic path: transformers' own model code with our attention over pages.

Tokens of all rows are packed as [1, T] with explicit positions; everything but attention works on
tokens one by one, so no layer sees where one sequence ends and the next begins.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
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
from worker_proc.device_io import make_io
from worker_proc.generic.graphs import Capture, DecodeGraphs, StaticInputs, put_late_ids
from worker_proc.generic.packed_linear import PackedLinear
from worker_proc.generic.probe import probe_layers, select_attention
from worker_proc.generic.refusals import check_supported
from worker_proc.runner import LateIds, PackedBatch

log = logging.getLogger(__name__)
_ATTENTION_NUMBERS = itertools.count()
"""Attention functions are registered in transformers by name, and each runner needs its own."""


class GenericRunner:
    """A ``ModelRunner`` for a loaded transformers model, on CPU or CUDA.

    ``model`` is in eval mode and stays the caller's; its attention implementation is set here, and with the Triton
    backend what lies between its matrix products goes through our kernels (``fused.py``).
    ``attention`` is --attention-backend, or a backend itself; ``kv_dtype`` is --kv-cache-dtype.
    Raises ``ConfigError`` if the model cannot be served.
    """

    batch_invariant = False
    tile_tokens = 1

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
        self._io = make_io(self.device)
        self.name = "generic-torch"
        self.page_size = page_size
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.specs, self.vocab_size = probe_layers(model)
        pool = pool_dtype(kv_dtype, model.dtype)
        if isinstance(attention, str):
            needs = AttentionNeeds(tuple(self.specs), page_size, limit, model.dtype, pool, self.device)
            attention = choose_backend(attention, needs)
        if attention.name == "triton":
            from worker_proc.generic.fused import fuse_model

            log.info("through our kernels: %s", fuse_model(model))
        self._attention = PagedAttention(self.specs, page_size, pool, self.device, attention)
        self._key = f"quintet_paged_{next(_ATTENTION_NUMBERS)}"
        AttentionInterface.register(self._key, self._attention)
        select_attention(model, self._key)
        self._keeps_logits = "logits_to_keep" in signature(model.forward).parameters
        self._context_length = limit
        self._num_pages = 0
        self._graphs: DecodeGraphs | None = None

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
        self._graphs = None  # recorded over the pool before
        self._num_pages = num_pages
        try:
            self._attention.allocate(num_pages, spare_pages=int(self._attention.backend.fits_graphs))
        except RuntimeError as error:
            need = num_pages * self.kv_bytes_per_page()
            raise MemoryError(
                f"the KV pool of {num_pages} pages x {self.kv_bytes_per_page()} bytes = {need / 2**30:.2f} GiB does "
                f"not fit on {self.device}"
            ) from error

    def record_graphs(self, most_rows: int, capture: Capture, progress: Callable[[str], None]) -> None:
        """Record decode steps of up to ``most_rows`` rows over the pool there is.

        A backend or a model that cannot be recorded runs as before, and the log says why.
        """
        backend = self._attention.backend
        if not backend.fits_graphs:
            log.warning("no CUDA graphs: attention backend %s works on the host within a step", backend.name)
            return
        with torch.inference_mode():
            try:
                self._graphs = DecodeGraphs(
                    self._decode, most_rows, self._context_length, self.page_size, self._num_pages,
                    self._io, capture, progress,
                )  # fmt: skip
            except RuntimeError as error:
                log.warning("no CUDA graphs, the model's forward cannot be recorded: %s", error)

    def _decode(self, inputs: StaticInputs) -> torch.Tensor:
        """Logits float32 [B, vocab_size] of one token per sequence, by launches alone."""
        attention = self._attention
        attention.begin_planned(
            attention.backend.decode_plan(inputs.cells, inputs.table, inputs.lens, self._context_length)
        )
        output = self._model(input_ids=inputs.ids[None], position_ids=inputs.positions[None], use_cache=False)
        attention.end_step()
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def forward(self, batch: PackedBatch) -> Any:
        """Logits float32 [R, vocab_size] of ``batch.logit_rows``: NumPy on CPU, a tensor elsewhere."""
        return self._forward(batch, None)

    def forward_late(self, batch: PackedBatch, late: LateIds) -> Any:
        """See ``AheadRunner``."""
        return self._forward(batch, late)

    def _forward(self, batch: PackedBatch, late: LateIds | None) -> Any:
        with torch.inference_mode():
            if self._graphs is not None and self._graphs.size_for(batch):
                logits = self._graphs.run(batch, late)
                return logits.numpy() if self.device.type == "cpu" else logits
            self._attention.begin_step(batch)
            keep = self._io.upload(batch.logit_rows.astype(np.int64))
            kwargs = {"logits_to_keep": keep} if self._keeps_logits else {}
            tokens = self._io.upload(np.stack([batch.ids, batch.positions]).astype(np.int64))
            if late is not None:
                put_late_ids(tokens[0], late, self._io)
            output = self._model(input_ids=tokens[:1], position_ids=tokens[1:], use_cache=False, **kwargs)
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
        """Free the graphs and the pool."""
        self._graphs = None
        self._attention.release()

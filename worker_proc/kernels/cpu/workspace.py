"""Buffers of a step: activations, scratch, the attention plan. They grow, and are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worker_proc.kernels.cpu.gemm import row_block
from worker_proc.kernels.cpu.layout import (
    ITEM_FIELDS,
    ROW_PADDING,
    STATE_FLOATS,
    STEP,
    row_bytes,
    scratch_bytes,
    scratch_records,
)
from worker_proc.kernels.cpu.model_image import ModelImage
from worker_proc.kernels.cpu.packing import huge_buffer
from worker_proc.runner import PackedBatch

PARTIAL_BYTES = 16 << 20
"""Room for the partial results of split contexts. Rows beyond it attend whole: same bits, less shared."""


INPUTS = ("ids", "positions", "query_start", "context_lens", "page_table", "logit_rows")
"""Arrays of a batch that the step reads, under the same names in its record."""


class Workspace:
    """The step record and everything it points to."""

    def __init__(self, image: ModelImage, num_threads: int) -> None:
        self._image = image
        self.steps = np.zeros(1, STEP)
        self._tokens = self._seqs = self._logit_rows = 0
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self.logit_space = np.zeros((0, 0), np.float32)
        """[R, ...]: ``vocab_pad`` logits, then the largest of each 32 of them (NaN where any is), then nothing."""
        self.first_peak = image.vocab_pad
        self._inputs = {name: np.zeros(0, np.int32) for name in INPUTS}
        """Copies of a batch's arrays. They stay where they are: finding out an array's address costs more."""
        self._sizes = {name: self.steps[name] for name in ("num_tokens", "num_seqs", "num_logits", "table_width")}
        activation_bytes = int(image.models[0]["activation_bytes"])
        parts = (image.head_pad, activation_bytes, image.panel_bytes)
        size = scratch_bytes(*parts)
        self._scratch = huge_buffer(num_threads * size, "thread scratch")
        self.owns = scratch_records(int(self._scratch.ctypes.data), num_threads, *parts)
        d = image.shape
        step = self.steps[0]
        slot = d.num_heads * (STATE_FLOATS + image.head_pad) * 4
        step["partial_rows"] = max(64, PARTIAL_BYTES // slot)
        step["partials"] = self._buffer("partials", int(step["partial_rows"]) * slot)
        step["row_block"] = row_block(max(image.hidden_pad, d.num_heads * image.head_pad), activation_bytes)
        step["inner_row_block"] = row_block(image.inner_pad, activation_bytes)
        step["x_stride"] = row_bytes(image.hidden_pad, 4)
        step["xn_stride"] = row_bytes(image.hidden_pad, activation_bytes)
        step["qkv_stride"] = row_bytes((d.num_heads + 2 * d.num_kv_heads) * image.head_pad, 4)
        step["q_stride"] = row_bytes(d.num_heads * image.head_pad, activation_bytes)
        step["logits_stride"] = row_bytes(image.vocab_pad + image.vocab_pad // 32, 4)
        step["mlp_stride"] = row_bytes(image.inner_pad, activation_bytes)

    def _buffer(self, name: str, num_bytes: int) -> int:
        self._buffers[name] = huge_buffer(num_bytes, name)
        return int(self._buffers[name].ctypes.data)

    def _reserve(self, tokens: int, seqs: int, logit_rows: int) -> None:
        step = self.steps[0]
        if tokens > self._tokens:
            self._tokens = max(64, tokens, min(2 * self._tokens, 4096))
            padded = self._tokens + ROW_PADDING
            widths = (("x", "x"), ("y", "x"), ("xn", "xn"), ("qkv", "qkv"), ("q", "q"), ("att", "q"), ("mlp", "mlp"))
            for name, stride in widths:
                step[name] = self._buffer(name, padded * int(step[f"{stride}_stride"]))
            items = self._tokens + int(step["partial_rows"])
            step["items"] = self._buffer("items", items * ITEM_FIELDS * 4)
            for name in ("split_tokens", "split_base", "seq_of"):
                step[name] = self._buffer(name, self._tokens * 4)
        if seqs > self._seqs:
            self._seqs = max(64, 2 * seqs)
            step["counts"] = self._buffer("counts", 64)
            step["split_order"] = self._buffer("split_order", self._seqs * 4)
            step["split_start"] = self._buffer("split_start", (2 * self._seqs + 1) * 4)
        if logit_rows > self._logit_rows:
            self._logit_rows = max(16, logit_rows)
            row = int(step["logits_stride"])
            step["logits"] = self._buffer("logits", self._logit_rows * row)
            self.logit_space = self._buffers["logits"].view(np.float32).reshape(-1, row // 4)

    def load(self, batch: PackedBatch) -> None:
        """Point the step record at a checked batch."""
        num_tokens, num_seqs, num_logits = len(batch.ids), len(batch.context_lens), len(batch.logit_rows)
        self._reserve(num_tokens, num_seqs, num_logits)
        for name in INPUTS:
            self._put(name, getattr(batch, name))
        sizes = self._sizes
        sizes["num_tokens"][0], sizes["num_seqs"][0], sizes["num_logits"][0] = num_tokens, num_seqs, num_logits
        sizes["table_width"][0] = batch.page_table.shape[1]

    def _put(self, name: str, values: NDArray[np.int32]) -> None:
        size = values.size
        held = self._inputs[name]
        if size > held.size:
            held = self._inputs[name] = np.zeros(max(64, 2 * size), np.int32)
            self.steps[0][name] = held.ctypes.data
        held[:size] = values.ravel() if values.ndim > 1 else values

"""How much memory a GPU has for the KV pool: what is free less what the largest step takes, found by running it."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch

from common.errors import ConfigError
from worker_proc.memory import MIN_PAGES
from worker_proc.runner import ModelRunner, PackedBatch

log = logging.getLogger(__name__)

LARGEST_CHUNK = 8192
"""Prefill tokens of the largest step where --chunked-prefill-size leaves them to the scheduler."""
GIB = 2**30


class DeviceMemory(Protocol):
    """What a device has and what a piece of work takes of it."""

    def free_bytes(self) -> int:
        """Free on the device, without what is only cached by this process."""
        ...

    def begin(self) -> None:
        """Measure from here."""
        ...

    def peak_bytes(self) -> int:
        """The most that was in use since ``begin``, less what was in use then."""
        ...


class CudaMemory:
    """A CUDA device, through torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def free_bytes(self) -> int:
        """See ``DeviceMemory``."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def begin(self) -> None:
        """See ``DeviceMemory``."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """See ``DeviceMemory``."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def largest_step(num_tokens: int, context_length: int, num_rows: int, page_size: int) -> PackedBatch:
    """A step of ``num_tokens`` prompt tokens with ``num_rows`` rows of logits, all of it in page 0."""
    lens = [min(context_length, num_tokens - begin) for begin in range(0, num_tokens, context_length)]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return PackedBatch(
        ids=np.zeros(num_tokens, np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lens]),
        query_start=starts,
        context_lens=np.array(lens, np.int32),
        page_table=np.zeros((len(lens), -(-max(lens) // page_size)), np.int32),
        logit_rows=np.arange(max(0, num_tokens - num_rows), num_tokens, dtype=np.int32),
    )


def room_for_pool(
    runner: ModelRunner, memory: DeviceMemory, chunk: int, context_length: int, num_rows: int
) -> int:
    """Bytes that the KV pool may share out: free memory less the peak of the largest step.

    ``chunk``: --chunked-prefill-size, 0 for the scheduler's choice. Creates and overwrites a pool of ``MIN_PAGES``
    pages. Raises ``ConfigError`` with the arithmetic where the step itself does not fit.
    """
    num_tokens = chunk or min(LARGEST_CHUNK, context_length)
    free = memory.free_bytes()
    runner.allocate(MIN_PAGES)
    memory.begin()
    ways_out = "lower --chunked-prefill-size or --max-running-requests, or use a smaller model or dtype"
    try:
        runner.forward(largest_step(num_tokens, context_length, min(num_rows, num_tokens), runner.page_size))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(
            f"the largest step ({num_tokens} prompt tokens, {num_rows} rows of {runner.vocab_size} logits) does not "
            f"fit into the {free / GIB:.2f} GiB that {runner.weight_bytes() / GIB:.2f} GiB of weights leave: {ways_out}"
        ) from error
    step = memory.peak_bytes()
    left = free - step
    log.info(
        "memory: %.2f GiB free with %.2f GiB of weights loaded, the largest step (%d tokens) takes %.2f, %.2f are left",
        free / GIB, runner.weight_bytes() / GIB, num_tokens, step / GIB, left / GIB,
    )  # fmt: skip
    if left < MIN_PAGES * runner.kv_bytes_per_page():
        raise ConfigError(
            f"{free / GIB:.2f} GiB free less {step / GIB:.2f} GiB for the largest step ({num_tokens} prompt tokens) "
            f"leave {left / GIB:.2f} GiB, and {MIN_PAGES} KV pages of {runner.kv_bytes_per_page()} bytes are needed: "
            f"{ways_out}"
        )
    return left

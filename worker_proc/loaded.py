"""A runner that is ready to serve, whichever way it was loaded; nothing here needs torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.config import ServerConfig
from common.errors import ConfigError
from worker_proc.generic.selfcheck import compare
from worker_proc.memory import PoolRequest, WorkerState, choose_num_pages, free_host_bytes
from worker_proc.runner import ModelRunner

if TYPE_CHECKING:
    from worker_proc.parallel.group import RankGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A runner with its pool, and what others are told about it."""

    runner: ModelRunner
    num_pages: int
    context_length: int
    device: str
    """As torch names it: cpu, cuda:0."""
    group: RankGroup | None = None
    """The other ranks, with --tp-size above 1."""


def choose_context_length(wanted: int, limit: int) -> int:
    """--context-length, at most ``limit``, the positions that the model was made for (0: it does not say)."""
    if wanted and limit and wanted > limit:
        raise ConfigError(f"--context-length {wanted} is more than the {limit} positions of the model")
    if not wanted and not limit:
        raise ConfigError("the model's config does not say how many positions it has: set --context-length")
    return wanted or limit


def pages_of_pool(
    runner: ModelRunner,
    config: ServerConfig,
    context_length: int,
    state: WorkerState | None,
    free_bytes: int | None = None,
    on_gpu: bool = False,
) -> int:
    """How many pages the pool shall have: a first incarnation's number again, else by what is free.

    ``free_bytes``: None is what the host has.
    """
    if state is not None and state.page_size == runner.page_size:
        return state.num_pages
    return choose_num_pages(
        PoolRequest(
            page_size=runner.page_size,
            bytes_per_page=runner.kv_bytes_per_page(),
            free_bytes=free_host_bytes() if free_bytes is None else free_bytes,
            on_gpu=on_gpu,
            mem_fraction=config.cache.mem_fraction_static,
            max_total_tokens=config.cache.max_total_tokens,
            useful_tokens=config.scheduler.max_running_requests * context_length,
        )
    )


def create_pool(runner: ModelRunner, num_pages: int, state: WorkerState | None) -> None:
    """The runner's pool. One that a first incarnation cannot have, the next could not have either.

    ``state``: not None where there was one that had it. What takes the memory now may be gone at the next try, so the
    MemoryError stays one, and the process is started again. Raises ConfigError otherwise.
    """
    try:
        runner.allocate(num_pages)
    except MemoryError as error:
        if state is not None:
            raise
        raise ConfigError(f"{error}; set --max-total-tokens or --mem-fraction-static lower") from error


def allocate_and_check(
    runner: ModelRunner,
    config: ServerConfig,
    context_length: int,
    state: WorkerState | None,
    reference: list[NDArray[np.float32]],
    num_embeddings: int,
) -> LoadedWorker | str:
    """A runner on the host with its pool, its logits compared with ``reference``; closed, and why, if they differ."""
    num_pages = pages_of_pool(runner, config, context_length, state)
    create_pool(runner, num_pages, state)
    result = compare(runner, reference, num_embeddings)
    log.info("start-up check of %s: error %.4f, tolerance %.4f", runner.name, result.error, result.tolerance)
    if result.ok:
        return LoadedWorker(runner, num_pages, context_length, "cpu")
    runner.close()
    return f"its logits differ from transformers' by {result.error:.3f} (tolerance {result.tolerance:.3f})"

"""Starting from a record, and keeping one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import ServerConfig
from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
from worker_proc.kernels.cpu.step_function import StepFunction
from worker_proc.loaded import LoadedWorker, allocate_and_check, choose_context_length
from worker_proc.memory import WorkerState
from worker_proc.recorded import record
from worker_proc.recorded.checkpoint import Checkpoint, weight_files

log = logging.getLogger(__name__)

UNREADABLE = (OSError, KeyError, TypeError, ValueError)
"""What files that are not as expected raise; a start goes on without a record."""


def can_be_recorded(config: ServerConfig) -> bool:
    """Whether the flags leave a model's start to its files alone, and to the CPU's fast path if that covers it."""
    return (
        config.model.load_format == "auto"
        and not config.model.trust_remote_code
        and config.worker.tp_size == 1
        and config.worker.attention_backend == config.cache.kv_cache_dtype == "auto"
    )


def load_recorded(
    config: ServerConfig, threads: int, state: WorkerState | None, progress: Callable[[str], None], step: StepFunction
) -> LoadedWorker | None:
    """The fast CPU path as an earlier start found it, without torch; None where there is no record that holds.

    ``step``: the step function, begun because the flags let expect the fast path. A record whose logits are not
    this machine's, or that cannot be read, is removed: the start that follows makes another. Raises
    ``ConfigError`` for what the user has to change.
    """
    if not can_be_recorded(config):
        return None
    folder = Path(config.model_dir)
    try:
        path = record.record_path(folder, config.model.context_length)
        found = record.read(path)
        if found is None:
            return None  # the first start of this model with these versions
        decoder = found.decoder(Checkpoint(weight_files(folder)))
    except (record.NotRecorded, *UNREADABLE) as reason:
        log.info("no record of an earlier start can be used: %s", reason)
        return None
    context_length = choose_context_length(config.model.context_length, found.notes.position_limit)
    page_size = state.page_size if state else config.cache.page_size
    try:
        fast = CpuFastRunner.from_decoder(decoder, page_size, threads, progress, step=step)
    except (RuntimeError, ValueError, MemoryError) as error:
        fast = f"it failed to build ({error})"
    if not isinstance(fast, str):
        embeddings = found.notes.num_embeddings
        loaded = allocate_and_check(fast, config, context_length, state, found.reference, embeddings)
        if isinstance(loaded, LoadedWorker):
            return loaded
        fast = loaded
        path.unlink(missing_ok=True)
    log.warning("the record of an earlier start cannot be used: %s", fast)
    return None


def keep_record(config: ServerConfig, model: Any, reference: list[NDArray[np.float32]], position_limit: int) -> None:
    """Record a start on the fast path that has passed its check. Where that cannot be done, say why in the log.

    ``model``: of transformers. ``position_limit``: as its config says; 0 where it does not.
    """
    if not can_be_recorded(config):
        return
    from worker_proc.kernels.cpu.read_model import describe

    folder = Path(config.model_dir)
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    try:
        path = record.record_path(folder, config.model.context_length)
        checkpoint = Checkpoint(weight_files(folder))
        embeddings = model.get_input_embeddings().num_embeddings
        record.save(path, describe(model), names, checkpoint, reference, position_limit, embeddings)
    except (record.NotRecorded, *UNREADABLE) as reason:
        log.info("the next start will need torch and transformers again: %s", reason)

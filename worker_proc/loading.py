"""From the configuration to a runner that is ready: device, dtype, weights, path, pool, start-up check."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from common.config import ServerConfig
from common.errors import ConfigError
from worker_proc.generic.packed_linear import pack_linears
from worker_proc.generic.refusals import check_supported
from worker_proc.generic.runner import GenericRunner
from worker_proc.generic.selfcheck import compare, reference_logits
from worker_proc.memory import PoolRequest, WorkerState, choose_num_pages, free_host_bytes
from worker_proc.runner import ModelRunner

if TYPE_CHECKING:
    from worker_proc.kernels.cpu.step_function import StepFunction

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A runner with its pool, and what others are told about it."""

    runner: ModelRunner
    num_pages: int
    context_length: int
    device: torch.device


def load_worker(
    config: ServerConfig,
    threads: int,
    state: WorkerState | None,
    progress: Callable[[str], None] = log.info,
    step: StepFunction | None = None,
) -> LoadedWorker:
    """Load the model and choose its path. ``state``: the first incarnation's choices, to be repeated.

    ``progress`` is told what takes long. ``step``: the fast CPU path's compiled function, when it was
    begun before torch was imported. Raises ``ConfigError`` for anything the user has to change.
    """
    if config.worker.tp_size != 1:
        raise ConfigError(
            f"--tp-size {config.worker.tp_size}: tensor parallelism is not supported yet; use --tp-size 1"
        )
    hf_logging.disable_progress_bar()
    device = choose_device(config.worker.device)
    torch.set_num_threads(threads)
    dtype = choose_dtype(state.dtype if state else config.model.dtype, device)
    hf_config = AutoConfig.from_pretrained(config.model_dir, trust_remote_code=config.model.trust_remote_code)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if model_class is not None:
        text_config = hf_config.get_text_config()
        limit = config.model.context_length or getattr(text_config, "max_position_embeddings", 0)
        check_supported(model_class, text_config, limit)
    elif not config.model.trust_remote_code:
        raise ConfigError(
            f"{config.model_dir}: model type {hf_config.model_type!r} is not a causal language model of transformers; "
            "--trust-remote-code lets code that comes with a model run"
        )
    context_length = choose_context_length(config.model.context_length, hf_config)
    model = load_model(config, hf_config, dtype, device)
    reference = reference_logits(model)
    embeddings = model.get_input_embeddings().num_embeddings
    page_size = state.page_size if state else config.cache.page_size
    wanted = config.worker.worker_path if state is None else _path_of(state.path)
    if wanted == "cpu-fast" or (wanted == "auto" and device.type == "cpu" and dtype == torch.bfloat16):
        fast = try_cpu_fast(model, page_size, threads, progress, step)
        if not isinstance(fast, str):
            num_pages = allocate(fast, config, context_length, device, state)
            result = compare(fast, reference, embeddings)
            log.info("start-up check of %s: error %.4f, tolerance %.4f", fast.name, result.error, result.tolerance)
            if result.ok:
                return LoadedWorker(fast, num_pages, context_length, device)
            fast.close()
            fast = f"its logits differ from transformers' by {result.error:.3f} (tolerance {result.tolerance:.3f})"
        if wanted == "cpu-fast":
            raise ConfigError(f"--worker-path cpu-fast cannot run this model: {fast}; --worker-path generic can")
        log.warning("the fast CPU path is not used: %s; falling back to the generic path", fast)
    num_packed = pack_linears(model)
    runner, words = build_generic(model, reference, config, context_length, state)
    if runner is None and num_packed:
        log.warning("packed linear layers do not fit this model (%s); loading it again without", words)
        model = load_model(config, hf_config, dtype, device)
        runner, words = build_generic(model, reference, config, context_length, state)
    if runner is None:
        raise ConfigError(f"{type(model).__name__} is not supported: {words}")
    return runner


def build_generic(
    model: Any,
    reference: list[NDArray[np.float32]],
    config: ServerConfig,
    context_length: int,
    state: WorkerState | None,
) -> tuple[LoadedWorker | None, str]:
    """The generic path for a model, allocated and checked; or None and why its logits are not the model's."""
    runner = GenericRunner(model, state.page_size if state else config.cache.page_size, context_length)
    num_pages = allocate(runner, config, context_length, runner.device, state)
    result = compare(runner, reference, model.get_input_embeddings().num_embeddings)
    log.info("start-up check of %s: error %.5f, tolerance %.4f", runner.name, result.error, result.tolerance)
    if result.ok:
        return LoadedWorker(runner, num_pages, context_length, runner.device), ""
    runner.close()
    return None, (
        f"its logits over pages differ from transformers' own by {result.error:.3f} (tolerance "
        f"{result.tolerance:.3f}), so it keeps a state that pages do not hold"
    )


def _path_of(name: str) -> str:
    return "cpu-fast" if name == "cpu-fast" else "generic"


def try_cpu_fast(
    model: Any, page_size: int, threads: int, progress: Callable[[str], None], step: StepFunction | None = None
) -> ModelRunner | str:
    """The fast CPU path for a model, or why it cannot run."""
    try:
        from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
    except ImportError as error:
        return f"it cannot be imported ({error})"
    try:
        runner: ModelRunner | str = CpuFastRunner.try_build(model, page_size, threads, progress, step=step)
    except (RuntimeError, ValueError, MemoryError) as error:
        return f"it failed to build ({error})"
    return runner


def choose_device(wanted: str) -> torch.device:
    """--device: ``auto`` is the first CUDA device if there is one."""
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if wanted == "cuda":
        raise ConfigError("--device cuda: torch sees no CUDA device (a CPU build of torch, or no driver)")
    return torch.device("cpu")


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """--dtype: ``auto`` is bfloat16 where the device calculates in it, else float32."""
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    has_bf16 = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_bf16()
    return torch.bfloat16 if has_bf16 else torch.float32


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """The CPU multiplies bfloat16 in hardware (AVX512_BF16, AMX, Armv8.6, Apple M2 and later)."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def choose_context_length(wanted: int, hf_config: Any) -> int:
    """--context-length, at most what the model was made for."""
    limit = int(getattr(hf_config.get_text_config(), "max_position_embeddings", 0) or 0)
    if wanted and limit and wanted > limit:
        raise ConfigError(f"--context-length {wanted} is more than the {limit} positions of the model")
    if not wanted and not limit:
        raise ConfigError("the model's config does not say how many positions it has: set --context-length")
    return wanted or limit


def load_model(config: ServerConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The transformers model in eval mode on the device; random weights with --load-format dummy."""
    if config.model.load_format == "dummy":
        torch.manual_seed(config.model.random_seed)
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, trust_remote_code=config.model.trust_remote_code
        )
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.model_dir, config=hf_config, dtype=dtype, trust_remote_code=config.model.trust_remote_code
            )
        except OSError as error:
            raise ConfigError(f"cannot load the weights in {config.model_dir}: {error}") from error
    return model.eval().requires_grad_(False).to(device)


def allocate(
    runner: ModelRunner, config: ServerConfig, context_length: int, device: torch.device, state: WorkerState | None
) -> int:
    """Choose the number of pages and create the pool."""
    if state is not None and state.page_size == runner.page_size:
        num_pages = state.num_pages
    else:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
        num_pages = choose_num_pages(
            PoolRequest(
                page_size=runner.page_size,
                bytes_per_page=runner.kv_bytes_per_page(),
                free_bytes=free,
                on_gpu=device.type == "cuda",
                mem_fraction=config.cache.mem_fraction_static,
                max_total_tokens=config.cache.max_total_tokens,
                useful_tokens=config.scheduler.max_running_requests * context_length,
            )
        )
    runner.allocate(num_pages)
    return num_pages

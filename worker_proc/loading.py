"""From the configuration to a runner that is ready: device, dtype, weights, path, pool, start-up check."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from common.config import ServerConfig
from common.errors import ConfigError
from worker_proc.generic.graphs import DEFAULT_MOST_ROWS, CudaCapture
from worker_proc.generic.packed_linear import pack_linears
from worker_proc.generic.progress import loading_told
from worker_proc.generic.quantized import check_complete, explained, how_it_runs, quantization_of
from worker_proc.generic.refusals import check_supported
from worker_proc.generic.runner import GenericRunner
from worker_proc.generic.selfcheck import FP8_TOLERANCE, compare, reference_logits
from worker_proc.generic.warmup import CudaMemory, room_for_pool
from worker_proc.lean_imports import with_compiler
from worker_proc.loaded import LoadedWorker, allocate_and_check, choose_context_length, create_pool, pages_of_pool
from worker_proc.memory import WorkerState, free_host_bytes
from worker_proc.parallel.graphs import AgreedCapture
from worker_proc.parallel.group import Membership, RankGroup
from worker_proc.parallel.weights import load_shard
from worker_proc.precision import choose_precision, fast_path_may_take
from worker_proc.recorded.start import keep_record
from worker_proc.runner import ModelRunner

if TYPE_CHECKING:
    from worker_proc.kernels.cpu.step_function import StepFunction

log = logging.getLogger(__name__)


def load_worker(
    config: ServerConfig,
    threads: int,
    state: WorkerState | None,
    progress: Callable[[str], None] = log.info,
    step: StepFunction | None = None,
    member: Membership | None = None,
) -> LoadedWorker:
    """Load the model and choose its path. ``state``: the first incarnation's choices, to be repeated.

    ``progress`` is told what takes long. ``step``: the fast CPU path's compiled function, when it was
    begun before torch was imported. ``member``: this process is one rank of several, all of which load at
    the same time. Raises ``ConfigError`` for anything the user has to change.
    """
    hf_logging.disable_progress_bar()
    device = choose_device(config.worker.device, member)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    torch.set_num_threads(threads)
    hf_config = AutoConfig.from_pretrained(config.model_dir, trust_remote_code=config.model.trust_remote_code)
    if device.type != "cpu" or quantization_of(hf_config):
        with_compiler()  # kernels of others, which may want it
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
    positions = int(getattr(hf_config.get_text_config(), "max_position_embeddings", 0) or 0)
    context_length = choose_context_length(config.model.context_length, positions)
    wanted = config.worker.worker_path if state is None else _path_of(state.path)
    if member is not None:
        wanted = path_of_ranks(wanted, member.size)
    group = None if member is None else RankGroup(member, device)
    own_attention = config.worker.attention_backend == config.cache.kv_cache_dtype == "auto"
    tries_fast = wanted == "cpu-fast" or (wanted == "auto" and device.type == "cpu" and own_attention)
    named = state.dtype if state else config.model.dtype
    precision = choose_precision(named, device, tries_fast and fast_path_may_take(hf_config))
    dtype = precision.dtype
    model = load_model(config, hf_config, dtype, device, group, progress)
    reference = reference_logits(model)
    if wanted == "cpu-fast" or (tries_fast and dtype == torch.bfloat16):
        found = load_fast(model, reference, config, context_length, threads, state, progress, step)
        if isinstance(found, LoadedWorker):
            keep_record(config, model, reference, positions)
            return found
        if wanted == "cpu-fast":
            raise ConfigError(f"--worker-path cpu-fast cannot run this model: {found}; --worker-path generic can")
        log.warning("the fast CPU path is not used: %s; falling back to the generic path", found)
        if precision.is_for_fast_path:
            dtype = precision.generic
            log.info("loading the weights again in %s, which this CPU calculates faster in than bfloat16", dtype)
            del model  # the host may have no room for both
            gc.collect()
            model = load_model(config, hf_config, dtype, device, group, progress)
            reference = reference_logits(model)
    num_packed = pack_linears(model)
    runner, words = build_generic(model, reference, config, context_length, state, group, progress)
    if runner is None and num_packed:
        log.warning("packed linear layers do not fit this model (%s); loading it again without", words)
        model = load_model(config, hf_config, dtype, device, group, progress)
        runner, words = build_generic(model, reference, config, context_length, state, group, progress)
    if runner is None:
        raise ConfigError(f"{type(model).__name__} is not supported: {words}")
    return runner


def load_fast(
    model: Any,
    reference: list[NDArray[np.float32]],
    config: ServerConfig,
    context_length: int,
    threads: int,
    state: WorkerState | None,
    progress: Callable[[str], None],
    step: StepFunction | None,
) -> LoadedWorker | str:
    """The fast CPU path for a model, allocated and checked; or why it cannot serve."""
    page_size = state.page_size if state else config.cache.page_size
    fast = try_cpu_fast(model, page_size, threads, progress, step)
    if isinstance(fast, str):
        return fast
    return allocate_and_check(
        fast, config, context_length, state, reference, model.get_input_embeddings().num_embeddings
    )


def build_generic(
    model: Any,
    reference: list[NDArray[np.float32]],
    config: ServerConfig,
    context_length: int,
    state: WorkerState | None,
    group: RankGroup | None = None,
    progress: Callable[[str], None] = log.info,
) -> tuple[LoadedWorker | None, str]:
    """The generic path for a model, allocated and checked; or None and why its logits are not the model's."""
    page_size = state.page_size if state else config.cache.page_size
    attention, kv_dtype = config.worker.attention_backend, config.cache.kv_cache_dtype
    runner = GenericRunner(model, page_size, context_length, attention, kv_dtype)
    num_pages = allocate(runner, config, context_length, runner.device, state, group)
    record_graphs(runner, config, group, progress)  # before the check, whose last step is then a replay
    tolerance = FP8_TOLERANCE if kv_dtype == "fp8_e4m3" else None
    result = compare(runner, reference, model.get_input_embeddings().num_embeddings, tolerance)
    log.info("start-up check of %s: error %.5f, tolerance %.4f", runner.name, result.error, result.tolerance)
    ok = result.ok if group is None else bool(group.least(int(result.ok)))  # every rank goes the same way
    if ok:
        return LoadedWorker(runner, num_pages, context_length, str(runner.device), group), ""
    runner.close()
    return None, (
        f"its logits over pages differ from transformers' own by {result.error:.3f} (tolerance "
        f"{result.tolerance:.3f}), so it keeps a state that pages do not hold"
    )


def record_graphs(
    runner: GenericRunner, config: ServerConfig, group: RankGroup | None, progress: Callable[[str], None]
) -> None:
    """CUDA graphs of decode steps, as --cuda-graph-max-bs and --disable-cuda-graph say.

    Over several ranks only where --cuda-graph-max-bs asks for them; every rank records the same sizes.
    """
    most, off = config.worker.cuda_graph_max_bs, config.worker.disable_cuda_graph
    if runner.device.type != "cuda":
        if most:
            raise ConfigError(f"--cuda-graph-max-bs {most}: the model runs on {runner.device}, leave the flag out")
    elif off:
        log.info("no CUDA graphs: --disable-cuda-graph")
    elif group is None:
        most = most or min(DEFAULT_MOST_ROWS, config.scheduler.max_running_requests)
        runner.record_graphs(most, CudaCapture(), progress)
    elif most:
        runner.record_graphs(most, AgreedCapture(CudaCapture(beside_threads=True), group), progress)
    else:
        log.info("no CUDA graphs: over ranks they are off unless --cuda-graph-max-bs asks for them (docs/gpu.md)")


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


def path_of_ranks(wanted: str, num_ranks: int) -> str:
    """The path that several ranks take instead of ``wanted``: always the generic one, said in the log."""
    if wanted == "cpu-fast":
        raise ConfigError(f"--worker-path cpu-fast computes on one rank; --tp-size {num_ranks} needs generic")
    if wanted == "auto":
        log.info("--tp-size %d: the generic path, split over the ranks; cpu-fast computes on one rank only", num_ranks)
    return "generic"


def choose_device(wanted: str, member: Membership | None = None) -> torch.device:
    """--device: ``auto`` is the first CUDA device if there is one, or the rank's own."""
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if member is not None and member.size > torch.cuda.device_count():
            have = torch.cuda.device_count()
            raise ConfigError(f"--tp-size {member.size}: torch sees {have} CUDA devices, and each rank needs its own")
        return torch.device("cuda", 0 if member is None else member.rank)
    if wanted == "cuda":
        raise ConfigError("--device cuda: torch sees no CUDA device (a CPU build of torch, or no driver)")
    return torch.device("cpu")


def load_model(
    config: ServerConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
    progress: Callable[[str], None],
) -> Any:
    """The transformers model in eval mode on the device, or this rank's part of it.

    Random weights with --load-format dummy. Files are mapped, and read tensor by tensor onto the device.
    """
    method = quantization_of(hf_config)
    if group is not None:
        with loading_told(progress):
            model = load_shard(config, hf_config, dtype, device, group)
    elif config.model.load_format == "dummy":
        torch.manual_seed(config.model.random_seed)
        with device:
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, trust_remote_code=config.model.trust_remote_code
            )
    else:
        try:
            with loading_told(progress), explained(method):
                model, report = AutoModelForCausalLM.from_pretrained(
                    config.model_dir,
                    config=hf_config,
                    dtype=dtype,
                    trust_remote_code=config.model.trust_remote_code,
                    device_map={"": device} if device.type != "cpu" else None,
                    output_loading_info=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot load the weights in {config.model_dir}: {error}") from error
        check_complete(report, config.model_dir)
        if method:
            log.info("the checkpoint is quantized by %s; %s", method, how_it_runs(model))
        else:
            model = model.to(device)
    return model.eval().requires_grad_(False)


def allocate(
    runner: ModelRunner,
    config: ServerConfig,
    context_length: int,
    device: torch.device,
    state: WorkerState | None,
    group: RankGroup | None = None,
) -> int:
    """Choose the number of pages, on every rank the same, and create the pool."""
    if group is not None:
        group.wait_for_all()  # the weights of all are loaded, the pool of none exists: now the free memory is measured
    sharers = 1 if group is None else group.size
    on_gpu = device.type == "cuda"
    if state is not None or not on_gpu:
        free = free_host_bytes() // sharers
    else:
        chunk, rows = config.scheduler.chunked_prefill_size, config.scheduler.max_running_requests
        free = room_for_pool(runner, CudaMemory(device), chunk, context_length, rows)
    num_pages = pages_of_pool(runner, config, context_length, state, free, on_gpu)
    if group is not None:
        num_pages = group.least(num_pages)
    create_pool(runner, num_pages, state)
    return num_pages

"""The worker process: weights, KV pages, sampling. The only process that imports torch."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.channels import Receiver
from common.config import ServerConfig, WorkerConfig
from common.errors import ConfigError
from common.messages import WorkerReady
from common.process import ProcessContext
from worker_proc.grammar_protocol import GrammarBackend
from worker_proc.loop import HeartbeatThread, Pulse, WorkerLoop
from worker_proc.memory import WorkerState, load_state, save_state
from worker_proc.sampling.request import AheadSampler, Sampler
from worker_proc.threads import num_threads, set_thread_environment

if TYPE_CHECKING:  # imported later, or not at all
    from worker_proc.loaded import LoadedWorker
    from worker_proc.parallel.group import Membership
    from worker_proc.parallel.late import SharedLateIds
    from worker_proc.runner import AheadRunner, ModelRunner
    from worker_proc.speculation.speculator import Speculator

log = logging.getLogger(__name__)


def main(context: ProcessContext) -> None:
    """Load, announce, and run steps until asked to stop."""
    threads = num_threads(context.config.worker.cpu_threads, context.config.worker.tp_size)
    set_thread_environment(os.environ, threads)  # before the first import of torch and Numba
    pulse = Pulse()
    heart = HeartbeatThread(context, pulse)
    heart.start()
    try:
        serve(context, threads, pulse)
    finally:
        heart.stop()


def serve(context: ProcessContext, threads: int, pulse: Pulse) -> None:
    """Build the worker and run its loop."""
    began = time.perf_counter()
    # Channels first: what the scheduler sends while the weights load waits in the inbox.
    inbox = context.channels.receiver(f"rank-{context.index}" if context.index else context.name)
    outbox = context.channels.sender("scheduler-work")
    config, rank = context.config, context.index
    state = load_state(context.run_dir, rank)

    def progress(words: str) -> None:
        pulse.detail, pulse.progress = words, pulse.progress + 1
        log.info("%s", words)

    # Kernels next: they compile, or come from the disk, while torch is imported and the weights load.
    from worker_proc.kernels.cpu.arch import is_described
    from worker_proc.kernels.cpu.step_function import begin_early

    path, dtype = (state.path, state.dtype) if state else (config.worker.worker_path, config.model.dtype)
    if config.worker.tp_size > 1 or not is_described(model_type(Path(config.model_dir))):
        path = "generic"
    step = begin_early(path, config.worker.device, dtype, progress)
    from worker_proc.executor import StepExecutor

    loaded = None
    if step is not None:
        from worker_proc.recorded.start import load_recorded

        imported = time.perf_counter()
        loaded = load_recorded(config, threads, state, progress, step)
    if loaded is None:
        load_worker = import_loading(config)
        imported = time.perf_counter()
        loaded = load_worker(config, threads, state, progress, step, membership(context))
    runner = loaded.runner
    gc.collect()  # the transformers model, where a fast path has packed its weights
    if rank:
        remember(context, loaded, state)
        follow(context, loaded, inbox, pulse)
        return
    sampler = make_sampler(loaded.device, threads, runner)
    if loaded.group is not None:
        runner = lead(context, loaded)
    grammars = make_grammar_backend(context, runner.vocab_size)
    ahead = both_ahead(runner, sampler)
    speculator, step_seconds = make_speculator(config.worker, loaded, runner, threads, ahead is not None, state)
    remember(context, loaded, state, step_seconds)
    executor = StepExecutor(runner, sampler, grammars, ahead=ahead, speculator=speculator)
    ready = WorkerReady(
        epoch=0,
        generation=context.generation,
        rank=rank,
        num_pages=loaded.num_pages,
        page_size=runner.page_size,
        context_len=loaded.context_length,
        vocab_size=runner.vocab_size,
        max_slots=config.scheduler.max_running_requests,
        model_path=runner.name,
        batch_invariant=runner.batch_invariant,
        dtype=runner.dtype,
        device=loaded.device,
        threads=threads,
        kv_bytes_per_token=runner.kv_bytes_per_page() // runner.page_size,
        weight_bytes=runner.weight_bytes(),
        max_drafts=0 if speculator is None else speculator.max_drafts,
        tile_tokens=runner.tile_tokens,
    )
    pulse.info = describe(ready, config.model_dir, config.worker.tp_size)
    log.info("imports took %.1f s, loading %.1f s", imported - began, time.perf_counter() - imported)
    log.info("ready: %s", ", ".join(f"{key} {value}" for key, value in pulse.info.items()))
    pulse.ready, pulse.detail, pulse.progress = True, "serving", 1
    try:
        WorkerLoop(context, executor, inbox, outbox, ready, pulse).run()
    finally:
        executor.close()


def remember(
    context: ProcessContext, loaded: LoadedWorker, state: WorkerState | None, step_seconds: Sequence[float] = ()
) -> None:
    """What the next incarnation repeats, written by the first."""
    if state is None:
        runner = loaded.runner
        chosen = WorkerState(
            path=runner.name,
            dtype=runner.dtype,
            num_pages=loaded.num_pages,
            page_size=runner.page_size,
            step_seconds=list(step_seconds),
        )
        save_state(context.run_dir, context.index, chosen)


def make_speculator(
    config: WorkerConfig,
    loaded: LoadedWorker,
    runner: ModelRunner,
    threads: int,
    runs_ahead: bool,
    state: WorkerState | None,
) -> tuple[Speculator | None, list[float]]:
    """As --speculative-algorithm says, and the step times it goes by: measured, or those of the first incarnation.

    Raises ``ConfigError`` where it was asked for and steps run ahead of the ids.
    """
    wanted = config.speculative_algorithm
    if wanted == "none" or (wanted == "auto" and (runs_ahead or not runner.batch_invariant)):
        return None, []
    if runs_ahead:
        raise ConfigError(
            f"--speculative-algorithm ngram: on {loaded.device} a step is launched before the ids of the last are"
            " known, so there is nothing to look up; leave the flag out"
        )
    from worker_proc.speculation import step_times
    from worker_proc.speculation.speculator import Speculator

    max_tokens = min(loaded.num_pages * runner.page_size, loaded.context_length)
    seconds = state.step_seconds if state and state.step_seconds else step_times.measure(runner, max_tokens, threads)
    most = config.speculative_num_draft_tokens
    words = ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in zip(step_times.NUM_TOKENS, seconds, strict=True))
    log.info("up to %d drafts of a request in a step; milliseconds of steps by tokens: %s", most, words)
    return Speculator(most, loaded.context_length, step_times.StepTimes(seconds)), seconds


def model_type(folder: Path) -> str:
    """What config.json calls the model's kind; empty where that cannot be read (loading will say why)."""
    try:
        return str(json.loads((folder / "config.json").read_text()).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def import_loading(config: ServerConfig) -> Callable[..., LoadedWorker]:
    """``load_worker``, and with it torch and as little as possible of transformers."""
    from worker_proc.lean_imports import without_compiler, without_ranks

    if config.worker.tp_size == 1 and not config.model.trust_remote_code:
        without_ranks()
        without_compiler()
    from worker_proc.loading import load_worker

    return load_worker


def membership(context: ProcessContext) -> Membership | None:
    """This process's place among the ranks; None with --tp-size 1."""
    config = context.config
    if config.worker.tp_size == 1:
        return None
    from worker_proc.parallel.group import Membership

    patience = max(config.runtime.start_timeout_s, config.runtime.hang_timeout_s)
    return Membership(context.index, config.worker.tp_size, context.generation, context.run_dir, patience)


def lead(context: ProcessContext, loaded: LoadedWorker) -> ModelRunner:
    """Rank 0's runner, once every rank is ready to follow."""
    from worker_proc.parallel.leader import LeadingRunner

    others = [context.channels.sender(f"rank-{rank}") for rank in range(1, context.config.worker.tp_size)]
    return LeadingRunner(loaded.runner, others, context.generation, lambda: context.stopping, meet(loaded))


def follow(context: ProcessContext, loaded: LoadedWorker, inbox: Receiver[Any], pulse: Pulse) -> None:
    """Any other rank: compute with rank 0 until it ends."""
    from worker_proc.parallel.follower import FollowerLoop

    late = meet(loaded)
    log.info("rank %d of %d follows", context.index, context.config.worker.tp_size)
    pulse.ready, pulse.detail, pulse.progress = True, "serving", 1
    FollowerLoop(context, loaded.runner, inbox, pulse, late).run()


def meet(loaded: LoadedWorker) -> SharedLateIds | None:
    """Wait until every rank is here; how ids go from rank 0's device to the others'."""
    import torch

    from worker_proc.device_io import make_io
    from worker_proc.parallel.late import SharedLateIds

    if loaded.group is None:
        return None
    loaded.group.wait_for_all()
    return SharedLateIds(loaded.group, make_io(torch.device(loaded.device)))


def describe(ready: WorkerReady, model: str, num_ranks: int = 1) -> dict[str, str]:
    """The lines of the start-up table."""
    tokens = ready.num_pages * ready.page_size
    each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    return {
        "model": model,
        "dtype": ready.dtype,
        "path": ready.model_path,
        "device": ready.device,
        "threads": f"{ready.threads}{each}",
        "weights": f"{ready.weight_bytes / 2**20:.0f} MiB{each}",
        "pages": f"{ready.num_pages} x {ready.page_size}",
        "kv": f"{tokens} tokens, {tokens * ready.kv_bytes_per_token / 2**20:.0f} MiB{each}",
        "context": str(ready.context_len),
    }


def make_sampler(device: str, threads: int, runner: ModelRunner) -> Sampler:
    """The sampler for where the logits are."""
    if device != "cpu":
        return make_gpu_sampler(device)
    from worker_proc.sampling.cpu import CpuSampler

    CpuSampler(threads).warm_up(runner.vocab_size)  # on logits that no runner has computed
    return CpuSampler(threads, argmax=getattr(runner, "argmax", None))


def make_gpu_sampler(device: str) -> Sampler:
    """Our Triton kernels, or torch's own operations where Triton is not installed."""
    try:
        from worker_proc.sampling.gpu import GpuSampler
    except ImportError as error:
        from worker_proc.sampling.torch_sampler import TorchSampler

        log.warning("sampling without Triton's kernels: %s", error)
        return TorchSampler()
    import torch

    from worker_proc.device_io import make_io

    return GpuSampler(make_io(torch.device(device)))


def both_ahead(runner: Any, sampler: Any) -> tuple[AheadRunner, AheadSampler] | None:
    """Runner and sampler, if both can go on before the host has seen an id: on GPUs with our sampling kernels."""
    return (runner, sampler) if hasattr(runner, "forward_late") and hasattr(sampler, "begin") else None


def make_grammar_backend(context: ProcessContext, vocab_size: int) -> GrammarBackend | None:
    """The configured grammar backend; None when constrained decoding is off."""
    if context.config.worker.grammar_backend == "none":
        return None
    folder = Path(context.config.model_dir)
    if not (folder / "tokenizer.json").exists():
        log.warning("constrained decoding is off: %s has no tokenizer.json", folder)
        return None
    from worker_proc.grammar.backend import LLGuidanceBackend

    backend: GrammarBackend = LLGuidanceBackend(folder / "tokenizer.json", vocab_size, model_eos_ids(folder))
    return backend


def model_eos_ids(folder: Path) -> list[int]:
    """The model's end-of-sequence ids: generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((folder / name).read_text()).get("eos_token_id")
        except (OSError, ValueError):
            continue
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list) else [found])]
    return []

"""Two processes that are the ranks of one worker: they load folder after folder and generate, for tests."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_RANKS = 2
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Job:
    """A model folder to load, and prompts to continue together, in chunks of at most ``chunk`` tokens."""

    folder: str
    prompts: list[list[int]]
    chunk: int
    dtype: str = "float32"
    load_format: str = "auto"
    attention: str = "auto"
    graph_rows: int = 0
    """Decode steps of up to so many rows are replayed, by what calls the function again in place of a GPU's graph."""
    graphs_fail_on: int = -1
    """The rank on which the second size cannot be recorded."""


@dataclass(frozen=True)
class Answer:
    """What one rank has to say of a job."""

    error: str = ""
    outputs: tuple[tuple[int, ...], ...] = ()
    num_parameters: int = 0
    """Held by the rank."""
    num_pages: int = 0
    num_kv_heads: int = 0
    vocab_size: int = 0
    num_packed: int = 0
    """Linear layers in a blocked layout."""
    num_replays: int = 0
    logits: Any = None
    """float32 [1, vocab] after the first prompt."""


class Ranks:
    """The processes, started once; :meth:`run` gives both a job."""

    def __init__(self, run_dir: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._jobs = [context.Queue() for _ in range(NUM_RANKS)]
        self._answers = [context.Queue() for _ in range(NUM_RANKS)]
        self._processes = [
            context.Process(target=_serve, args=(rank, str(run_dir), jobs, answers), daemon=True)
            for rank, (jobs, answers) in enumerate(zip(self._jobs, self._answers, strict=True))
        ]
        for process in self._processes:
            process.start()

    def run(self, job: Job) -> list[Answer]:
        """Both ranks' answers."""
        for queue in self._jobs:
            queue.put(job)
        return [queue.get(timeout=TIMEOUT_S) for queue in self._answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, run_dir: str, jobs: Any, answers: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
    import torch.distributed as dist

    from worker_proc.parallel.group import Membership

    number = 0
    while True:
        job = jobs.get()
        try:
            answer = _work(job, Membership(rank, NUM_RANKS, number, Path(run_dir), TIMEOUT_S))
        except Exception as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        number += 1
        if dist.is_initialized():
            dist.destroy_process_group()
        answers.put(answer)


def _work(job: Job, member: Any) -> Answer:
    from common.config import CacheConfig, ModelConfig, ServerConfig, WorkerConfig
    from tests.integration.test_exactness_generic import PAGE, Sequence, new_sequences, run_greedy, step
    from tests.unit.graph_fakes import CallingAgain
    from worker_proc.generic.packed_linear import PackedLinear
    from worker_proc.loading import load_worker
    from worker_proc.parallel.graphs import AgreedCapture

    config = ServerConfig(
        model=ModelConfig(dtype=job.dtype, load_format=job.load_format),  # type: ignore[arg-type]
        cache=CacheConfig(page_size=PAGE, max_total_tokens=3200 + 800 * member.rank),
        worker=WorkerConfig(cpu_threads=1, tp_size=NUM_RANKS, device="cpu", attention_backend=job.attention),  # type: ignore[arg-type]
        model_dir=job.folder,
    )
    loaded = load_worker(config, 1, None, member=member)
    runner: Any = loaded.runner
    replays = CallingAgain(fails_at=2 if job.graphs_fail_on == member.rank else 0)
    if job.graph_rows:
        runner.record_graphs(job.graph_rows, AgreedCapture(replays, loaded.group), lambda words: None)  # type: ignore[arg-type]
    outputs = run_greedy(runner, new_sequences(job.prompts), job.chunk)
    logits = step(runner, [(Sequence(list(job.prompts[0]), list(range(40))), len(job.prompts[0]))]).copy()
    modules = list(runner._model.modules())
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    return Answer(
        outputs=tuple(tuple(one) for one in outputs),
        num_parameters=sum(parameter.numel() for parameter in runner._model.parameters()),
        num_pages=loaded.num_pages,
        num_kv_heads=runner.specs[0].num_kv_heads,
        vocab_size=runner.vocab_size,
        num_packed=len(packed),
        num_replays=replays.replays,
        logits=logits,
    )

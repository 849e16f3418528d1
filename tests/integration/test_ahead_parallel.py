"""Two ranks (gloo, CPU) whose steps are launched before the ids of the last are on rank 0's host: the same tokens."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.messages import Grammar
from tests.integration.tiny_models import VOCAB, greedy_alone, tiny_model
from tests.unit.worker_fakes import begin, step

pytestmark = pytest.mark.integration
TIMEOUT_S = 120.0
PAGE, NEW_TOKENS = 16, 9
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, size=n).tolist() for n in (1, 7, 20, 33)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.4, "logprobs": 1},
    {"temperature": 1.0, "grammar": Grammar(kind="regex", text="3 9")},
    {"prompt_logprobs": 0},
]


def rank(number: int, run_dir: str, folder: str, answers: Any) -> None:
    """A rank's process. Rank 0 answers with what it gave ahead, one after the other, and what it did ahead."""
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
    from common.channels import Channels
    from common.config import CacheConfig, ModelConfig, ServerConfig, WorkerConfig
    from common.process import ProcessContext
    from worker_proc.loading import load_worker
    from worker_proc.loop import Pulse
    from worker_proc.main import meet
    from worker_proc.parallel.follower import FollowerLoop
    from worker_proc.parallel.group import Membership
    from worker_proc.parallel.leader import LeadingRunner

    config = ServerConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(page_size=PAGE, max_total_tokens=PAGE * 64),
        worker=WorkerConfig(cpu_threads=1, tp_size=2, device="cpu"),
        model_dir=folder,
    )
    channels = Channels(Path(run_dir))
    inbox = channels.receiver(f"rank-{number}")
    loaded = load_worker(config, 1, None, member=Membership(number, 2, 0, Path(run_dir), TIMEOUT_S))
    late = meet(loaded)
    if number:
        FollowerLoop(
            ProcessContext("worker", 1, 0, config, channels.run_dir, channels), loaded.runner, inbox, Pulse(), late
        ).run()
        return
    try:
        runner = LeadingRunner(loaded.runner, [channels.sender("rank-1")], 0, lambda: False, late)
        answers.put((run(runner, ahead=True), run(runner, ahead=False)))
        runner.close()
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


def run(runner: Any, ahead: bool) -> tuple[list[list[int]], list[float], list[str]]:
    """(ids of each request, log-probabilities, what was launched and waited for)."""
    import torch

    from common.messages import unpack_f32
    from tests.unit.ahead_support import BranchBackend, Later, LateSampler, LoopDriver, Watch, WatchedExecutor, facts
    from worker_proc.sampling.cpu import CpuSampler

    watch = Watch()

    class OnDevice(Later):
        """Its ids are a tensor."""

        @property
        def ids(self) -> Any:
            return torch.from_numpy(super().ids)

    class Sampler(LateSampler):
        made = OnDevice

    class Runner:
        """Says when it computes with ids that it has not."""

        def __getattr__(self, name: str) -> Any:
            return getattr(runner, name)

        def forward_late(self, batch: Any, late: Any) -> Any:
            watch.log.append("late forward")
            return runner.forward_late(batch, late)

        def close(self) -> None:
            """The ranks are needed again."""

    both: Any = (Runner(), Sampler(watch))
    executor = WatchedExecutor(both[0], CpuSampler(1), BranchBackend(), ahead=both if ahead else None)
    worker = LoopDriver(executor, watch)
    greedy = [begin(s, prompt, pages_of(s)) for s, prompt in enumerate(PROMPTS)]
    begins = greedy + [
        begin(s, [5, 6, 7, s], pages_of(s), seed=s, **kind) for s, kind in enumerate(KINDS, len(PROMPTS))
    ]
    everyone = range(len(begins))
    chunks = [(s, len(PROMPTS[s]) if s < len(PROMPTS) else 4, []) for s in everyone]
    batches = [step(1, chunks, begins=begins)]  # type: ignore[arg-type]
    batches += [step(n, [(s, 0, []) for s in everyone]) for n in range(2, 2 * NEW_TOKENS)]
    results = worker.run(batches)
    worker.close()
    outputs: list[list[int]] = [[] for _ in begins]
    for _, counts, ids, *_ in facts(results):
        for row, part in enumerate(np.split(np.array(ids), np.cumsum(counts)[:-1])):
            outputs[row] += part.astype(int).tolist()
    values = [v for r in results for v in unpack_f32(r.logprobs).tolist()]
    values += [v for r in results for p in r.prompt_logprobs for v in unpack_f32(p.logprobs).tolist()]
    return [ids[:NEW_TOKENS] for ids in outputs], values, watch.log


def pages_of(slot: int) -> list[int]:
    return list(range(5 * slot, 5 * slot + 5))


def test_two_ranks_launch_ahead_and_give_the_tokens_of_one_after_the_other(tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = [greedy_alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    model.save_pretrained(tmp_path / "model")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    (tmp_path / "run").mkdir()
    processes = [
        context.Process(target=rank, args=(n, str(tmp_path / "run"), str(tmp_path / "model"), answers), daemon=True)
        for n in range(2)
    ]
    try:
        for process in processes:
            process.start()
        answer = answers.get(timeout=TIMEOUT_S)
        assert not isinstance(answer, str), answer
        (ids, values, log), (ids_after, values_after, log_after) = answer
        processes[1].join(TIMEOUT_S)
        assert processes[1].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert ids == ids_after and ids[: len(PROMPTS)] == expected
    assert [len(one) for one in ids] == [NEW_TOKENS] * len(ids)
    np.testing.assert_allclose(values, values_after, atol=1e-5)
    assert log_after == [] and log[:4] == ["prompt", "draw", "late forward", "see"]
    assert log.count("late forward") == 2 * NEW_TOKENS - 2

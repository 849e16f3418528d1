"""The real scheduler and the real step executor on a tiny float32 model, joined in one process.

Greedy output equals the model's alone, token for token, with the prefix cache on and off, prompts
whole and in chunks, and with so few pages that requests are evicted and preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from common.config import CacheConfig, SchedulerConfig, ServerConfig
from common.messages import ForwardBatch, Message, Reset, StepResult, ToWorker, WorkerReady, unpack_i32
from tests.integration.tiny_models import VOCAB, greedy_alone, tiny_model
from tests.unit.sched_support import Rig, request
from worker_proc.executor import StepExecutor
from worker_proc.generic.runner import GenericRunner
from worker_proc.sampling.cpu import CpuSampler

PAGE = 8
NEW_TOKENS = 8
LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 31, 33, 40, 47, 55, 64]


@dataclass
class InProcessWorker:
    """What ``worker_proc/loop.py`` does with a message, without sockets."""

    executor: StepExecutor
    num_pages: int
    max_slots: int = 16
    epoch: int = 0
    results: list[StepResult] = field(default_factory=list)

    def ready(self, epoch: int = 0) -> WorkerReady:
        runner = self.executor.runner
        return WorkerReady(
            epoch=epoch, generation=0, rank=0, num_pages=self.num_pages, page_size=runner.page_size, context_len=512,
            vocab_size=runner.vocab_size, max_slots=self.max_slots, model_path=runner.name,
            batch_invariant=runner.batch_invariant, dtype=runner.dtype, device="cpu", threads=1,
        )  # fmt: skip

    def handle(self, message: ToWorker) -> list[Message]:
        if isinstance(message, Reset):
            self.executor.reset()
            self.epoch = message.epoch
            return [self.ready(message.epoch)]
        assert isinstance(message, ForwardBatch)
        if message.epoch != self.epoch:
            return []
        self.results.append(self.executor.execute(message))
        return [self.results[-1]]


class ModelRig(Rig):
    """The scheduler's test rig with the real worker's executor behind it."""

    def __init__(self, name: str, *, pages: int = 300, radix: bool = True, **scheduler: Any) -> None:
        super().__init__(start=False, radix=radix, **scheduler)
        settings = {"chunked_prefill_size": 4096, "max_running_requests": 16} | scheduler
        cache_config = CacheConfig(page_size=PAGE, disable_radix_cache=not radix)
        self.config = ServerConfig(scheduler=SchedulerConfig(**settings), cache=cache_config)
        self.scheduler = type(self.scheduler)(self.config)
        runner = GenericRunner(tiny_model(name), page_size=PAGE)
        runner.allocate(pages)
        self.worker: Any = InProcessWorker(StepExecutor(runner, CpuSampler(1)), pages)
        self.step(self.worker.ready())
        self.work()
        self.step()


@cache
def cases(name: str) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy continuation) of sixteen prompts, half of which share a beginning of 32 ids."""
    rng, model = np.random.default_rng(11), tiny_model(name)
    shared = rng.integers(3, VOCAB, size=32).tolist()
    out = []
    for i, n in enumerate(LENGTHS):
        own = rng.integers(3, VOCAB, size=n).tolist()
        prompt = shared + own if i % 2 else own
        out.append((prompt, greedy_alone(model, prompt, NEW_TOKENS)))
    return out


def run(rig: ModelRig, name: str, tag: str) -> None:
    """All sixteen at once, and their outputs."""
    wanted = cases(name)
    rig.step(*(request(f"{tag}{i}", p, NEW_TOKENS, temperature=0.0) for i, (p, _) in enumerate(wanted)))
    rig.finish(turns=3000)
    assert {rig.reason(f"{tag}{i}") for i in range(len(wanted))} == {"length"}
    assert [rig.ids(f"{tag}{i}") for i in range(len(wanted))] == [output for _, output in wanted]


@pytest.mark.parametrize("radix", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("chunk", [4096, 16], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sixteen_at_once_and_again_from_the_cache(name: str, chunk: int, radix: bool) -> None:
    rig = ModelRig(name, radix=radix, chunked_prefill_size=chunk)
    run(rig, name, "a")
    run(rig, name, "b")
    if radix:
        assert rig.reader.num_cached_tokens > 400, "the second round came from the cache"
    else:
        assert rig.reader.num_cached_tokens == 0


@pytest.mark.parametrize("pages", [18, 30])
def test_page_pressure_changes_no_token(pages: int) -> None:
    rig = ModelRig("gemma3", pages=pages, chunked_prefill_size=24, schedule_conservativeness=0.1)
    run(rig, "gemma3", "a")
    run(rig, "gemma3", "b")
    assert rig.free + rig.cached == pages


def test_sampled_output_survives_preemption_and_does_not_depend_on_the_batch() -> None:
    def outputs(pages: int, together: bool) -> list[list[int]]:
        rig = ModelRig("qwen2", pages=pages, schedule_conservativeness=0.1)
        requests = [
            request(f"r{i}", p, NEW_TOKENS, temperature=1.0, top_p=0.9, seed=i, repetition_penalty=1.1)
            for i, (p, _) in enumerate(cases("qwen2")[:6])
        ]
        if together:
            rig.step(*requests)
            rig.finish(turns=3000)
        else:
            for one in requests:
                rig.step(one)
                rig.finish()
        return [rig.ids(one.rid) for one in requests]

    alone = outputs(300, together=False)
    assert outputs(300, together=True) == alone
    assert outputs(14, together=True) == alone


def test_prompt_logprobs_are_the_models(name: str = "llama") -> None:
    import torch

    prompt = cases(name)[9][0]
    rig = ModelRig(name, chunked_prefill_size=16)
    one = request("a", prompt, 2, temperature=0.0, logprobs=0)
    rig.step(msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, prompt_logprobs=0)))
    rig.finish()
    model = tiny_model(name)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    want = logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].numpy()
    got = np.array(rig.reader.streams["a"].prompt_logprobs)
    np.testing.assert_allclose(got[-want.size :], want, atol=2e-4)
    assert unpack_i32(rig.worker.results[0].num_ids).tolist() == [0], "the first chunk samples nothing"

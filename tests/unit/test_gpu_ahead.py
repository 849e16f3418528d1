"""Steps launched ahead in torch: ids that only the device knows, and launches that ask the device nothing."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.messages import Grammar, StepResult
from tests.integration.tiny_models import tiny_model
from tests.unit.ahead_support import BranchBackend, LoopDriver, Watch, WatchedExecutor, facts
from tests.unit.graph_fakes import CallingAgain
from tests.unit.test_gpu_graphs import Operations
from tests.unit.worker_fakes import begin, step
from worker_proc.device_io import Download, HostIo
from worker_proc.executor import StepExecutor
from worker_proc.generic.graphs import DecodeGraphs
from worker_proc.generic.runner import GenericRunner
from worker_proc.parallel.late import SharedLateIds
from worker_proc.runner import LATE, LateIds, PackedBatch
from worker_proc.sampling.cpu import CpuSampler

PAGE = 16
ASKING = {"nonzero", "_local_scalar_dense", "item", "masked_select", "_unique2", "is_nonzero", "equal"}
"""Operations whose result the host waits for."""


class WatchedIo(HostIo):
    """Copies to the host are waited for outside of launches alone."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def download(self, tensor: Tensor) -> Download:
        done, watch = super().download(tensor.clone()), self._watch
        waits = SimpleNamespace(ready=lambda: False, wait=lambda: watch.saw("copy") or done.wait())
        return waits  # type: ignore[return-value]


class TensorRunner(GenericRunner):
    """As on a GPU, where logits are tensors."""

    def _forward(self, batch: PackedBatch, late: LateIds | None) -> Any:
        return torch.from_numpy(super()._forward(batch, late))


class ListeningExecutor(WatchedExecutor):
    """Names the operations of its launches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names: set[str] = set()

    def _launching(self, *args: Any, **kwargs: Any) -> Any:
        with Operations() as seen:
            result = super()._launching(*args, **kwargs)
        self.names |= seen.names
        return result


def one_layer() -> Any:
    model = tiny_model("llama")
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    return model


def ahead_of_the_host(recorded: bool) -> LoopDriver:
    """A worker with Triton's kernels, interpreted."""
    from worker_proc.sampling.gpu import GpuSampler

    watch = Watch()
    runner, sampler = TensorRunner(one_layer(), PAGE, attention="triton"), GpuSampler(WatchedIo(watch), 512)
    runner.allocate(16)
    if recorded:
        runner.record_graphs(4, CallingAgain(), lambda line: None)
    return LoopDriver(ListeningExecutor(runner, sampler, BranchBackend(), ahead=(runner, sampler)), watch)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_no_launch_asks_the_device_anything_whatever_the_requests_want(recorded: bool) -> None:
    pytest.importorskip("triton")
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "logit_bias": {4: 3.0, 9: -1.0}, "logprobs": 2, "min_tokens": 9, "eos_token_ids": (5,)},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logprobs": 0},
        {"prompt_logprobs": 1},
        {"grammar": Grammar(kind="regex", text="3 12")},
    ]
    begins = [
        begin(s, [7, 30 + s, 9, 40 + s, 5, 6], [2 * s, 2 * s + 1], seed=s, **kind) for s, kind in enumerate(kinds)
    ]
    everyone: list[tuple[int, int, list[int]]] = [(s, 0, []) for s in range(len(kinds))]
    batches = [
        step(1, [(s, 4, []) for s in range(len(kinds))], begins=begins),
        *(step(n, everyone) for n in range(2, 6)),
    ]
    worker = ahead_of_the_host(recorded)
    results, names = worker.run(batches), worker.executor.names  # type: ignore[attr-defined]
    worker.close()
    assert {"linear", "mm", "addmm"} & names and not names & ASKING
    assert worker.watch.log == ["copy"] * 6, "one copy to the host for a step, two where a prompt has log-probabilities"
    alone = StepExecutor(GenericRunner(one_layer(), PAGE), CpuSampler(1), BranchBackend())
    alone.runner.allocate(16)
    wanted = [alone.execute(batch) for batch in batches]
    alone.close()
    assert streams(results) == streams(wanted)


def streams(results: list[StepResult]) -> list[list[int]]:
    """Ids of each row, all steps; the least that every mode gave of the constrained one."""
    found: list[list[int]] = [[] for _ in range(4)]
    for _, counts, ids, *_ in facts(results):
        for row, part in enumerate(np.split(np.array(ids), np.cumsum(counts)[:-1])):
            found[row] += part.tolist()
    return [ids[:2] for ids in found]


def test_the_generic_path_takes_ids_from_the_device() -> None:
    runner = GenericRunner(tiny_model("llama"), 16)
    runner.allocate(8)
    runner.forward(batch_of([[3, 4, 5], [6, 7]], [0, 0]))
    known = batch_of([[3, 4, 5, 9], [6, 7, 8]], [3, 2])
    late = LateIds(torch.tensor([8, 1, 9], dtype=torch.int32), np.array([2, 0], np.int32), np.array([0, 1], np.int32))
    expected = runner.forward(known).copy()
    np.testing.assert_array_equal(runner.forward_late(without_ids(known), late), expected)


def test_recorded_steps_take_ids_from_the_device() -> None:
    graphs = DecodeGraphs(
        lambda inputs: inputs.ids[:, None].float(), 4, 64, 16, 9, HostIo(), CallingAgain(), lambda line: None
    )
    known = batch_of([[3, 4, 5, 9], [6, 7, 8], [1, 2]], [3, 2, 1])
    late = LateIds(torch.tensor([8, 1, 9], dtype=torch.int32), np.array([2, 0], np.int32), np.array([0, 1], np.int32))
    assert graphs.run(known, late).flatten().tolist() == [9, 8, 2]
    assert graphs.run(known).flatten().tolist() == [9, 8, 2]
    assert graphs.run(without_ids(known), late).flatten().tolist() == [9, 8, LATE]


class OneAfterTheOther:
    """A group of two ranks, in one process: what the first sends lies there until the other takes it."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.is_first = True

    def copy_from_first(self, tensor: Tensor) -> None:
        if self.is_first:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.popleft())


def test_other_ranks_get_late_ids_where_the_step_has_none() -> None:
    group = OneAfterTheOther()
    shared = SharedLateIds(group, HostIo())
    drawn = torch.tensor([[8, 0], [1, 0], [9, 1]], dtype=torch.int32)[:, 0]
    i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
    given = shared.give(LateIds(drawn, i32(2, 0), i32(1, 3)))
    group.is_first = False
    taken = shared.take(i32(5, LATE, 6, LATE))
    assert taken is not None and shared.take(i32(5, 6)) is None
    for late in (given, taken):
        assert late.drawn[torch.from_numpy(late.sources)].tolist() == [9, 8] and late.targets.tolist() == [1, 3]


def without_ids(batch: PackedBatch) -> PackedBatch:
    return PackedBatch(np.full_like(batch.ids, LATE), batch.positions, batch.query_start, batch.context_lens,
                       batch.page_table, batch.logit_rows)  # fmt: skip


def batch_of(sequences: list[list[int]], done: list[int]) -> PackedBatch:
    """Sequence s has page s; its ids from ``done[s]`` on are computed."""
    lengths = [len(ids) - start for ids, start in zip(sequences, done, strict=True)]
    ends = np.cumsum(lengths)
    return PackedBatch(
        ids=np.array([i for ids, start in zip(sequences, done, strict=True) for i in ids[start:]], np.int32),
        positions=np.array(
            [p for ids, start in zip(sequences, done, strict=True) for p in range(start, len(ids))], np.int32
        ),
        query_start=np.array([0, *ends], np.int32),
        context_lens=np.array([len(ids) for ids in sequences], np.int32),
        page_table=np.arange(len(sequences), dtype=np.int32)[:, None],
        logit_rows=(ends - 1).astype(np.int32),
    )

"""What is around CUDA graphs and the GPU's memory, without a GPU: padding, buffers, sizes, arithmetic."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import ConfigError
from common.flags import build
from tests.integration.test_exactness_generic import NUM_PAGES, PAGE, new_sequences, run_greedy
from tests.integration.tiny_models import VOCAB, greedy_alone, tiny_model
from tests.unit.graph_fakes import CallingAgain
from worker_proc.device_io import HostIo
from worker_proc.generic.graphs import DecodeGraphs, StaticInputs, graph_sizes
from worker_proc.generic.runner import GenericRunner
from worker_proc.generic.warmup import largest_step, room_for_pool
from worker_proc.runner import PackedBatch

GIB = 2**30


def test_sizes_are_dense_where_steps_are_small() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
    assert graph_sizes(256)[-3:] == [192, 224, 256]
    assert all(sizes == sorted(set(sizes)) and sizes[-1] == most for most in range(1, 300)
               for sizes in [graph_sizes(most)])  # fmt: skip


def decode_step(lens: list[int], page: int, pages: list[list[int]], logit_rows: list[int]) -> PackedBatch:
    i32 = lambda values: np.array(values, np.int32)  # noqa: E731
    table = np.zeros((len(lens), max(len(one) for one in pages)), np.int32)
    for row, one in zip(table, pages, strict=True):
        row[: len(one)] = one
    positions = i32(lens) - 1
    return PackedBatch(i32(range(50, 50 + len(lens))), positions, i32(range(len(lens) + 1)), i32(lens), table,
                       i32(logit_rows))  # fmt: skip


def test_a_step_is_padded_to_the_next_size_with_rows_in_the_spare_page() -> None:
    seen: list[StaticInputs] = []

    def launch(inputs: StaticInputs) -> Tensor:
        seen.append(inputs)
        return inputs.ids[:, None].float() * 10

    lines: list[str] = []
    graphs = DecodeGraphs(launch, 4, 64, 8, 99, HostIo(), CallingAgain(), lines.append)
    assert lines[0] == "recording CUDA graphs: 1 of 3 (4 rows)" and len(lines) == 3
    full = decode_step([9, 8, 20, 1], 8, [[4, 5], [6], [1, 2, 3], [7]], [0, 1, 2, 3])
    assert graphs.run(full).flatten().tolist() == [500, 510, 520, 530]
    step = decode_step([10, 8, 20], 8, [[4, 5], [6], [1, 2, 3]], [0, 2])
    assert graphs.size_for(step) == 4
    assert graphs.run(step).flatten().tolist() == [500, 520], "only the rows that were asked for"
    inputs = seen[-1]
    assert inputs.cells.tolist() == [5 * 8 + 1, 6 * 8 + 7, 3 * 8 + 3, 99 * 8]
    assert inputs.lens.tolist() == [10, 8, 20, 1] and inputs.lens.dtype == torch.int32
    assert inputs.positions.tolist() == [9, 7, 19, 0]
    assert inputs.table[:3, :3].tolist() == [[4, 5, 0], [6, 0, 0], [1, 2, 3]]
    assert inputs.table[3, 0] == 99, "the row before had page 7 here"
    assert {one.data_ptr() for one in (seen[0].ids, inputs.ids)} == {inputs.ids.data_ptr()}


def test_only_steps_of_single_tokens_that_fit_are_replayed() -> None:
    graphs = DecodeGraphs(lambda inputs: inputs.ids[:, None].float(), 2, 16, 8, 9, HostIo(), CallingAgain(),
                          lambda line: None)  # fmt: skip
    assert graphs.size_for(decode_step([3], 8, [[1]], [0])) == 1
    assert graphs.size_for(decode_step([3, 4, 5], 8, [[1], [2], [3]], [0])) == 0, "more rows than any graph"
    assert graphs.size_for(decode_step([3], 8, [[1]], [])) == 0, "nothing to sample"
    i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
    assert graphs.size_for(PackedBatch(i32(1, 2), i32(0, 1), i32(0, 2), i32(2), i32(4)[None], i32(1))) == 0, "a chunk"


def test_a_whole_model_through_graphs_gives_transformers_tokens() -> None:
    pytest.importorskip("triton")
    model = tiny_model("mistral")
    rng = np.random.default_rng(9)
    prompts = [rng.integers(3, VOCAB, size=n).tolist() for n in (2, 25, 9)]
    expected = [greedy_alone(model, prompt, 6) for prompt in prompts]
    runner, capture = GenericRunner(model, PAGE, attention="triton"), CallingAgain()
    runner.allocate(NUM_PAGES)
    runner.record_graphs(4, capture, lambda line: None)
    assert run_greedy(runner, new_sequences(prompts), chunk=1000) == expected
    assert capture.replays == 5, "every step but the prompts'"


class Operations(TorchDispatchMode):
    """Names of torch's operations within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_a_decode_step_asks_the_device_nothing(experts: str) -> None:
    """No value comes back to the host within it, so the host is ahead of the GPU and a graph can hold it. Experts one
    by one do ask, which shows that this test would notice."""
    pytest.importorskip("triton")
    model = tiny_model("mixtral")
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    model.set_experts_implementation(experts)
    runner = GenericRunner(model, PAGE, attention="triton")
    runner.allocate(4)
    with torch.inference_mode(), Operations() as seen:
        runner._decode(StaticInputs.create(2, 2, torch.device("cpu")))
    asking = {"nonzero", "_local_scalar_dense", "item", "masked_select", "_unique2"} & seen.names
    assert ("linear" in seen.names or "mm" in seen.names) and bool(asking) == (experts == "eager")


def test_a_backend_that_works_on_the_host_stays_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    runner = GenericRunner(tiny_model("llama"), PAGE)
    runner.allocate(8)
    runner.record_graphs(4, CallingAgain(), lambda line: None)
    assert "attention backend torch works on the host" in caplog.text


class Asked:
    """A runner on a CUDA device that notes what it is to record."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, Any]] = []

    def record_graphs(self, most_rows: int, capture: Any, progress: Any) -> None:
        self.asked.append((most_rows, type(capture).__name__, progress))


@pytest.mark.parametrize(
    ("flags", "ranks", "expected", "said"),
    [
        ({}, 1, [(64, "CudaCapture")], ""),
        ({"cuda_graph_max_bs": 7}, 1, [(7, "CudaCapture")], ""),
        ({"disable_cuda_graph": True}, 1, [], "no CUDA graphs: --disable-cuda-graph"),
        ({}, 2, [], "over ranks they are off unless --cuda-graph-max-bs asks"),
        ({"cuda_graph_max_bs": 7}, 2, [(7, "AgreedCapture")], ""),
        ({"cuda_graph_max_bs": 7, "disable_cuda_graph": True}, 2, [], "no CUDA graphs: --disable-cuda-graph"),
    ],
)
def test_flags_and_ranks_decide_what_is_recorded(
    flags: dict[str, Any], ranks: int, expected: list[Any], said: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from worker_proc import loading

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    caplog.set_level(logging.INFO)
    runner: Any = Asked()
    group: Any = object() if ranks > 1 else None
    told: list[str] = []
    loading.record_graphs(runner, build({"tp_size": ranks, **flags}), group, told.append)
    assert [(most, kind) for most, kind, _ in runner.asked] == expected
    assert all(progress == told.append for _, _, progress in runner.asked), "what takes long is told"
    assert said in caplog.text


def test_graphs_asked_for_on_a_cpu_are_refused() -> None:
    from worker_proc import loading

    runner: Any = Asked()
    runner.device = torch.device("cpu")
    with pytest.raises(ConfigError, match="--cuda-graph-max-bs 7: the model runs on cpu, leave the flag out"):
        loading.record_graphs(runner, build({"cuda_graph_max_bs": 7}), None, print)
    loading.record_graphs(runner, build({}), None, print)
    assert not runner.asked


# --------------------------------------------------------------------------- memory


class FakeMemory:
    """A device with ``free`` bytes on which the largest step takes ``step``."""

    def __init__(self, free: int, step: int) -> None:
        self._free, self._step = free, step

    def free_bytes(self) -> int:
        return self._free

    def begin(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return self._step


class FakeRunner:
    """A ``ModelRunner`` of 2 GiB whose pages take 1 MiB."""

    page_size, vocab_size, device, dtype, name, batch_invariant = 16, 1000, "fake", "bfloat16", "fake", False

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.pages, self.steps = error, 0, []

    def kv_bytes_per_page(self) -> int:
        return 1 << 20

    def weight_bytes(self) -> int:
        return 2 * GIB

    def allocate(self, num_pages: int) -> None:
        self.pages = num_pages

    def forward(self, batch: PackedBatch) -> None:
        self.steps.append(batch)
        if self.error is not None:
            raise self.error


def test_the_pool_gets_what_the_largest_step_leaves() -> None:
    runner: Any = FakeRunner()
    assert room_for_pool(runner, FakeMemory(10 * GIB, 3 * GIB), 700, 512, 64) == 7 * GIB
    (step,) = runner.steps
    assert step.ids.size == 700 and step.context_lens.tolist() == [512, 188] and step.logit_rows.size == 64
    assert step.page_table.shape == (2, 32) and not step.page_table.any()


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"10.00 GiB free less 10.00 GiB .* 8 KV pages"):
        room_for_pool(FakeRunner(), FakeMemory(10 * GIB, 10 * GIB - 1), 0, 4096, 64)  # type: ignore[arg-type]
    error = torch.OutOfMemoryError("CUDA out of memory")
    want = r"\(4096 prompt tokens, 64 rows of 1000 logits\) does not fit into the 1.00 GiB"
    with pytest.raises(ConfigError, match=want):
        room_for_pool(FakeRunner(error), FakeMemory(GIB, 0), 0, 4096, 64)  # type: ignore[arg-type]


def test_the_largest_step_runs_on_a_real_model() -> None:
    runner = GenericRunner(tiny_model("llama"), PAGE)
    runner.allocate(8)
    assert runner.forward(largest_step(50, 32, 5, PAGE)).shape == (5, VOCAB)

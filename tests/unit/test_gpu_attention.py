"""The Triton attention backend against plain attention on ragged random batches, under the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.gpu_support import DEVICE, Ragged, assert_near, ragged
from worker_proc.attention.kv_types import FP8, pool_dtype, read_cells, write_cells
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.device_io import make_io
from worker_proc.runner import PackedBatch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SINKS = torch.linspace(-1.0, 2.0, 6)
CASES = {
    "grouped heads": (6, LayerSpec(2, 64, 64), 0.0, None),
    "80 wide, one head each": (3, LayerSpec(3, 80, 80), 0.0, None),
    "96 and 40 wide, 18 heads share one": (18, LayerSpec(1, 96, 40), 0.0, None),
    "sliding window": (4, LayerSpec(2, 64, 64, window=7), 0.0, None),
    "chunks": (4, LayerSpec(1, 32, 32, chunk=16), 0.0, None),
    "soft cap, window and sinks": (6, LayerSpec(2, 16, 24, window=70), 5.0, SINKS),
    "256 wide": (2, LayerSpec(1, 256, 256), 0.0, None),
}


def backend_for(spec: LayerSpec, page: int, dtype: torch.dtype = torch.float32) -> Any:
    from worker_proc.attention.triton_backend import TritonBackend

    return TritonBackend((spec,), page, 1000, dtype, make_io(DEVICE))


def run(backend: Any, case: Ragged, batch: PackedBatch, spec: LayerSpec, args: AttentionArgs) -> torch.Tensor:
    plan = backend.plan(batch)
    backend.write(case.new_key, case.new_value, case.keys, case.values, plan)
    return backend.attend(case.query, case.keys, case.values, plan, spec, args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_mixed_steps_equal_plain_attention(name: str, dtype: torch.dtype) -> None:
    """Decode rows, chunks that continue, whole prompts; pages of one size per dtype."""
    num_heads, spec, softcap, sinks = CASES[name]
    args = AttentionArgs(spec.key_dim**-0.5, softcap, None if sinks is None else sinks.to(DEVICE))
    page = {torch.float32: 16, torch.float16: 1, torch.bfloat16: 64}[dtype]
    case = ragged([(0, 1), (130, 1), (40, 9), (0, 37)], page, num_heads, spec, args, dtype)
    assert_near(run(backend_for(spec, page, dtype), case, case.batch, spec, args), case.expected, dtype)


def test_long_contexts_are_split_and_joined() -> None:
    spec, args = LayerSpec(1, 32, 32), AttentionArgs(0.2)
    lens = [(0, 1), (126, 1), (127, 1), (128, 1), (383, 1), (700, 1)]
    case = ragged(lens, 32, 2, spec, args, torch.float32)
    assert_near(run(backend_for(spec, 32), case, case.batch, spec, args), case.expected, torch.float32)
    windowed = LayerSpec(1, 32, 32, window=130)
    case = ragged(lens, 32, 2, windowed, args, torch.float32)
    assert_near(run(backend_for(windowed, 32), case, case.batch, windowed, args), case.expected, torch.float32)


def test_a_row_does_not_depend_on_its_neighbours_nor_on_how_its_prompt_was_cut() -> None:
    spec, args = LayerSpec(2, 16, 16, window=50), AttentionArgs(0.25)
    together = ragged([(200, 1), (0, 75), (3, 1)], 16, 4, spec, args, torch.float32, seed=3)
    backend = backend_for(spec, 16)
    whole = run(backend, together, together.batch, spec, args)
    batch = together.batch
    for s in (0, 2):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        alone = part_of(batch, s, rows.start, rows.stop)
        plan = backend.plan(alone)
        got = backend.attend(together.query[rows], together.keys, together.values, plan, spec, args)
        assert torch.equal(got, whole[rows])
    for begin, end in ((1, 20), (20, 21), (21, 76)):
        plan = backend.plan(part_of(batch, 1, begin, end))
        got = backend.attend(together.query[begin:end], together.keys, together.values, plan, spec, args)
        assert_near(got, whole[begin:end].cpu(), torch.float32)


def part_of(batch: PackedBatch, s: int, begin: int, end: int) -> PackedBatch:
    """Rows [begin, end) of sequence ``s`` as a step of their own."""
    positions = batch.positions[begin:end]
    lens, start = positions[-1:] + 1, np.array([0, end - begin], np.int32)
    return PackedBatch(batch.ids[begin:end], positions, start, lens, batch.page_table[s : s + 1], start[1:] - 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_pools_are_written_and_read_as_torch_converts(dtype: torch.dtype) -> None:
    spec, args = LayerSpec(2, 64, 64), AttentionArgs(0.125)
    case = ragged([(33, 1), (20, 7)], 16, 4, spec, args, dtype, kv_dtype=pool_dtype("fp8_e4m3", dtype))
    assert case.keys.dtype == FP8
    assert_near(run(backend_for(spec, 16, dtype), case, case.batch, spec, args), case.expected, dtype)


def test_fp8_rounding_is_torchs_on_every_kind_of_value() -> None:
    from worker_proc.kernels.cuda.kv_write import write_kv

    steps = torch.arange(-4096, 4096) / 4096
    values = torch.cat([steps * scale for scale in (0.004, 0.02, 1.0, 17.0, 448.0, 2000.0)])
    new = values.reshape(-1, 2, 64).to(DEVICE)
    ours, torchs = (torch.zeros(new.shape, dtype=FP8, device=DEVICE) for _ in range(2))
    cells = torch.randperm(new.shape[0], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    write_kv(new, ours, cells)
    write_cells(torchs, cells, new)
    assert torch.equal(ours.view(torch.uint8) & 0x7F, torchs.view(torch.uint8) & 0x7F)  # -0 may differ
    assert torch.equal(read_cells(ours, cells, torch.float32), read_cells(torchs, cells, torch.float32))
    assert read_cells(ours, cells, torch.float32).abs().max() == 448


def test_kv_write_takes_transposed_views_and_odd_widths() -> None:
    from worker_proc.kernels.cuda.kv_write import write_kv

    new = torch.randn(3, 5, 10).to(DEVICE).transpose(0, 1)  # [T=5, Hkv=3, D=10] as a view of [Hkv, T, D]
    pool = torch.full((9, 3, 10), float("nan"), device=DEVICE)
    cells = torch.tensor([7, 0, 3, 8, 1], device=DEVICE)
    write_kv(new, pool, cells)
    assert torch.equal(pool[cells], new)
    assert torch.isnan(pool[[2, 4, 5, 6]]).all()

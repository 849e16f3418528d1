"""Every attention kernel against plain torch, on ragged random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker_proc.attention.backend import DecodeKernel, decode_gather, decode_padded
from worker_proc.attention.cpu import decode_numba
from worker_proc.attention.plan import make_plan
from worker_proc.attention.reference import attend_plain, attend_sequence, visible
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.generic.packed_linear import pack_linears, packing_works
from worker_proc.runner import PackedBatch

PAGE = 16
LENS = [1, 15, 16, 17, 40, 100]
CASES = {
    "grouped heads": (6, LayerSpec(2, 16, 16), 0.0, False),
    "value width differs": (4, LayerSpec(4, 8, 12), 0.0, False),
    "sliding window": (4, LayerSpec(2, 8, 8, window=7), 0.0, False),
    "chunks": (4, LayerSpec(1, 8, 8, chunk=16), 0.0, False),
    "softcap and sinks": (4, LayerSpec(1, 8, 8, window=20), 5.0, True),
}


def decode_batch(lens: list[int], num_pages: int, seed: int) -> PackedBatch:
    """One token per sequence; pages a random permutation."""
    widths = [-(-n // PAGE) for n in lens]
    order = np.random.default_rng(seed).permutation(num_pages)
    table = np.zeros((len(lens), max(widths)), np.int32)
    for s, width in enumerate(widths):
        table[s, :width], order = order[:width], order[width:]
    rows, context = np.arange(len(lens), dtype=np.int32), np.array(lens, np.int32)
    return PackedBatch(rows, context - 1, np.arange(len(lens) + 1, dtype=np.int32), context, table, rows)


@pytest.mark.parametrize("kernel", [decode_gather, decode_padded, decode_numba])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_kernels_equal_plain_attention(kernel: DecodeKernel, case: str, dtype: torch.dtype) -> None:
    num_heads, spec, softcap, with_sinks = CASES[case]
    generator = torch.Generator().manual_seed(1)
    num_pages = 24
    keys = torch.full((num_pages * PAGE, spec.num_kv_heads, spec.key_dim), float("nan"), dtype=dtype)
    values = torch.full((num_pages * PAGE, spec.num_kv_heads, spec.value_dim), float("nan"), dtype=dtype)
    query = torch.randn((len(LENS), num_heads, spec.key_dim), generator=generator).to(dtype)
    sinks = torch.randn(num_heads, generator=generator) if with_sinks else None
    args = AttentionArgs(spec.key_dim**-0.5, softcap, sinks)
    plan = make_plan(decode_batch(LENS, num_pages, seed=2), PAGE, torch.device("cpu"))
    want = []
    for s, n in enumerate(LENS):
        positions = np.arange(n)
        cells = torch.from_numpy(plan.decode_table[s, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE)
        keys[cells] = torch.randn((n, *keys.shape[1:]), generator=generator).to(dtype)
        values[cells] = torch.randn((n, *values.shape[1:]), generator=generator).to(dtype)
        at = torch.arange(n)
        want.append(attend_plain(query[s : s + 1], keys[cells], values[cells], visible(spec, at[-1:], at), args))
    got = kernel(query, keys, values, plan, spec, args)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, torch.cat(want), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_sequence_attention_equals_plain_attention_for_any_split(case: str) -> None:
    num_heads, spec, softcap, with_sinks = CASES[case]
    torch.manual_seed(3)
    length = 37
    query = torch.randn(length, num_heads, spec.key_dim)
    key = torch.randn(length, spec.num_kv_heads, spec.key_dim)
    value = torch.randn(length, spec.num_kv_heads, spec.value_dim)
    args = AttentionArgs(0.3, softcap, torch.randn(num_heads) if with_sinks else None)
    positions = torch.arange(length)
    want = attend_plain(query, key, value, visible(spec, positions, positions), args)
    for start in (0, 1, 16, 36):
        first = spec.lower_bound(start)
        got = attend_sequence(query[start:], key[first:], value[first:], start, spec, args)
        torch.testing.assert_close(got, want[start:], atol=1e-5, rtol=1e-5)


def test_numba_decode_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(5)
    spec, args = LayerSpec(2, 16, 16), AttentionArgs(0.25)
    keys, values = torch.randn(24 * PAGE, 2, 16), torch.randn(24 * PAGE, 2, 16)
    query = torch.randn(len(LENS), 4, 16)
    batch = decode_batch(LENS, 24, seed=6)
    together = decode_numba(query, keys, values, make_plan(batch, PAGE, torch.device("cpu")), spec, args)
    for s in range(len(LENS)):
        one, start = slice(s, s + 1), np.array([0, 1], np.int32)
        alone = PackedBatch(
            batch.ids[one], batch.positions[one], start, batch.context_lens[one], batch.page_table[one], start[:1]
        )
        got = decode_numba(query[one], keys, values, make_plan(alone, PAGE, torch.device("cpu")), spec, args)
        assert torch.equal(got[0], together[s])


def test_packed_linears_keep_a_models_numbers_and_bytes() -> None:
    if not packing_works():
        pytest.skip("this build of torch or this CPU has no packed bfloat16 linear layers")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False))
    model = model.to(torch.bfloat16).requires_grad_(False)
    model.dtype, model.device = torch.bfloat16, torch.device("cpu")
    x = torch.randn(1, 5, 64).bfloat16()
    want = model(x)
    assert pack_linears(model) == 2
    torch.testing.assert_close(model(x), want, atol=2e-2, rtol=2e-2)
    assert model[0].weight.shape == (96, 64)
    assert model[0].weight.untyped_storage().nbytes() == 2
    assert model[0].packed_bytes() == 96 * 64 * 2

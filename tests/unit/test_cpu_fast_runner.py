"""The CPU fast path beside transformers, on tiny random models of every covered family."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.unit.cpu_fast_support import MODELS, NUM_PAGES, VOCAB, make_runner, pack, tiny_model, whole
from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
from worker_proc.kernels.cpu.isa import ALL, detect
from worker_proc.runner import PackedBatch

pytestmark = pytest.mark.skipif(isinstance(detect(), str), reason="no instruction set for the fast path")


def reference(model: Any, sequences: list[list[int]]) -> tuple[list[np.ndarray[Any, Any]], float]:
    """Float32 logits of each sequence by transformers, and its own bf16 root mean square error."""
    exact, squares, count = [], 0.0, 0
    half = [model(torch.tensor([ids])).logits[0].float().numpy() for ids in sequences]
    model32 = model.float()
    for ids, low in zip(sequences, half, strict=True):
        exact.append(model32(torch.tensor([ids])).logits[0].numpy())
        squares += float(((exact[-1] - low) ** 2).sum())
        count += low.size
    return exact, (squares / count) ** 0.5


def ragged_prefill_and_chunks(runner: CpuFastRunner, sequences: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    """Logits of all positions: two ragged steps, of which the second continues on cached pages."""
    rng = np.random.default_rng(1)
    free = rng.permutation(NUM_PAGES).tolist()
    pages = [[free.pop() for _ in range(-(-len(ids) // runner.page_size))] for ids in sequences]
    first = [len(ids) * 3 // 5 for ids in sequences]
    out: list[list[np.ndarray[Any, Any]]] = [[] for _ in sequences]
    steps = [[(ids[:k], 0, p) for ids, k, p in zip(sequences, first, pages, strict=True)],
             [(ids, k, p) for ids, k, p in zip(sequences, first, pages, strict=True)]]  # fmt: skip
    for chunks in steps:
        logits = runner.forward(pack(chunks))
        ends = np.cumsum([len(ids) - done for ids, done, _ in chunks])
        for rows, piece in zip(out, np.split(logits, ends[:-1]), strict=True):
            rows.append(piece.copy())
    return [np.concatenate(rows) for rows in out]


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_at_least_as_exact_as_transformers_in_bf16(name: str) -> None:
    model = tiny_model(name)
    runner = make_runner(model, page_size=32 if name == "qwen3" else 16, threads=2)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, n).tolist() for n in (5, 150, 33, 16, 301)]
    got = ragged_prefill_and_chunks(runner, sequences)
    runner.close()
    exact, bf16_error = reference(model, sequences)
    squares = sum(float(((a - b) ** 2).sum()) for a, b in zip(got, exact, strict=True))
    error = (squares / sum(a.size for a in got)) ** 0.5
    assert error < bf16_error


@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa.name, marks=pytest.mark.slow) if isa.name.startswith("avx512_bf16") else isa.name
        for isa in ALL if isa.name != "avx512"
    ],
)  # fmt: skip
def test_every_instruction_set_gives_the_same_logits_up_to_rounding(isa: str) -> None:
    if isinstance(detect((isa,)), str):
        pytest.skip(f"this machine has no {isa}")
    model = tiny_model("llama")
    runner = make_runner(model, threads=1, isa=isa)
    ids = np.random.default_rng(2).integers(0, VOCAB, 140).tolist()
    together = whole(runner, ids)
    runner.forward(pack([(ids[:133], 0, list(range(9)))]))
    rest = runner.forward(pack([(ids, 133, list(range(9)))])).copy()
    runner.close()
    exact, bf16_error = reference(model, [ids])
    assert ((together - exact[0]) ** 2).mean() ** 0.5 < bf16_error
    assert np.array_equal(together[133:], rest)


@pytest.fixture(scope="module")
def runner() -> Any:
    built = make_runner(tiny_model("llama"))
    yield built
    built.close()


def test_copied_pages_continue_like_the_originals(runner: CpuFastRunner) -> None:
    ids = list(range(40))
    expected = whole(runner, ids, [3, 4, 5])[-1]
    runner.copy_pages(np.array([3, 4, 5], np.int32), np.array([9, 10, 11], np.int32))
    assert np.array_equal(runner.forward(pack([(ids, 39, [9, 10, 11])], False))[0], expected)


def test_page_copies_run_in_order(runner: CpuFastRunner) -> None:
    ids = list(range(16))
    expected = whole(runner, [*ids, 7], [3, 4])[-1]
    runner.copy_pages(np.array([3, 20], np.int32), np.array([20, 21], np.int32))
    assert np.array_equal(runner.forward(pack([([*ids, 7], 16, [21, 8])], False))[0], expected)


def test_nan_left_in_a_page_does_not_reach_its_next_owner(runner: CpuFastRunner) -> None:
    ids = list(range(21))
    expected = whole(runner, ids, [30, 31])
    assert runner._pool is not None
    runner._pool.pages.view(np.uint16)[:] = 0x7FC0
    assert np.array_equal(whole(runner, ids, [30, 31]), expected)
    continued = runner.forward(pack([([*ids, 1], 21, [30, 31])])).copy()
    assert np.array_equal(continued, whole(runner, [*ids, 1], [40, 41])[-1:])
    runner._pool.pages[:] = 0


def test_only_wanted_rows_get_logits(runner: CpuFastRunner) -> None:
    batch = pack([(list(range(20)), 0, [1, 2])])
    everything = runner.forward(batch).copy()
    some = PackedBatch(**{**{f: getattr(batch, f) for f in batch.__slots__}, "logit_rows": np.array([3, 19], np.int32)})
    assert np.array_equal(runner.forward(some), everything[[3, 19]])
    none = PackedBatch(**{**{f: getattr(batch, f) for f in batch.__slots__}, "logit_rows": np.zeros(0, np.int32)})
    assert runner.forward(none).shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("ids", "done", "pages", "message"),
    [
        ([VOCAB], 0, [0], "token id"),
        ([1] * 17, 0, [0], "exceeds 1 pages"),
        ([1], 0, [NUM_PAGES], "page id"),
        ([1] * 1025, 1024, list(range(65)), "position"),
        ([1], 1, [0], "does not cover"),
    ],
)
def test_refuses_what_would_write_to_a_wrong_address(
    runner: CpuFastRunner, ids: list[int], done: int, pages: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.forward(pack([(ids, done, pages)]))


def test_sizes_are_those_of_the_pool_and_weights(runner: CpuFastRunner) -> None:
    assert runner.kv_bytes_per_page() == 2 * 2 * 2 * 16 * 32 * 2  # layers, K and V, heads, tokens, padded size, bf16
    assert runner.weight_bytes() > 0
    with pytest.raises(RuntimeError, match="exists already"):
        runner.allocate(1)


def test_the_model_is_not_kept() -> None:
    model = tiny_model("llama")
    parts = [weakref.ref(module) for module in (model, model.lm_head, model.model.layers[0].mlp.down_proj)]
    built = make_runner(model)
    del model
    gc.collect()
    assert [part() for part in parts] == [None] * 3
    assert whole(built, [1, 2, 3]).shape == (3, VOCAB)
    built.close()


def test_a_tied_embedding_is_not_stored_twice() -> None:
    sizes = []
    for name in ("llama", "llama-tied-llama3-rope"):
        built = make_runner(tiny_model(name))
        sizes.append(built.weight_bytes())
        built.close()
    assert sizes[0] - sizes[1] == -(-VOCAB * 72 * 2 // 64) * 64  # rows of 72 bf16, to the next cache line


def test_close_twice_and_forward_after_it(runner: CpuFastRunner) -> None:
    other = make_runner(tiny_model("llama"), threads=3)
    other.close()
    other.close()
    with pytest.raises(RuntimeError):
        other.forward(pack([([1], 0, [0])]))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary type"),
        ("llama", {"hidden_act": "relu"}, "activation"),
        ("llama", {"head_dim": 512}, "head size"),
        ("llama", {"hidden_size": 66, "num_attention_heads": 66, "num_key_value_heads": 1}, "query heads per kv head"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_says_why_a_model_is_not_covered(name: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in str(CpuFastRunner.try_build(tiny_model(name, **changes), 16, 1))


def test_says_which_model_types_dtypes_and_pages_are_covered() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    other = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert "'gpt2' is not described" in str(CpuFastRunner.try_build(other, 16, 1))
    assert "needs bfloat16" in str(CpuFastRunner.try_build(tiny_model("llama").float(), 16, 1))
    assert "page size 24" in str(CpuFastRunner.try_build(tiny_model("llama"), 24, 1))
    assert "instruction set" in str(CpuFastRunner.try_build(tiny_model("llama"), 16, 1, instruction_sets=("none",)))


def test_a_model_with_an_unexpected_part_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.add_module("gate", torch.nn.Linear(2, 2))
    assert "attention 1 has the parts" in str(CpuFastRunner.try_build(model, 16, 1))

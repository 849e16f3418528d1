"""Sixteen ragged prompts together give, token for token, what transformers gives each alone (float32, greedy)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.integration.tiny_models import CONFIGS, VOCAB, generate_alone, tiny_model
from worker_proc.generic.runner import GenericRunner
from worker_proc.runner import PackedBatch

PAGE = 8
NUM_PAGES = 400
NEW_TOKENS = 6
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 33, 47, 64]


@dataclass
class Sequence:
    """One greedy generation."""

    ids: list[int]
    pages: list[int]
    computed: int = 0
    outputs: list[int] = field(default_factory=list)


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, size=n).tolist() for n in LENGTHS]


def new_sequences(prompts: list[list[int]], seed: int = 3) -> list[Sequence]:
    """Sequences whose pages are a random permutation of the pool."""
    free = np.random.default_rng(seed).permutation(NUM_PAGES).tolist()
    sequences = []
    for prompt in prompts:
        need = -(-(len(prompt) + NEW_TOKENS) // PAGE)
        sequences.append(Sequence(list(prompt), [free.pop() for _ in range(need)]))
    return sequences


def step(runner: GenericRunner, rows: list[tuple[Sequence, int]]) -> np.ndarray:
    """Compute the next ``n`` ids of each row's sequence; logits of each row's last token."""
    ids, positions, starts, lens = [], [], [0], []
    for sequence, n in rows:
        ids += sequence.ids[sequence.computed : sequence.computed + n]
        positions += range(sequence.computed, sequence.computed + n)
        starts.append(starts[-1] + n)
        sequence.computed += n
        lens.append(sequence.computed)
    width = max(len(s.pages) for s, _ in rows)
    table = np.array([s.pages + [0] * (width - len(s.pages)) for s, _ in rows], np.int32)
    i32 = lambda values: np.array(values, np.int32)  # noqa: E731
    return runner.forward(PackedBatch(i32(ids), i32(positions), i32(starts), i32(lens), table, i32(starts[1:]) - 1))


def run_greedy(runner: GenericRunner, sequences: list[Sequence], chunk: int) -> list[list[int]]:
    """Continuous batching in small: prefill chunks of at most ``chunk`` tokens mixed with decode rows."""
    while True:
        rows = [(s, min(chunk, len(s.ids) - s.computed)) for s in sequences if len(s.outputs) < NEW_TOKENS]
        if not rows:
            return [s.outputs for s in sequences]
        logits = step(runner, rows)
        for (sequence, _), row in zip(rows, logits, strict=True):
            if sequence.computed == len(sequence.ids):
                token = int(row.argmax())
                sequence.ids.append(token)
                sequence.outputs.append(token)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_packed_ragged_batch_equals_generate_alone(name: str) -> None:
    model = tiny_model(name)
    prompts = make_prompts()
    expected = [generate_alone(model, prompt, NEW_TOKENS) for prompt in prompts]
    runner = GenericRunner(model, page_size=PAGE)
    runner.allocate(NUM_PAGES)
    assert run_greedy(runner, new_sequences(prompts), chunk=1000) == expected
    assert run_greedy(runner, new_sequences(prompts, seed=4), chunk=5) == expected, "chunked prefill"

    # A prefix computed by one sequence is used by another through its pages.
    owner, user = new_sequences([prompts[-1], prompts[-1]], seed=5)
    step(runner, [(owner, 40)])
    user.pages[:5], user.computed = owner.pages[:5], 40
    assert run_greedy(runner, [user], chunk=7) == [expected[-1]], "cached prefix"

    # ... and through copies of them.
    copied = new_sequences([prompts[-1]], seed=6)[0]
    copied.computed = 40
    runner.copy_pages(np.array(owner.pages[:5], np.int32), np.array(copied.pages[:5], np.int32))
    assert run_greedy(runner, [copied], chunk=1000) == [expected[-1]], "copied pages"


def test_logits_only_where_asked_and_none_when_nothing_is() -> None:
    runner = GenericRunner(tiny_model("llama"), page_size=PAGE)
    runner.allocate(20)
    arange = np.arange(6, dtype=np.int32)
    one = {"ids": arange + 3, "positions": arange, "query_start": np.array([0, 6], np.int32)}
    rest = {"context_lens": np.array([6], np.int32), "page_table": np.array([[4]], np.int32)}
    every = runner.forward(PackedBatch(**one, **rest, logit_rows=arange)).copy()
    some = runner.forward(PackedBatch(**one, **rest, logit_rows=np.array([1, 4], np.int32)))
    np.testing.assert_allclose(some, every[[1, 4]], rtol=1e-5, atol=1e-5)
    assert runner.forward(PackedBatch(**one, **rest, logit_rows=arange[:0])).shape == (0, VOCAB)

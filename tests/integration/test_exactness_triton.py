"""Whole models with the Triton backend, under its interpreter or on a GPU: the tokens of transformers."""

from __future__ import annotations

import pytest

from tests.integration.test_exactness_generic import NUM_PAGES, PAGE, new_sequences, run_greedy
from tests.integration.tiny_models import VOCAB, greedy_alone, tiny_model
from worker_proc.generic.runner import GenericRunner

pytest.importorskip("triton")
NEW_TOKENS = 6


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_tiny_model_gives_transformers_tokens(name: str) -> None:
    """Grouped heads; soft cap and windows; sinks."""
    import numpy as np

    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, VOCAB, size=n).tolist() for n in (1, 22)]
    model = tiny_model(name)
    expected = [greedy_alone(model, prompt, NEW_TOKENS) for prompt in prompts]
    runner = GenericRunner(model, PAGE, attention="triton")
    runner.allocate(NUM_PAGES)
    assert run_greedy(runner, new_sequences(prompts), chunk=17) == expected

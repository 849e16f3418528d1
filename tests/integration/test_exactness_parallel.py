"""Two ranks (gloo, CPU) give, token for token, what transformers gives on one: float32, greedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tests.integration.parallel_ranks import Answer, Job, Ranks
from tests.integration.test_exactness_generic import NEW_TOKENS
from tests.integration.tiny_models import CONFIGS, VOCAB, generate_alone, greedy_alone, tiny_model
from worker_proc.generic.packed_linear import packing_works

pytestmark = pytest.mark.integration
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UNEVEN: dict[str, Any] = {**_BASE, "vocab_size": 257, "intermediate_size": 97}
CASES: dict[str, Any] = {
    "llama": CONFIGS["llama"],
    "qwen3": CONFIGS["qwen3"],
    "mixtral": CONFIGS["mixtral"],
    "llama, one KV head, uneven sizes": lambda: hf.LlamaConfig(**{**UNEVEN, "num_key_value_heads": 1}),
    "llama, three KV heads, tied": lambda: hf.LlamaConfig(
        **{**UNEVEN, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}
    ),
    "mixtral, one KV head, uneven sizes": lambda: hf.MixtralConfig(
        # transformers' own product over experts needs widths that are multiples of 16 bytes
        **{**UNEVEN, "num_key_value_heads": 1, "intermediate_size": 100}, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen2, with biases": lambda: hf.Qwen2Config(**UNEVEN),
    "phi3, fused projections": lambda: hf.Phi3Config(**{**UNEVEN, "intermediate_size": 98}),
    "gemma2": CONFIGS["gemma2"],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    both = Ranks(tmp_path_factory.mktemp("run"))
    yield both
    both.close()


def make_model(name: str) -> Any:
    """The model of a case, with weights that leave no near ties."""
    if name in CONFIGS:
        return tiny_model(name)
    torch.manual_seed(99)
    model = hf.AutoModelForCausalLM.from_config(CASES[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def prompts_for(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    ends = [vocab_size - 1, vocab_size // 2, vocab_size // 2 - 1]  # both sides of where the vocabulary is cut
    return [[*rng.integers(3, vocab_size, size=n).tolist(), *ends] for n in (1, 6, 13, 30)]


def both(answers: list[Answer]) -> Answer:
    """Rank 0's answer, once it is known that rank 1 says the same."""
    assert [answer.error for answer in answers] == ["", ""]
    first, second = answers
    assert first.outputs == second.outputs
    assert np.array_equal(first.logits, second.logits), "the same bits on every rank"
    assert first.num_pages == second.num_pages == 400, "the smaller pool of the two"
    return first


@pytest.mark.parametrize("name", sorted(CASES))
def test_two_ranks_give_the_tokens_of_one(ranks: Ranks, tmp_path: Path, name: str) -> None:
    model = make_model(name)
    vocab_size = model.config.vocab_size
    prompts = prompts_for(vocab_size)
    expected = tuple(tuple(generate_alone(model, prompt, NEW_TOKENS)) for prompt in prompts)
    model.save_pretrained(tmp_path)
    whole = sum(parameter.numel() for parameter in model.parameters())
    answers = ranks.run(Job(str(tmp_path), prompts, chunk=9))
    answer = both(answers)
    assert answer.outputs == expected
    assert answer.vocab_size == vocab_size
    assert sum(one.num_parameters for one in answers) < 1.1 * whole, "what both hold: little more than one model"
    if "one KV head" in name:
        assert [one.num_kv_heads for one in answers] == [1, 1]
    if "three KV heads" in name:
        assert [one.num_kv_heads for one in answers] == [1, 2]


def test_a_checkpoint_of_many_files_is_read_by_parts(ranks: Ranks, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    prompts = prompts_for(VOCAB)
    expected = tuple(tuple(generate_alone(model, prompt, NEW_TOKENS)) for prompt in prompts)
    assert both(ranks.run(Job(str(tmp_path), prompts, chunk=1000))).outputs == expected


def test_dummy_weights_are_the_same_model_on_both_ranks(ranks: Ranks, tmp_path: Path) -> None:
    CONFIGS["qwen3"]().save_pretrained(tmp_path)
    job = Job(str(tmp_path), prompts_for(VOCAB), chunk=1000, load_format="dummy")
    once = both(ranks.run(job))
    again = both(ranks.run(job))
    assert once.outputs == again.outputs and np.array_equal(once.logits, again.logits)


def test_packed_linear_layers_still_add_up_over_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    model = tiny_model("llama").bfloat16()
    model.save_pretrained(tmp_path)
    prompts = prompts_for(VOCAB)
    answer = both(ranks.run(Job(str(tmp_path), prompts, chunk=1000, dtype="bfloat16")))
    with torch.inference_mode():
        want = model(torch.tensor([prompts[0]])).logits[0, -1:].float().numpy()
    assert answer.num_packed == (3 * 7 + 1 if packing_works() else 0)
    assert np.linalg.norm(answer.logits - want) < 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize("fails_on", [-1, 1], ids=["recorded", "one rank cannot"])
def test_both_ranks_replay_the_same_graphs_or_none(ranks: Ranks, tmp_path: Path, fails_on: int) -> None:
    """Triton's kernels on each rank, between the ranks' sums; a graph that calls again in place of a GPU's."""
    pytest.importorskip("triton")
    shape = {**_BASE, "num_hidden_layers": 1, "vocab_size": 63}
    torch.manual_seed(3)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(tmp_path)
    prompts = [[7, 8, 9], [61, 5]]
    expected = tuple(tuple(greedy_alone(model, prompt, NEW_TOKENS)) for prompt in prompts)
    job = Job(str(tmp_path), prompts, chunk=1000, attention="triton", graph_rows=2, graphs_fail_on=fails_on)
    answers = ranks.run(job)
    assert both(answers).outputs == expected
    every = NEW_TOKENS - 1  # each step but the prompts'
    assert [one.num_replays for one in answers] == ([every] * 2 if fails_on < 0 else [0, 0])


def test_both_ranks_say_why_a_model_cannot_be_split(ranks: Ranks, tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    answers = ranks.run(Job(str(tmp_path), [[1]], chunk=1000))
    assert [answer.error for answer in answers] == [
        "ConfigError: --tp-size 2: transformers has no plan to split GPT2LMHeadModel; use --tp-size 1"
    ] * 2

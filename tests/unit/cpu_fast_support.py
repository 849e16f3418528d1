"""Tiny random models and batches for the tests of the CPU fast path."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
from worker_proc.runner import PackedBatch

VOCAB = 203
NUM_PAGES = 96
SMALL = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-llama3-rope": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-biases-linear-rope": (
        "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR_ROPE},
    ),
    "llama-heads-256": ("LlamaConfig", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama-heads-80-ungrouped": ("LlamaConfig", {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "mistral-window": ("MistralConfig", {"sliding_window": 37}),
    "qwen2-biases": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 3, "sliding_window": 45, "query_pre_attn_scalar": 20, "head_dim": 32,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def tiny_model(name: str, **changes: Any) -> Any:
    """A random bf16 model of :data:`MODELS`; biases and norms are random too."""
    config_class, special = MODELS[name]
    config = getattr(transformers, config_class)(**{**SMALL, **special, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for key, parameter in model.named_parameters():
        if key.endswith("bias") or "norm" in key:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape).mul(0.2).bfloat16())
    return model.eval().requires_grad_(False)


def make_runner(model: Any, page_size: int = 16, threads: int = 1, isa: str = "") -> CpuFastRunner:
    """The fast runner with a small pool, or the test fails with the reason."""
    runner = CpuFastRunner.try_build(model, page_size, threads, instruction_sets=(isa,) if isa else ())
    if isinstance(runner, str):
        raise AssertionError(runner)
    runner.allocate(NUM_PAGES)
    return runner


def pack(chunks: list[tuple[list[int], int, list[int]]], every_row: bool = True) -> PackedBatch:
    """A batch of (all ids so far, how many were computed before, pages) per sequence."""
    counts = [len(ids) - done for ids, done, _ in chunks]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = np.zeros((len(chunks), max(len(pages) for _, _, pages in chunks)), np.int32)
    for row, (_, _, pages) in zip(table, chunks, strict=True):
        row[: len(pages)] = pages
    return PackedBatch(
        ids=np.concatenate([ids[done:] for ids, done, _ in chunks]).astype(np.int32),
        positions=np.concatenate([np.arange(done, len(ids)) for ids, done, _ in chunks]).astype(np.int32),
        query_start=starts,
        context_lens=np.array([len(ids) for ids, _, _ in chunks], np.int32),
        page_table=table,
        logit_rows=np.arange(starts[-1], dtype=np.int32) if every_row else starts[1:] - 1,
    )


def whole(runner: CpuFastRunner, ids: list[int], pages: list[int] | None = None) -> np.ndarray[Any, Any]:
    """Logits of every position, the sequence alone and computed at once."""
    pages = pages or list(range(-(-len(ids) // runner.page_size)))
    return runner.forward(pack([(ids, 0, pages)])).copy()

"""Tiny random models of the architectures that exactness is shown on. Float32, CPU, fixed seeds."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

VOCAB = 211
_BASE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}


def _gpt2() -> Any:
    return hf.GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=512, eos_token_id=2)


CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_BASE),
    "qwen2": lambda: hf.Qwen2Config(**_BASE),
    "qwen3": lambda: hf.Qwen3Config(**_BASE, head_dim=16),
    "mistral": lambda: hf.MistralConfig(**_BASE, sliding_window=20),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_BASE,
        head_dim=16,
        sliding_window=12,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),  # fmt: skip
    "gemma2": lambda: hf.Gemma2Config(
        **_BASE,
        head_dim=16,
        sliding_window=12,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),  # fmt: skip
    "gpt2": _gpt2,
    "gpt_neox": lambda: hf.GPTNeoXConfig(**{k: v for k, v in _BASE.items() if k != "num_key_value_heads"}),
    "mixtral": lambda: hf.MixtralConfig(**_BASE, num_local_experts=6, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**_BASE, **_MOE, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_BASE, **_MOE, head_dim=16),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_BASE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),  # fmt: skip
}


def tiny_model(name: str) -> Any:
    """A fresh random model in eval mode. Weights are scaled up so that greedy choices are not near ties."""
    torch.manual_seed(1234)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def generate_alone(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' own greedy ``generate`` gives for one prompt, end-of-sequence ignored."""
    model.set_attn_implementation("eager")
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
    )  # fmt: skip
    return [int(token) for token in out[0, len(prompt) :]]


def greedy_alone(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """As :func:`generate_alone`, by whole forward passes without a cache: a third of the time."""
    model.set_attn_implementation("eager")
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]

"""What the fast path knows of architectures: a table, and a model in the form that is packed.

A decoder that fits is: token embedding (maybe scaled); layers of RMS norm, attention with rotary
embedding over grouped heads (maybe biases, q/k norms, a sliding window), a gated MLP, residual sums
(maybe a norm before each sum); a final RMS norm; a linear head. An :class:`Architecture` says which of
these a family has and what transformers calls the parts; sizes come from the config and the modules.
Whatever does not match, down to an unexpected submodule, is refused with the reason (``read_model.py``).
Nothing here needs torch: a model that was read once is started without it (``start_record.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bf16 = NDArray[np.uint16]
"""bfloat16 numbers as their bits."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family, in transformers' names."""

    model_types: tuple[str, ...]
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """Norms before attention and before the MLP."""
    post_norms: tuple[str, str] | None = None
    """Norms after attention and after the MLP, before the residual sum."""
    qk_norms: bool = False
    norm_offset: float = 0.0
    """Added to a norm's weight."""
    activations: tuple[str, ...] = ("silu",)
    window_everywhere: bool = False
    """``sliding_window`` of the config binds all layers when there are no layer types."""


ARCHITECTURES = (
    Architecture(("llama",)),
    Architecture(("mistral",), window_everywhere=True),
    Architecture(("qwen2",)),
    Architecture(("qwen3",), qk_norms=True),
    Architecture(
        ("gemma3_text",),
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        qk_norms=True,
        norm_offset=1.0,
        activations=("gelu_pytorch_tanh",),
    ),
)

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the sequence's length."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: weight [outputs, inputs] and, where it has one, bias [outputs], float32."""

    weight: Bf16
    bias: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's parts. Norm weights float32, with their offset added."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    attn_norm: NDArray[np.float32]
    mlp_norm: NDArray[np.float32]
    attn_post_norm: NDArray[np.float32] | None
    mlp_post_norm: NDArray[np.float32] | None
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    window: int
    """Positions a token sees, itself included; 0: all."""
    rope: str
    """Key of :attr:`Decoder.ropes`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes and constants: what is still needed of it when its weights are packed."""

    num_layers: int
    hidden: int
    inner: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    score_scale: float
    embed_scale: float
    gelu: bool
    post_norms: bool
    """Norms before the residual sums (Gemma)."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model as the fast path sees it. A tied head has the embedding as its weight, at the same address."""

    shape: Shape
    embedding: Bf16
    head: Linear
    final_norm: NDArray[np.float32]
    layers: tuple[Layer, ...]
    ropes: dict[str, tuple[NDArray[np.float32], float]]
    """Rotary kinds: (inverse frequencies [head_dim / 2], factor on cosine and sine)."""


class NotCovered(Exception):
    """The model does not fit; the message is the reason."""


def is_described(model_type: str) -> bool:
    """Whether the table has a model type, as transformers' config names it; the model's parts may still not fit."""
    return any(model_type in architecture.model_types for architecture in ARCHITECTURES)

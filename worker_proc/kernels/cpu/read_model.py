"""Reading a transformers causal model by the table of ``arch.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worker_proc.kernels.cpu.arch import (
    ARCHITECTURES,
    STATIC_ROPES,
    Architecture,
    Bf16,
    Decoder,
    Layer,
    Linear,
    NotCovered,
    Shape,
)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotCovered(reason)


def _find_architecture(config: Any) -> Architecture:
    for architecture in ARCHITECTURES:
        if config.model_type in architecture.model_types:
            return architecture
    known = sorted(name for a in ARCHITECTURES for name in a.model_types)
    raise NotCovered(f"model type {config.model_type!r} is not described for the CPU fast path ({', '.join(known)})")


def _check_config(config: Any, arch: Architecture) -> None:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    _require(activation in arch.activations, f"activation {activation!r}, covered: {', '.join(arch.activations)}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        _require(not getattr(config, name, None), f"{name} = {getattr(config, name, None)}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    _require(not unknown, f"layer types {sorted(unknown)}")


def _check_children(module: torch.nn.Module, expected: set[str], where: str) -> None:
    found = {name for name, _ in module.named_children()} - {"act_fn"}
    _require(found == expected, f"{where} has the parts {sorted(found)}, expected {sorted(expected)}")


def bits(weight: torch.Tensor) -> Bf16:
    """A bfloat16 tensor's numbers; the same memory where it is contiguous."""
    _require(weight.dtype == torch.bfloat16, f"weights in {weight.dtype}, the CPU fast path needs bfloat16")
    found: Bf16 = weight.detach().contiguous().view(torch.uint16).numpy()
    return found


def _linear(module: torch.nn.Linear) -> Linear:
    return Linear(bits(module.weight), None if module.bias is None else module.bias.detach().float().numpy())


def _norm(module: torch.nn.Module, arch: Architecture) -> NDArray[np.float32]:
    weight = module.weight
    _require(isinstance(weight, torch.Tensor), "a norm without weight")
    values: NDArray[np.float32] = (weight.detach().float() + arch.norm_offset).numpy()  # type: ignore[operator]
    return values


def _ropes(model: Any, config: Any, head_dim: int) -> dict[str, tuple[NDArray[np.float32], float]]:
    rotary = model.rotary_emb
    kinds = {name.removesuffix("inv_freq").removesuffix("_"): name for name, _ in rotary.named_buffers()
             if name.endswith("inv_freq") and "original" not in name}  # fmt: skip
    _require(bool(kinds), "a rotary embedding without inv_freq")
    found = {}
    for kind, buffer in kinds.items():
        parameters = config.rope_parameters[kind] if kind else config.rope_parameters
        rope_type = parameters.get("rope_type", "default")
        _require(rope_type in STATIC_ROPES, f"rotary type {rope_type!r}, covered: {', '.join(STATIC_ROPES)}")
        frequencies = getattr(rotary, buffer).detach().float().cpu().numpy()
        _require(2 * len(frequencies) == head_dim, f"rotary over {2 * len(frequencies)} of {head_dim} columns")
        scaling = getattr(rotary, f"{kind}_attention_scaling" if kind else "attention_scaling")
        found[kind] = (frequencies, float(scaling))
    return found


def _window(config: Any, arch: Architecture, index: int) -> int:
    size = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types:
        return int(size) if types[index] == "sliding_attention" and size else 0
    return int(size) if arch.window_everywhere and size else 0


def _layer(module: Any, index: int, config: Any, arch: Architecture, ropes: dict[str, Any]) -> Layer:
    names = {"self_attn", "mlp", *arch.norms, *(arch.post_norms or ())}
    _check_children(module, names, f"layer {index}")
    attention, mlp = module.self_attn, module.mlp
    qk = {"q_norm", "k_norm"} if arch.qk_norms else set()
    _check_children(attention, {"q_proj", "k_proj", "v_proj", "o_proj"} | qk, f"attention {index}")
    _check_children(mlp, {"gate_proj", "up_proj", "down_proj"}, f"mlp {index}")
    post = [_norm(getattr(module, name), arch) for name in arch.post_norms] if arch.post_norms else [None, None]
    types = getattr(config, "layer_types", None) or ()
    return Layer(
        q=_linear(attention.q_proj), k=_linear(attention.k_proj), v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj), up=_linear(mlp.up_proj), down=_linear(mlp.down_proj),
        attn_norm=_norm(getattr(module, arch.norms[0]), arch), mlp_norm=_norm(getattr(module, arch.norms[1]), arch),
        attn_post_norm=post[0], mlp_post_norm=post[1],
        q_norm=_norm(attention.q_norm, arch) if arch.qk_norms else None,
        k_norm=_norm(attention.k_norm, arch) if arch.qk_norms else None,
        window=_window(config, arch, index),
        rope="" if "" in ropes else types[index],
    )  # fmt: skip


def describe(hf_model: Any) -> Decoder:
    """Read a transformers causal model. Raises :class:`NotCovered` with the reason."""
    config = hf_model.config
    arch = _find_architecture(config)
    _check_config(config, arch)
    model = hf_model.model
    _check_children(model, {"embed_tokens", "layers", "norm", "rotary_emb"}, "model")
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    ropes = _ropes(model, config, head_dim)
    layers = tuple(_layer(m, i, config, arch, ropes) for i, m in enumerate(model.layers))
    group = config.num_attention_heads / config.num_key_value_heads
    _require(group == int(group) and group <= 32, f"{group} query heads per kv head, at most 32")
    _require(head_dim % 2 == 0 and head_dim <= 256, f"head size {head_dim}, at most 256")
    scale = getattr(model.embed_tokens, "embed_scale", None)
    shape = Shape(
        num_layers=len(layers), hidden=config.hidden_size, inner=config.intermediate_size, vocab=config.vocab_size,
        num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads, head_dim=head_dim,
        max_positions=config.max_position_embeddings, norm_eps=float(config.rms_norm_eps),
        score_scale=float(model.layers[0].self_attn.scaling),
        embed_scale=1.0 if scale is None else float(scale.to(torch.bfloat16)),
        gelu=arch.activations[0] != "silu", post_norms=layers[0].attn_post_norm is not None,
    )  # fmt: skip
    return Decoder(
        shape=shape, embedding=bits(model.embed_tokens.weight), head=_linear(hf_model.lm_head),
        final_norm=_norm(model.norm, arch), layers=layers, ropes=ropes,
    )  # fmt: skip


def describe_or_reason(hf_model: Any) -> Decoder | str:
    """:func:`describe`, or the reason why the model is not covered."""
    try:
        return describe(hf_model)
    except NotCovered as reason:
        return str(reason)
    except (AttributeError, KeyError) as error:
        return f"the model is not built as its type {hf_model.config.model_type!r} says: {error}"

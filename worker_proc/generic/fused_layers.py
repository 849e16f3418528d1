"""What lies between the matrix products of a decoder layer: rotary embedding, and residual sums with the norms after
them. Transformers' layers and attention modules stay; the ``forward`` of single instances is replaced, and a trial on
a real step decides each time whether it gives the layer's own numbers. Imports Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.generic.fused_modules import REFUSALS, FusedNorm, same_numbers
from worker_proc.kernels.cuda.rope import rotate

ROTATION = "apply_rotary_pos_emb"
"""The function by which transformers' attention modules rotate queries and keys, in nearly all of their files."""
LLAMA_NORMS = frozenset({"input_layernorm", "post_attention_layernorm"})
GEMMA_NORMS = LLAMA_NORMS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}

TRIAL_LEN = 4
"""Tokens of the step that modules are tried on; more than one, for the first is not rotated."""

Forward = Callable[..., Any]


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb`` for one packed step, in place: query, key [1, H, T, D], cos, sin [1, T, R].

    ``ValueError`` for anything else.
    """
    for heads in (query, key):
        strided = all(stride or size == 1 for size, stride in zip(heads.shape, heads.stride(), strict=True))
        if unsqueeze_dim != 1 or heads.dim() != 4 or heads.shape[0] != 1 or heads.stride(-1) != 1 or not strided:
            raise ValueError(f"heads of {tuple(heads.shape)}, strides {heads.stride()}, cannot be rotated in place")
    if cos.shape != (1, query.shape[2], cos.shape[-1]) or cos.shape[-1] % 2 or cos.shape[-1] > query.shape[-1]:
        raise ValueError(f"cosines of {tuple(cos.shape)} do not fit heads of {tuple(query.shape)}")
    cos, sin = cos[0].contiguous(), sin[0].contiguous()
    for heads in (query, key):
        rotate(heads[0].transpose(0, 1), cos, sin)
    return query, key


def rotated_forward(attention: nn.Module) -> Forward | None:
    """The module's own ``forward`` with our rotation in place of its file's; None if it does not call that.

    A copy of the function that sees another global, bound to this instance: nothing of transformers changes.
    """
    function = inspect.unwrap(getattr(attention.forward, "__func__", attention.forward))
    if not isinstance(function, FunctionType) or ROTATION not in function.__code__.co_names:
        return None
    names = {**function.__globals__, ROTATION: rotate_heads}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, attention)


class SummingForward:
    """A decoder layer's ``forward`` whose residual sums happen in the kernel of the norm that follows.

    ``following``: the norm that gets this layer's output next, if it is one of ours.
    """

    def __init__(self, layer: Any, following: FusedNorm | None) -> None:
        self._layer, self._following = layer, following
        self._norms_results = hasattr(layer, "pre_feedforward_layernorm")

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[1, T, D] -> [1, T, D]; ``kwargs`` go to the attention module, as the layer's own do."""
        layer = self._layer
        attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
        before_mlp = layer.post_attention_layernorm
        if self._norms_results:
            attended, before_mlp = layer.post_attention_layernorm(attended), layer.pre_feedforward_layernorm
        total, normed = before_mlp.add(hidden_states, attended)
        out: Tensor = layer.mlp(normed)
        if self._norms_results:
            out = layer.post_feedforward_layernorm(out)
        if self._following is None:
            out += total
            return out
        return self._following.add_ahead(total, out)


def is_summing(layer: nn.Module) -> bool:
    """The layer looks like Llama's, or like Gemma's whose attention and MLP have norms behind them too."""
    parts = dict(layer.named_children())
    norms = {name for name, part in parts.items() if isinstance(part, FusedNorm)}
    return {"self_attn", "mlp"} == set(parts) - norms and norms in (LLAMA_NORMS, GEMMA_NORMS)


def try_forwards(
    run: Callable[[], object], candidates: Iterable[tuple[nn.Module, Forward]]
) -> list[tuple[nn.Module, Forward]]:
    """The candidates that gave their module's numbers for the module's own arguments, during one ``run`` of the model.

    Modules of one kind must not contain each other.
    """
    agreeing: list[tuple[nn.Module, Forward]] = []

    def trial(candidate: Forward) -> Callable[..., None]:
        def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            try:
                got = candidate(*args, **kwargs)
            except REFUSALS:
                return
            if same_numbers(_first(got), _first(output)):
                agreeing.append((module, candidate))

        return compare

    handles = [module.register_forward_hook(trial(one), with_kwargs=True) for module, one in candidates]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return agreeing


def followers(run: Callable[[], object], layers: Iterable[nn.Module], norms: Iterable[FusedNorm]) -> dict[int, Any]:
    """Which norm is given a layer's output, by ``id`` of the layer, as seen in one ``run`` of the model."""
    outputs: dict[int, Tensor] = {}
    found: dict[int, Any] = {}

    def note(layer: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[id(layer)] = output

    def match(norm: nn.Module, args: Any) -> None:
        for layer, output in outputs.items():
            if args and args[0] is output:
                found.setdefault(layer, norm)

    handles = [layer.register_forward_hook(note) for layer in layers]
    handles += [norm.register_forward_pre_hook(match) for norm in norms]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def trial_step(model: Any) -> Tensor:
    """Logits of a few tokens through transformers' own attention."""
    model.set_attn_implementation("eager")
    ids = (torch.arange(TRIAL_LEN, device=model.device)[None] * 37 + 5) % model.get_input_embeddings().num_embeddings
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits

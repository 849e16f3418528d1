"""Find out, by running a model once, what each of its attention layers needs.

A few tokens go through the model with an attention function and a mask function of ours. The mask
function works out which earlier positions the mask admits (everything, a sliding window, a chunk);
the attention function records shapes, and refuses arguments it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from common.errors import ConfigError
from worker_proc.attention.paged import attention_args
from worker_proc.attention.reference import attend_sequence
from worker_proc.attention.spec import LayerSpec

IGNORED_ARGUMENTS = frozenset(
    {
        "dropout", "is_causal", "sliding_window", "position_ids", "cache", "past_key_values", "past_key_value",
        "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "cache_position", "layer_idx",
        "position_embeddings", "logits_to_keep", "return_dict", "num_items_in_batch", "token_type_ids", "input_ids",
        "mask_function", "allow_is_causal_skip", "return_flash_mask",
    }
)  # fmt: skip
"""Keyword arguments of attention functions that do not change what we compute (the window is taken from the mask)."""
USED_ARGUMENTS = frozenset({"softcap", "s_aux"})


class LayerProbe:
    """Records one :class:`LayerSpec` per attention call while attending plainly (one sequence from position 0)."""

    def __init__(self) -> None:
        self.specs: list[LayerSpec] = []
        self._masks: list[tuple[Tensor, tuple[int, int] | ConfigError]] = []

    def mask(
        self, *, q_length: int, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Transformers' mask interface: returns a mask that :meth:`attention` recognises by identity."""
        device = kwargs.get("device", "cpu")
        limits: tuple[int, int] | ConfigError
        try:
            limits = recognise_mask(mask_function, local_size, torch.device(device))
        except ConfigError as error:  # some models make masks that no layer of theirs uses (a window of 0)
            limits = error
        marker = torch.ones((1, 1, q_length, q_length), dtype=torch.bool, device=device).tril()
        self._masks.append((marker, limits))
        return marker

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Transformers' attention interface; see :class:`LayerProbe`."""
        where = f"{type(module).__name__} (attention call {len(self.specs)})"
        unknown = [
            name
            for name, argument in kwargs.items()
            if argument is not None and name not in USED_ARGUMENTS and name not in IGNORED_ARGUMENTS
        ]
        if unknown:
            raise ConfigError(f"{where} passes {', '.join(unknown)} to attention, which the generic path does not know")
        if key.shape[2] != query.shape[2]:
            raise ConfigError(f"{where} attends to {key.shape[2]} keys for {query.shape[2]} tokens: not self-attention")
        if query.shape[1] % key.shape[1] or value.shape[1] != key.shape[1]:
            heads = f"{query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads"
            raise ConfigError(f"{where} has {heads}")
        window, chunk = self._limits_of(attention_mask, where)
        args = attention_args(query, scaling, kwargs)
        shaped = args.softcap > 0 or args.sinks is not None
        spec = LayerSpec(key.shape[1], key.shape[3], value.shape[3], window, chunk, shaped)
        self.specs.append(spec)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return attend_sequence(q, k, v, 0, spec, args)[None], None

    def _limits_of(self, mask: Tensor | None, where: str) -> tuple[int, int]:
        if mask is None:
            raise ConfigError(f"{where} was called without a mask: transformers does not build one for it")
        for marker, limits in self._masks:
            if marker is mask:
                if isinstance(limits, ConfigError):
                    raise ConfigError(f"{where} is not supported: {limits}")
                return limits
        raise ConfigError(f"{where} uses a mask that did not come from transformers' mask interface")


def recognise_mask(mask_function: Callable[..., Any], local_size: int | None, device: torch.device) -> tuple[int, int]:
    """(window, chunk) of an index-based mask function, 0 for none; ``ConfigError`` for any other pattern."""
    size = local_size or 1024
    for queries in (torch.arange(0, min(size, 64)), torch.tensor([size - 1, size, size + 1, 2 * size, 3 * size + 1])):
        keys = torch.arange(0, 3 * size + 3)
        zero = torch.zeros((), dtype=torch.long, device=device)
        seen = mask_function(zero, zero, queries[:, None].to(device), keys[None, :].to(device)).cpu()
        seen = seen.expand(queries.numel(), keys.numel())
        causal = keys[None] <= queries[:, None]
        patterns = {"causal": causal}
        if local_size:
            patterns["window"] = causal & (keys[None] > queries[:, None] - size)
            patterns["chunk"] = causal & (keys[None] // size == queries[:, None] // size)
        matching = [name for name, pattern in patterns.items() if torch.equal(seen, pattern)]
        if not matching:
            raise ConfigError("its attention mask is neither causal, nor a causal sliding window, nor chunks")
    kind = matching[0]
    return (size if kind == "window" else 0, size if kind == "chunk" else 0)


def probe_layers(model: Any, num_tokens: int = 8) -> tuple[list[LayerSpec], int]:
    """The specs of a model's attention calls in order, and the width of its logits.

    The model's attention implementation is left set to the probe's; the caller sets its own next.
    Raises ``ConfigError`` when a layer cannot be served.
    """
    probe, key = LayerProbe(), "quintet_probe"
    AttentionInterface.register(key, probe.attention)
    AttentionMaskInterface.register(key, probe.mask)
    select_attention(model, key)
    positions = torch.arange(num_tokens, device=model.device)[None]
    with torch.inference_mode():
        logits = model(input_ids=positions % 7 + 1, position_ids=positions, use_cache=False).logits
    expected = getattr(model.config.get_text_config(), "num_hidden_layers", len(probe.specs))
    if len(probe.specs) < expected:
        raise ConfigError(
            f"{type(model).__name__} is not supported: {len(probe.specs)} of its {expected} layers call the "
            "attention interface; the others keep a state that cannot be paged"
        )
    return probe.specs, int(logits.shape[-1])


def select_attention(model: Any, key: str) -> None:
    """Make a loaded model use a registered attention function; ``ConfigError`` if it does not let itself be set."""
    model.set_attn_implementation(key)
    used = model.config.get_text_config()._attn_implementation
    if used != key:
        raise ConfigError(
            f"{type(model).__name__} is not supported: its attention implementation cannot be chosen (it stays {used})"
        )

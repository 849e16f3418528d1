"""Which architectures the generic path does not run, said by name before any weight is loaded.

What these rules let through is still checked by running it: see ``probe.py`` and ``selfcheck.py``.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from common.errors import ConfigError

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Values of ``config.layer_types`` whose only state is the K/V of earlier tokens."""
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_supported(model_class: type[Any], config: Any, context_length: int) -> None:
    """Raise ``ConfigError`` with the reason if the generic path cannot run the architecture.

    ``config`` is the text config; ``context_length`` is --context-length or the model's own limit.
    """
    name = model_class.__name__
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(name, "it is an encoder-decoder; a decoder-only model is needed")
    if getattr(model_class, "_is_stateful", False):
        raise _refused(name, "it is recurrent (keeps a state per sequence), which cannot be paged or shared")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYER_TYPES)
    if strange:
        raise _refused(name, f"it has layers of type {', '.join(strange)}; only attention layers can be paged")
    if getattr(config, "alibi", False):
        raise _refused(name, "it uses ALiBi, a bias that transformers computes outside of the attention interface")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refused(name, "its layers do not use transformers' attention interface")
    if "position_ids" not in signature(model_class.forward).parameters:
        raise _refused(name, "its forward takes no position_ids, so sequences cannot be packed")
    _check_rope(name, config, context_length)


def _check_rope(name: str, config: Any, context_length: int) -> None:
    """Refuse rotary positions that change with the length, unless the context stays where they do not."""
    for rope in _rope_dicts(config):
        kind = rope.get("rope_type", "default")
        if kind not in LENGTH_DEPENDENT_ROPE:
            continue
        original = int(
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if context_length > original:
            raise _refused(
                name,
                f"its {kind} positions depend on the length of the sequence beyond {original} tokens "
                f"and the context is {context_length}; --context-length {original} would run it",
            )


def _rope_dicts(config: Any) -> list[dict[str, Any]]:
    """The rope parameter sets of a config: one, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return [value for value in rope.values() if isinstance(value, dict)]
    return [rope]


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name} is not supported: {reason}. docs/models.md lists what is.")

"""Quantized checkpoints: what their config says, and whether transformers can load them here.

Transformers has an integration per method, and most need a package of their own or a GPU. Where one is
missing, the server does not start, and says which method and what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.quantizers import AutoHfQuantizer

from common.errors import ConfigError

LOAD_ERRORS = (ImportError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError)
"""What integrations raise when a package, a device or a field of the config is missing."""


def quantization_of(hf_config: Any) -> str:
    """``quant_method`` of a model's config; empty for plain weights.

    Raises ``ConfigError`` for a method that transformers does not know: it would take the packed numbers
    for weights.
    """
    settings = getattr(hf_config, "quantization_config", None)
    if settings is None:
        settings = getattr(hf_config.get_text_config(), "quantization_config", None)
    if settings is None:
        return ""
    fields = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")) or "unnamed")
    try:
        known = AutoHfQuantizer.supports_quant_method(fields)
    except ValueError:  # it has no method at all
        known = False
    if not known:
        raise ConfigError(f"the checkpoint is quantized by {method!r}, which transformers cannot load; use another one")
    return method


def check_complete(report: dict[str, Any], folder: Any) -> None:
    """Raise ``ConfigError`` when weights were not in the checkpoint: transformers fills them with random numbers.

    ``report`` is the loading info of ``from_pretrained``.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"{folder}: {len(missing)} weights of the model are not in its files, such as {missing[0]}")


def how_it_runs(model: Any) -> str:
    """What became of the quantized layers of a loaded model, in words."""
    kinds = sorted({type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__})
    if kinds == ["Linear"]:
        return f"this device has no kernels for it, so its weights were converted to {str(model.dtype)[6:]}"
    return f"its layers are {', '.join(kinds)}"


@contextmanager
def explained(method: str) -> Iterator[None]:
    """Around loading: what an integration raises becomes a ``ConfigError`` that names the method."""
    if not method:
        yield
        return
    try:
        yield
    except LOAD_ERRORS as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the checkpoint is quantized by {method!r} and cannot be loaded here: {words}") from error

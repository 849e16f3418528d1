"""Which attention backend serves a model: by what device, dtypes, pages and layers allow."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from common.errors import ConfigError
from worker_proc.attention.backend import AttentionBackend, DecodeKernel, TorchBackend, decode_gather, decode_padded
from worker_proc.attention.kv_types import FP8
from worker_proc.attention.spec import LayerSpec
from worker_proc.attention.varlen_backend import VarlenBackend, find_varlen, varlen_refusal
from worker_proc.device_io import make_io

log = logging.getLogger(__name__)

LEAST_CAPABILITY = {torch.bfloat16: (8, 0), FP8: (8, 9)}
"""CUDA compute capability below which Triton has no conversions of a dtype; (7, 0) for all others."""
VARLEN_CAPABILITY = (8, 0)
"""Compute capability below which the kernel behind torch's varlen attention is not there."""
MOST_HEAD_DIM = 256
ORDER = ("triton", "varlen")
"""Tried in this order on a GPU; torch where neither can."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What decides the backend."""

    specs: tuple[LayerSpec, ...]
    page_size: int
    context_length: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device


def choose_backend(wanted: str, needs: AttentionNeeds) -> AttentionBackend:
    """--attention-backend. ``auto``: torch (with Numba) on CPU, else the first of ``ORDER`` that can, else torch.

    Raises ``ConfigError`` with the reason if the wanted one cannot serve the model here.
    """
    if wanted == "auto":
        reasons = {name: refusal(name, needs) for name in ORDER} if needs.device.type == "cuda" else {}
        name = next((name for name in ORDER if reasons.get(name) == ""), "torch")
        for other, reason in reasons.items():
            if reason:
                log.info("attention backend %s is not used: %s", other, reason)
    else:
        name, reason = wanted, refusal(wanted, needs)
        if reason:
            raise ConfigError(f"--attention-backend {wanted}: {reason}; --attention-backend auto chooses one that can")
    log.info("attention backend: %s", name)
    return build(name, needs)


def refusal(name: str, needs: AttentionNeeds) -> str:
    """Why a backend cannot serve; empty if it can."""
    if name == "triton":
        return _triton_refusal(needs)
    if name == "varlen":
        if needs.device.type != "cuda":
            return "torch.nn.attention.varlen runs on CUDA only"
        if find_varlen() is None:
            return f"torch {torch.__version__} has no torch.nn.attention.varlen with block tables"
        capability = torch.cuda.get_device_capability(needs.device)
        if capability < VARLEN_CAPABILITY:
            return f"compute capability {capability} is below the {VARLEN_CAPABILITY} of its kernels"
        return varlen_refusal(needs.specs, needs.page_size, needs.dtype, needs.kv_dtype)
    return "" if name == "torch" else "unknown; there are torch, triton and varlen"


def _triton_refusal(needs: AttentionNeeds) -> str:
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    widest = max((max(spec.key_dim, spec.value_dim) for spec in needs.specs), default=0)
    if widest > MOST_HEAD_DIM:
        return f"heads of {widest}, at most {MOST_HEAD_DIM} fit a program's registers"
    if needs.device.type == "cuda":
        capability = torch.cuda.get_device_capability(needs.device)
        least = max(LEAST_CAPABILITY.get(dtype, (7, 0)) for dtype in (needs.dtype, needs.kv_dtype))
        if capability < least:
            return f"compute capability {capability} is below the {least} that {needs.dtype}, {needs.kv_dtype} need"
        return ""
    from worker_proc.kernels.cuda.common import is_interpreted

    return "" if is_interpreted() else "on a CPU it runs only under Triton's interpreter (TRITON_INTERPRET=1), slowly"


def build(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """The backend of that name; the caller knows that it can serve."""
    if name == "triton":
        from worker_proc.attention.triton_backend import TritonBackend

        return TritonBackend(needs.specs, needs.page_size, needs.context_length, needs.dtype, make_io(needs.device))
    if name == "varlen":
        attention = find_varlen()
        if attention is not None:
            return VarlenBackend(needs.page_size, make_io(needs.device), attention)
    return TorchBackend(needs.page_size, needs.device, default_decode(needs.device))


def default_decode(device: torch.device) -> DecodeKernel:
    """The ``DecodeKernel`` of the torch backend: on CPU Numba's, or the plain one where Numba is not installed."""
    if device.type != "cpu":
        return decode_padded
    try:
        from worker_proc.attention.cpu import decode_numba
    except ImportError:
        return decode_gather
    return decode_numba

"""KV pools whose dtype is not the model's: rounding on the way in, widening on the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ConfigError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def pool_dtype(wanted: str, model_dtype: torch.dtype) -> torch.dtype:
    """--kv-cache-dtype: ``auto`` is the model's own."""
    if wanted == "auto":
        return model_dtype
    if wanted == "fp8_e4m3":
        return FP8
    raise ConfigError(f"--kv-cache-dtype {wanted}: auto or fp8_e4m3")


def write_cells(pool: Tensor, cells: Tensor, new: Tensor) -> None:
    """``pool[cells] = new``, rounded to the pool's dtype; fp8 clamps to its range, having no infinity."""
    if pool.dtype == FP8:
        rounded = new.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)
        pool.view(torch.uint8).index_copy_(0, cells, rounded.view(torch.uint8))
    else:
        pool.index_copy_(0, cells, new.to(pool.dtype))


def read_cells(pool: Tensor, cells: Tensor, dtype: torch.dtype) -> Tensor:
    """``pool[cells]`` in ``dtype``."""
    if pool.dtype == FP8:
        return pool.view(torch.uint8)[cells].view(FP8).to(dtype)
    return pool[cells]

"""Compile every GPU kernel for a GPU that need not be here: does it compile, and what does a program of it take?

    python -m bench.gpu_compile                  # compute capability 9.0 (H100, H200)
    python -m bench.gpu_compile --capability 80  # A100

Interpreted kernels are right or wrong; whether Triton's compiler takes them, and whether they fit into a GPU's
registers and shared memory, shows only here. Prints a line per compiled variant and one JSON line at the end;
the exit code is 1 if a kernel spills registers or takes more shared memory than --most-shared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Shared memory that one program may have, by compute capability (CUDA programming guide)."""


class AbsentGpu:
    """What Triton asks of a driver in order to compile: the target, and no device behind it."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        """The architecture."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """There is none; the number is only a key of Triton's cache."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0


def record_compilations(capability: int) -> list[dict[str, Any]]:
    """From now on launches compile, and are recorded, and do not run."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(AbsentGpu(capability))
    compiled: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append({"kernel": self.fn.__name__, "warps": kernel.metadata.num_warps,
                         "shared": kernel.metadata.shared, **resources(kernel.asm["cubin"])})  # fmt: skip
        return kernel

    JITFunction.run = compile_only
    return compiled


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of local memory (spilled registers) of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = words.stdout + words.stderr
    found = {name: re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL")}
    numbers = {name: int(match.group(1)) for name, match in found.items() if match}
    return {"registers": numbers.get("REG", 0), "spilled": numbers.get("STACK", 0) + numbers.get("LOCAL", 0)}


def launch_attention() -> None:
    """Decode and extend of the shapes that are served: (kv heads, groups, size, window, soft cap, dtypes)."""
    import torch

    from worker_proc.attention.spec import AttentionArgs, LayerSpec
    from worker_proc.attention.triton_backend import TritonBackend
    from worker_proc.device_io import HostIo
    from worker_proc.runner import PackedBatch

    half, bf16, fp32, fp8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
    shapes = [
        (4, 7, 128, 0, 0.0, bf16, bf16), (4, 7, 128, 0, 0.0, half, fp8), (4, 2, 256, 512, 50.0, bf16, bf16),
        (2, 1, 80, 0, 0.0, bf16, bf16), (2, 1, 64, 0, 0.0, fp32, fp32),
    ]  # fmt: skip
    for kv_heads, groups, dim, window, softcap, dtype, kv_dtype in shapes:
        spec, args = LayerSpec(kv_heads, dim, dim, window), AttentionArgs(dim**-0.5, softcap)
        backend = TritonBackend((spec,), 16, 32768, dtype, HostIo())
        positions = np.concatenate([[40], np.arange(300)]).astype(np.int32)
        starts, lens = np.array([0, 1, 301], np.int32), np.array([41, 300], np.int32)
        plan = backend.plan(PackedBatch(positions, positions, starts, lens, np.zeros((2, 20), np.int32), lens[:0]))
        query = torch.zeros(301, kv_heads * groups, dim, dtype=dtype)
        new = torch.zeros(301, kv_heads, dim, dtype=dtype)
        keys, values = (torch.zeros(320, kv_heads, dim, dtype=kv_dtype) for _ in range(2))
        backend.write(new, new, keys, values, plan)
        backend.attend(query, keys, values, plan, spec, args)


def launch_sampling() -> None:
    """Everything a sampler can be asked for, over a vocabulary of 152,064."""
    import torch

    from common.messages import SamplingParams
    from worker_proc.device_io import HostIo
    from worker_proc.sampling.gpu import GpuSampler
    from worker_proc.sampling.request import SampleRequest

    vocab_size = 152_064
    params = SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=5, presence_penalty=0.5, logit_bias={1: 2.0}
    )
    mask, ids = np.zeros(vocab_size // 32, np.int32), np.arange(20, dtype=np.int32)
    GpuSampler(HostIo()).sample(
        torch.zeros(2, vocab_size), [SampleRequest(0, params, 0, ids, 10, frozenset(), mask)] * 2
    )


def launch_rowwise() -> None:
    """Norm, rotary embedding and gate of a 7B model, and of Gemma."""
    import torch

    from worker_proc.kernels.cuda.activation import gate_mul
    from worker_proc.kernels.cuda.norm import rms_norm
    from worker_proc.kernels.cuda.rope import rotate

    for gemma in (False, True):
        x, weight = torch.zeros(4, 3584, dtype=torch.bfloat16), torch.zeros(3584, dtype=torch.bfloat16)
        rms_norm(x, weight, 1e-6, torch.empty_like(x), residual=x.clone(), offset=gemma)
        gate, up = torch.zeros(4, 2 * 18944, dtype=torch.bfloat16).split(18944, dim=1)
        gate_mul(gate, up, gelu=gemma)
    cos = torch.zeros(4, 128, dtype=torch.bfloat16)
    rotate(torch.zeros(4, 28, 128, dtype=torch.bfloat16), cos, cos)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--most-shared", type=int, default=0, help="bytes; 0: what the capability has")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"  # before the first import of Triton
    compiled = record_compilations(arguments.capability)
    for launch in (launch_rowwise, launch_sampling, launch_attention):
        launch()
    most_shared = arguments.most_shared or SHARED_BYTES[arguments.capability]
    bad = [one for one in compiled if one["spilled"] or one["shared"] > most_shared]
    for one in compiled:
        print(f"{one['kernel']:16} {one['warps']:2} warps, {one['registers']:3} registers, {one['spilled']} bytes "
              f"spilled, {one['shared']} bytes shared")  # fmt: skip
    print(json.dumps({"capability": arguments.capability, "variants": len(compiled), "unfit": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

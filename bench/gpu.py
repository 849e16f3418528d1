"""The GPU worker in one call: build, check and time everything, in under ten minutes on one GPU.

    python -m bench.gpu              # Qwen2.5-7B's shape with random weights, on a CUDA device
    python -m bench.gpu --dry-run    # the script itself, tiny sizes on the CPU under Triton's interpreter

Parts: ``compile`` (bench/gpu_compile.py), ``check`` (the kernels' tests, on the device), ``kernels`` and ``steps``
against their floors, ``serve`` (the workload over HTTP, and the gap between steps in a profile of it),
``transformers`` (its continuous batching on the same work). A part that fails is reported and the next begins; one
that would begin past --budget is left out and named.
The last line is one JSON object. Times of a dry run say nothing about anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_shapes import QWEN2_5_7B, SEED_LOAD, TINY, TINY_LOAD, write_folder

PARTS = ("compile", "check", "kernels", "steps", "serve", "transformers")
TESTS = ["tests/unit/test_gpu_attention.py", "tests/unit/test_gpu_sampling.py", "tests/unit/test_gpu_rowwise.py",
         "tests/unit/test_gpu_backends.py", "tests/unit/test_gpu_fused.py"]  # fmt: skip


def run_module(arguments: list[str], environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run ``python -m ...``; its last line. RuntimeError with the end of its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(lines[-15:]))
    return [{"result": done.stdout.strip().splitlines()[-1]}]


def parts(dry: bool, folder: Path, log: Path) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """What each part does."""
    shape, load, device_name = (TINY, TINY_LOAD, "cpu") if dry else (QWEN2_5_7B, SEED_LOAD, "cuda")

    def machine() -> Any:
        import torch

        from bench.gpu_kernels import measure_machine

        found = measure_machine(torch.device(device_name), dry)
        print(f"measured: {found.bytes_per_s / 1e9:.1f} GB/s copying, {found.flops_per_s / 1e12:.2f} TFLOP/s bfloat16")
        return found

    def compile_all() -> list[dict[str, Any]]:
        if dry:
            return run_module(["bench.gpu_compile"])
        import torch

        major, minor = torch.cuda.get_device_capability()
        return run_module(["bench.gpu_compile", "--capability", str(10 * major + minor)])

    def check() -> list[dict[str, Any]]:
        chosen = ["tests/unit/test_gpu_rowwise.py"] if dry else TESTS
        return run_module(["pytest", "-q", "-p", "no:cacheprovider", *chosen])

    def kernels() -> list[dict[str, Any]]:
        from bench.gpu_kernels import kernel_table

        return kernel_table(machine(), shape, dry)

    def steps() -> list[dict[str, Any]]:
        from bench.gpu_steps import step_table

        return step_table(machine(), shape, dry)

    def serve() -> list[dict[str, Any]]:
        from bench.gpu_serve import serve_table

        return serve_table(write_folder(folder, shape), shape, load, device_name, log)

    def peers() -> list[dict[str, Any]]:
        from bench.gpu_serve import transformers_table

        return transformers_table(shape, load, device_name)

    return dict(zip(PARTS, (compile_all, check, kernels, steps, serve, peers), strict=True))


def show(rows: list[dict[str, Any]]) -> None:
    """A line each."""
    for row in rows:
        words = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
        print("  " + ", ".join(f"{name} {word}" for name, word in zip(row, words, strict=True)))


def free_gpu() -> None:
    """Give back what a part has left on the device: the server needs it."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma separated")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no part begins")
    arguments = parser.parse_args()
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
    import torch

    if not arguments.dry_run and not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device. Nothing was measured; --dry-run tries the script on the CPU.")
        return 2
    wanted = arguments.parts.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"--parts {', '.join(unknown)}: there are {', '.join(PARTS)}")
    name = "CPU, interpreted (a dry run)" if arguments.dry_run else torch.cuda.get_device_name()
    print(f"device: {name}; torch {torch.__version__}")
    results: dict[str, Any] = {"device": name}
    started, failed = time.perf_counter(), False
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary, "server.log")
        for part, work in parts(arguments.dry_run, Path(temporary, "model"), log).items():
            if part not in wanted:
                continue
            if time.perf_counter() - started > arguments.budget:
                results[part] = "left out: the budget was spent"
                print(f"{part}: {results[part]}")
                continue
            begun = time.perf_counter()
            print(f"{part}:", flush=True)
            try:
                results[part] = work()
                show(results[part])
            except Exception as error:  # the parts after it are wanted all the same
                failed, results[part] = True, f"failed: {error}"
                print(f"  failed: {error}")
                if part == "serve" and log.exists():
                    print("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
            free_gpu()
            print(f"  ({time.perf_counter() - begun:.0f} s)")
    print(json.dumps(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""How far logits are from float32: the CPU fast path's, and transformers' in bf16.

    python -m bench.logit_error --model DIR [--isa NAME ...] [--positions 480]

One prefill over the text of README.md, every position's logits. For each path: root mean square error over the
standard deviation of the float32 logits, largest error, and the share of positions with float32's likeliest
token. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from worker_proc.kernels.cpu.fast_runner import CpuFastRunner
from worker_proc.runner import PackedBatch

PAGE_SIZE = 16
Logits = NDArray[np.float32]


def fast_logits(model: Any, ids: list[int], isa: str) -> Logits:
    """float32 [positions, vocab] by the fast path; raises SystemExit where ``isa`` (empty: the best) cannot run."""
    runner = CpuFastRunner.try_build(model, PAGE_SIZE, torch.get_num_threads(), instruction_sets=(isa,) if isa else ())
    if isinstance(runner, str):
        raise SystemExit(runner)
    num_pages = -(-len(ids) // PAGE_SIZE)
    runner.allocate(num_pages)
    everything = np.arange(len(ids), dtype=np.int32)
    batch = PackedBatch(
        ids=np.array(ids, np.int32), positions=everything, query_start=np.array([0, len(ids)], np.int32),
        context_lens=np.array([len(ids)], np.int32), page_table=np.arange(num_pages, dtype=np.int32)[None],
        logit_rows=everything,
    )  # fmt: skip
    logits = runner.forward(batch).copy()
    print(f"{runner.isa.name}: {runner.num_threads} threads", file=sys.stderr)
    runner.close()
    return logits


def errors(logits: Logits, exact: Logits) -> dict[str, float]:
    """The three figures."""
    difference = logits - exact
    return {
        "relative_rms": round(float(np.sqrt((difference**2).mean()) / exact.std()), 5),
        "largest": round(float(np.abs(difference).max()), 3),
        "same_likeliest": round(float((logits.argmax(1) == exact.argmax(1)).mean()), 4),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a bf16 transformers model")
    parser.add_argument("--isa", action="append", default=[], help="a name of kernels/cpu/isa.py; repeatable")
    parser.add_argument("--positions", type=int, default=480)
    args = parser.parse_args()
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    ids = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"][: args.positions]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        found = {"transformers bf16": model(torch.tensor([ids])).logits[0].float().numpy()}
        for isa in args.isa or [""]:
            found[f"fast path {isa}".strip()] = fast_logits(model, ids, isa)
        exact = model.float()(torch.tensor([ids])).logits[0].numpy()
    out = {name: errors(logits, exact) for name, logits in found.items()}
    for name, figures in out.items():
        print(f"{name}: {figures}")
    print(json.dumps({"positions": len(ids), **out}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

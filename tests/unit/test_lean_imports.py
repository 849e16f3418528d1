"""Transformers is imported without the compiler, and whoever needs the compiler gets it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = "{'sympy', 'torch._inductor', 'torch.distributed.tensor'} & set(sys.modules)"
PROGRAM = f"""
import sys
from worker_proc.lean_imports import with_compiler, without_compiler, without_ranks
without_ranks()
without_compiler()
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
print("heavy:", sorted({HEAVY}))
small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
model = AutoModelForCausalLM.from_config(LlamaConfig(**small))
print("logits:", tuple(model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape))
FINISH
"""


def run(finish: str) -> str:
    program = PROGRAM.replace("FINISH", finish)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_built_and_run_without_the_compiler_which_an_attribute_brings_back() -> None:
    out = run("print('cache:', torch._dynamo.config.cache_size_limit > 0, 'torch._dynamo.eval_frame' in sys.modules)")
    assert "heavy: []" in out
    assert "logits: (1, 3, 50)" in out
    assert "cache: True True" in out


def test_code_that_we_do_not_know_gets_the_compiler_itself() -> None:
    out = run(
        "with_compiler()\n"
        "from torch._dynamo.eval_frame import OptimizedModule\n"
        "compiled = torch.compile(lambda x: x + 1, backend='eager')\n"
        "print('compiled:', compiled(torch.ones(1)).item(), type(sys.modules['torch._dynamo']).__name__)"
    )
    assert "compiled: 2.0 module" in out


def test_a_submodule_brings_the_package_and_is_loaded_once() -> None:
    out = run(
        "import torch._dynamo.utils as found\n"
        "import torch._dynamo as package\n"
        "print('package:', type(package).__name__, package.utils is found is sys.modules['torch._dynamo.utils'])\n"
        "print('spec:', found.__spec__.loader.__class__.__name__, hasattr(torch, '_inductor'))"
    )
    assert "package: module True" in out
    assert "spec: SourceFileLoader True" in out

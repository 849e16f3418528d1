"""Which attention backend serves, said with reasons; PyTorch's varlen attention behind our interface; fp8 in torch."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from common.flags import build
from tests.integration.tiny_models import VOCAB, tiny_model
from tests.unit.gpu_support import DEVICE, assert_near, ragged
from worker_proc.attention.backend import TorchBackend, decode_gather, decode_padded
from worker_proc.attention.choice import AttentionNeeds, choose_backend
from worker_proc.attention.kv_types import FP8, pool_dtype
from worker_proc.attention.reference import attend_plain
from worker_proc.attention.spec import AttentionArgs, LayerSpec
from worker_proc.attention.varlen_backend import VarlenBackend, find_varlen, varlen_refusal
from worker_proc.device_io import make_io
from worker_proc.generic.runner import GenericRunner
from worker_proc.generic.selfcheck import FP8_TOLERANCE, compare, reference_logits

CPU = torch.device("cpu")
BF16 = torch.bfloat16
PLAIN = LayerSpec(2, 64, 64)


def needs(**changes: Any) -> AttentionNeeds:
    given = {"specs": (PLAIN,), "page_size": 16, "context_length": 512, "dtype": BF16, "kv_dtype": BF16, "device": CPU}
    return AttentionNeeds(**(given | changes))


def test_auto_is_torch_on_a_cpu_and_others_are_refused_with_the_reason() -> None:
    assert choose_backend("auto", needs()).name == "torch"
    with pytest.raises(ConfigError, match=r"--attention-backend varlen: .* CUDA only; --attention-backend auto"):
        choose_backend("varlen", needs())
    with pytest.raises(ConfigError, match="heads of 576, at most 256"):
        choose_backend("triton", needs(specs=(LayerSpec(1, 576, 512),)))


@pytest.mark.parametrize(
    ("capability", "changes", "chosen", "said"),
    [
        ((9, 0), {}, "triton", ""),
        ((8, 0), {"kv_dtype": FP8}, "torch", "triton is not used: compute capability (8, 0) is below the (8, 9)"),
        ((8, 9), {"kv_dtype": FP8}, "triton", ""),
        ((9, 0), {"specs": (LayerSpec(1, 320, 320),)}, "torch", "triton is not used: heads of 320"),
        ((7, 5), {"page_size": 256}, "torch", "varlen is not used: compute capability (7, 5) is below the (8, 0)"),
        ((7, 5), {"dtype": torch.float16, "kv_dtype": torch.float16}, "triton", ""),
    ],
)
def test_auto_goes_by_what_the_gpu_can_do_and_the_log_says_so(
    capability: tuple[int, int], changes: dict[str, Any], chosen: str, said: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    caplog.set_level(logging.INFO)
    assert choose_backend("auto", needs(device=torch.device("cuda"), **changes)).name == chosen
    assert f"attention backend: {chosen}" in caplog.text and said in caplog.text


def test_without_triton_a_gpu_has_varlen_where_the_pages_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    assert choose_backend("varlen", needs(device=cuda, page_size=256)).name == "varlen", "forced, Triton or not"
    monkeypatch.setattr("worker_proc.attention.choice.find_spec", lambda name: None)
    assert choose_backend("auto", needs(device=cuda, page_size=256)).name == "varlen"
    assert choose_backend("auto", needs(device=cuda)).name == "torch"
    with pytest.raises(ConfigError, match="--attention-backend triton: the package triton is not installed"):
        choose_backend("triton", needs(device=cuda))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is for machines without a GPU")
def test_triton_on_a_cpu_needs_its_interpreter() -> None:
    assert choose_backend("triton", needs()).name == "triton"
    code = (
        "import torch\n"
        "from worker_proc.attention.choice import *\n"
        "from worker_proc.attention.spec import LayerSpec\n"
        "needs = AttentionNeeds((LayerSpec(1, 8, 8),), 16, 64, torch.float32, torch.float32, torch.device('cpu'))\n"
        "print(refusal('triton', needs))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"TRITON_INTERPRET": "0"}, check=True
    )
    assert "only under Triton's interpreter (TRITON_INTERPRET=1)" in done.stdout


def test_a_cpu_worker_does_without_triton() -> None:
    """Nothing of ours imports it, and the generic path serves where it cannot be imported."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from tests.integration.tiny_models import tiny_model\n"
        "from worker_proc.generic.runner import GenericRunner\n"
        "from worker_proc.generic.selfcheck import compare, reference_logits\n"
        "model = tiny_model('llama')\n"
        "reference = reference_logits(model)\n"
        "runner = GenericRunner(model, 16)\n"
        "runner.allocate(8)\n"
        "assert compare(runner, reference, 211).ok\n"
        "ours = [name for name in sys.modules if name.startswith(('worker_proc.kernels.cuda.', 'triton.'))]\n"
        "assert not ours, ours\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_varlen_covers_what_flash_attention_does() -> None:
    assert find_varlen() is not None, "torch 2.13 has it"
    assert varlen_refusal((PLAIN,), 256, BF16, BF16) == ""
    for want, arguments in {
        "multiples of 256 tokens, not 16": ((PLAIN,), 16, BF16, BF16),
        "needs float16 or bfloat16": ((PLAIN,), 256, torch.float32, torch.float32),
        "both model and KV pool": ((PLAIN,), 256, BF16, FP8),
        "head sizes 64 and 32": ((LayerSpec(2, 64, 32),), 256, BF16, BF16),
        "soft cap or sinks": ((PLAIN, LayerSpec(2, 64, 64, shaped=True)), 256, BF16, BF16),
        "chunked attention": ((LayerSpec(2, 64, 64, chunk=8),), 256, BF16, BF16),
    }.items():
        assert want in varlen_refusal(*arguments)


def documented_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """What torch's documentation says ``varlen_attn`` computes, in plain torch: the real one needs a GPU."""
    assert cu_seq_k is None and enable_gqa == (query.shape[1] != key.shape[2])
    assert window_size[1] == 0 and block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    out = []
    for s in range(len(seqused_k)):
        rows, length = slice(int(cu_seq_q[s]), int(cu_seq_q[s + 1])), int(seqused_k[s])
        assert rows.stop - rows.start <= max_q and length <= max_k
        pages = block_table[s, : -(-length // key.shape[1])].long()
        k, v = (pool[pages].flatten(0, 1)[:length] for pool in (key, value))
        at = torch.arange(length)
        q_at = at[length - (rows.stop - rows.start) :, None]
        seen = at <= q_at
        if window_size[0] >= 0:
            seen &= at >= q_at - window_size[0]
        out.append(attend_plain(query[rows], k, v, seen, AttentionArgs(scale)))
    return torch.cat(out)


@pytest.mark.parametrize("spec", [LayerSpec(2, 64, 64), LayerSpec(4, 32, 32, window=7)], ids=["plain", "window"])
def test_varlen_backend_asks_for_the_same_attention(spec: LayerSpec) -> None:
    args = AttentionArgs(0.2)
    case = ragged([(0, 1), (130, 1), (40, 9), (0, 37)], 256, 4, spec, args, BF16)
    real = find_varlen() if DEVICE.type == "cuda" else documented_varlen
    backend = VarlenBackend(256, make_io(DEVICE), real)
    plan = backend.plan(case.batch)
    backend.write(case.new_key, case.new_value, case.keys, case.values, plan)
    assert_near(backend.attend(case.query, case.keys, case.values, plan, spec, args), case.expected, BF16)


@pytest.mark.parametrize("decode", [decode_gather, decode_padded])
def test_torch_backend_with_fp8_pools(decode: Any) -> None:
    spec, args = LayerSpec(2, 64, 64, window=30), AttentionArgs(0.125)
    case = ragged([(33, 1), (20, 7)], 16, 4, spec, args, BF16, kv_dtype=pool_dtype("fp8_e4m3", BF16))
    backend = TorchBackend(16, DEVICE, decode)
    plan = backend.plan(case.batch)
    backend.write(case.new_key, case.new_value, case.keys, case.values, plan)
    assert_near(backend.attend(case.query, case.keys, case.values, plan, spec, args), case.expected, BF16)


def test_a_model_with_an_fp8_pool_passes_its_start_up_check_in_a_quarter_of_the_bytes() -> None:
    model = tiny_model("qwen3")
    reference = reference_logits(model)
    whole, small = GenericRunner(model, 16), GenericRunner(model, 16, kv_dtype="fp8_e4m3")
    small.allocate(8)
    result = compare(small, reference, VOCAB, FP8_TOLERANCE)
    assert result.ok and result.error > 1e-3, "the pool does round"
    assert small.kv_bytes_per_page() * 4 == whole.kv_bytes_per_page()


def test_the_fast_cpu_path_and_what_it_has_itself_are_refused_together() -> None:
    for flag in ({"attention_backend": "triton"}, {"kv_cache_dtype": "fp8_e4m3"}):
        build(flag)
        with pytest.raises(ConfigError, match="leave out --worker-path cpu-fast"):
            build({"worker_path": "cpu-fast", **flag})


@pytest.mark.skipif(DEVICE.type != "cpu", reason="says what it says without a GPU")
def test_the_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "no GPU: torch sees no CUDA device. Nothing was measured" in done.stdout

"""Start-up decisions of the worker: pages, threads, refusals, masks."""

from __future__ import annotations

import resource
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers as hf
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from common.config import ServerConfig, WorkerConfig
from common.errors import ConfigError
from worker_proc import loading
from worker_proc.generic.probe import recognise_mask
from worker_proc.generic.refusals import check_supported
from worker_proc.loaded import LoadedWorker, choose_context_length, create_pool
from worker_proc.main import model_type
from worker_proc.memory import (
    CPU_DEFAULT_CAP_BYTES,
    PoolRequest,
    WorkerState,
    choose_num_pages,
    free_host_bytes,
    load_state,
    save_state,
)
from worker_proc.precision import Precision, choose_precision, cpu_has_bf16, fast_path_may_take
from worker_proc.threads import num_threads, set_thread_environment

CPU = torch.device("cpu")


def pool(**kwargs: Any) -> PoolRequest:
    defaults = {
        "page_size": 16, "bytes_per_page": 1 << 20, "free_bytes": 10 << 30, "on_gpu": False, "mem_fraction": 0.0,
        "max_total_tokens": 0, "useful_tokens": 1 << 30,
    }  # fmt: skip
    return PoolRequest(**(defaults | kwargs))


def test_pool_takes_three_tenths_of_free_memory_on_cpu_and_more_on_gpu() -> None:
    assert choose_num_pages(pool()) == int((10 << 30) * 0.3) >> 20
    assert choose_num_pages(pool(on_gpu=True)) == int((10 << 30) * 0.85) >> 20
    assert choose_num_pages(pool(mem_fraction=0.5)) == 5 << 10


def test_cpu_pool_is_capped_unless_a_fraction_is_asked_for() -> None:
    assert choose_num_pages(pool(free_bytes=1 << 40)) == CPU_DEFAULT_CAP_BYTES >> 20
    assert choose_num_pages(pool(free_bytes=1 << 40, mem_fraction=0.1)) > CPU_DEFAULT_CAP_BYTES >> 20


def test_pool_is_no_larger_than_requests_and_a_prefix_cache_can_use() -> None:
    assert choose_num_pages(pool(useful_tokens=1600)) == 200


def test_max_total_tokens_overrides_and_is_rounded_up_to_pages() -> None:
    assert choose_num_pages(pool(max_total_tokens=1601)) == 101
    with pytest.raises(ConfigError, match=r"1000000 needs 61.04 GiB"):
        choose_num_pages(pool(max_total_tokens=1_000_000))


def test_max_total_tokens_of_fewer_pages_than_are_needed_is_refused_and_not_raised() -> None:
    assert choose_num_pages(pool(max_total_tokens=128)) == choose_num_pages(pool(max_total_tokens=113)) == 8
    for tokens in (112, 64, 1):
        with pytest.raises(ConfigError, match=rf"--max-total-tokens {tokens} .* set it to 128"):
            choose_num_pages(pool(max_total_tokens=tokens))


def test_pool_that_would_be_too_small_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match="hold 3 KV pages"):
        choose_num_pages(pool(free_bytes=10 << 20))


def test_pool_is_sized_within_the_limit_on_address_space(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + (64 << 20), resource.RLIM_INFINITY))
    with caplog.at_level("INFO"):
        assert 0 < free_host_bytes() <= 64 << 20
    assert "ulimit -v" in caplog.text and f"{(used >> 20) + 64} MiB" in caplog.text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used // 2, resource.RLIM_INFINITY))
    assert free_host_bytes() == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert free_host_bytes() > 64 << 20


def test_a_pool_that_cannot_be_had_is_the_configurations_fault_unless_it_was_had_before() -> None:
    def allocate(num_pages: int) -> None:
        raise MemoryError(f"cannot map {num_pages} MiB for the KV pool")

    runner: Any = SimpleNamespace(allocate=allocate)
    with pytest.raises(ConfigError, match=r"cannot map 77 MiB.*--max-total-tokens or --mem-fraction-static"):
        create_pool(runner, 77, None)
    with pytest.raises(MemoryError):
        create_pool(runner, 77, WorkerState(path="generic-torch", dtype="float32", num_pages=77, page_size=16))


def test_restarted_worker_repeats_the_first_ones_choices(tmp_path: Path) -> None:
    assert load_state(tmp_path, 0) is None
    state = WorkerState(path="generic-torch", dtype="float32", num_pages=77, page_size=16)
    save_state(tmp_path, 0, state)
    assert load_state(tmp_path, 0) == state
    assert load_state(tmp_path, 1) is None


def test_threads_are_shared_between_ranks_and_the_users_environment_wins() -> None:
    assert num_threads(7) == 7
    assert num_threads(0, tp_size=10_000) == 1
    environ = {"OMP_NUM_THREADS": "3"}
    set_thread_environment(environ, 8)
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["NUMBA_NUM_THREADS"] == "8"


def test_bf16_is_read_from_the_cpus_flags(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx512f avx512_bf16 amx_tile\n")
    assert cpu_has_bf16(info)
    info.write_text("processor : 0\nflags : fpu avx2 avx512f\n")
    assert not cpu_has_bf16(info)
    assert not cpu_has_bf16(tmp_path / "absent")


def test_auto_is_bf16_where_the_fast_path_widens_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("worker_proc.precision.cpu_has_bf16", lambda: False)
    assert choose_precision("auto", cpu, fast_path=True) == Precision(torch.bfloat16, torch.float32)
    assert choose_precision("auto", cpu, fast_path=True).is_for_fast_path
    assert choose_precision("auto", cpu, fast_path=False) == Precision(torch.float32, torch.float32)
    assert choose_precision("float32", cpu, fast_path=True) == Precision(torch.float32, torch.float32)
    monkeypatch.setattr("worker_proc.precision.cpu_has_bf16", lambda: True)
    assert not choose_precision("auto", cpu, fast_path=True).is_for_fast_path


class Weights:
    """Stands for a model that was loaded."""


def test_a_model_that_the_fast_path_refuses_is_loaded_again_once_the_first_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[tuple[torch.dtype, weakref.ref[Weights]]] = []

    def load(_config: Any, _hf_config: Any, dtype: torch.dtype, *_: Any) -> Weights:
        assert all(weights() is None for _, weights in loaded), "two copies of the weights in memory"
        model = Weights()
        loaded.append((dtype, weakref.ref(model)))
        return model

    generic = LoadedWorker(SimpleNamespace(), 7, 128, "cpu")  # type: ignore[arg-type]
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *_, **__: hf.LlamaConfig())
    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(loading, "reference_logits", lambda _: [])
    monkeypatch.setattr(loading, "fast_path_may_take", lambda _: True)
    monkeypatch.setattr(loading, "load_fast", lambda *_: "heads of 12")
    monkeypatch.setattr(loading, "pack_linears", lambda _: 0)
    monkeypatch.setattr(loading, "build_generic", lambda *_: (generic, ""))
    monkeypatch.setattr("worker_proc.precision.cpu_has_bf16", lambda: False)
    config = ServerConfig(model_dir="anywhere", worker=WorkerConfig(device="cpu"))
    assert loading.load_worker(config, torch.get_num_threads(), None) is generic
    assert [dtype for dtype, _ in loaded] == [torch.bfloat16, torch.float32]


def test_the_fast_path_may_take_described_models_with_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.kernels.cpu.isa.detect", lambda: "AVX2")
    assert not fast_path_may_take(hf.LlamaConfig()), "the reason why there is no instruction set"
    monkeypatch.setattr("worker_proc.kernels.cpu.isa.detect", object)
    assert fast_path_may_take(hf.LlamaConfig())
    assert not fast_path_may_take(hf.GPT2Config())
    quantized = hf.LlamaConfig(quantization_config={"quant_method": "fp8"})
    assert not fast_path_may_take(quantized)


def test_context_length_is_at_most_the_models() -> None:
    assert choose_context_length(0, 128) == 128
    assert choose_context_length(64, 128) == 64
    assert choose_context_length(64, 0) == 64
    with pytest.raises(ConfigError, match="more than the 128"):
        choose_context_length(129, 128)


@pytest.mark.parametrize(
    ("model_class", "config", "reason"),
    [
        (hf.MambaForCausalLM, hf.MambaConfig(), "recurrent"),
        (hf.BartForCausalLM, hf.BartConfig(is_encoder_decoder=True), "encoder-decoder"),
        (hf.BloomForCausalLM, hf.BloomConfig(), "attention interface"),
        (hf.FalconForCausalLM, hf.FalconConfig(alibi=True), "ALiBi"),
        (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(num_hidden_layers=4), "recurrent|linear_attention"),
    ],
)
def test_architectures_are_refused_by_name(model_class: Any, config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{model_class.__name__} is not supported: .*({reason})"):
        check_supported(model_class, config, 128)


def test_positions_that_depend_on_length_are_refused_beyond_the_original_context() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = hf.LlamaConfig(max_position_embeddings=512, rope_parameters=rope)
    check_supported(hf.LlamaForCausalLM, config, 512)
    with pytest.raises(ConfigError, match="--context-length 512 would run it"):
        check_supported(hf.LlamaForCausalLM, config, 1024)


def test_masks_are_recognised_by_what_they_admit() -> None:
    zeros = torch.zeros(1, dtype=torch.long)
    assert recognise_mask(causal_mask_function, None, CPU) == (0, 0)
    assert recognise_mask(sliding_window_causal_mask_function(12), 12, CPU) == (12, 0)
    assert recognise_mask(chunked_causal_mask_function(12, zeros), 12, CPU) == (0, 12)
    for strange in (bidirectional_mask_function, lambda b, h, q, k: (k <= q) & (k % 2 == 0)):
        with pytest.raises(ConfigError, match="mask"):
            recognise_mask(strange, None, CPU)


@pytest.mark.parametrize(
    ("text", "kind"),
    [('{"model_type": "llama"}', "llama"), ("{}", ""), ("[]", ""), ("nonsense", ""), (None, "")],
)
def test_a_models_type_is_read_before_anything_is_imported_for_it(tmp_path: Path, text: str | None, kind: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert model_type(tmp_path) == kind

"""The parts of the CPU fast path on their own: packing, tiles, the plan of attention, the disk cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from worker_proc.kernels.cpu import compile_cache, isa, kernels, packing, read_model, tiles
from worker_proc.kernels.cpu.layout import row_bytes


def features(text: str) -> dict[str, bool]:
    return dict.fromkeys(text.split(), True)


AVX512 = "avx2 fma avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("machine", "cpu", "found", "names"),
    [
        ("x86_64", "sapphirerapids", f"{AVX512} avx512bf16 amx-tile amx-bf16",
         ["amx_bf16", "avx512_bf16_fma", "avx512_bf16", "avx512", "avx2"]),
        ("x86_64", "emeraldrapids", f"{AVX512} avx512bf16", ["avx512_bf16_fma", "avx512_bf16", "avx512", "avx2"]),
        ("x86_64", "znver5", f"{AVX512} avx512bf16", ["avx512_bf16", "avx512_bf16_fma", "avx512", "avx2"]),
        ("x86_64", "skylake-avx512", AVX512, ["avx512", "avx2"]),
        ("x86_64", "haswell", "avx2 fma", ["avx2"]),
        ("x86_64", "nehalem", "sse4.2", []),
        ("aarch64", "neoverse-n1", "neon", ["neon"]),
    ],
)  # fmt: skip
def test_instruction_sets_come_fastest_first(machine: str, cpu: str, found: str, names: list[str]) -> None:
    assert [i.name for i in isa.candidates(features(found), machine, cpu)] == names


def test_panels_hold_pairs_of_inputs_for_sixteen_columns() -> None:
    weight = torch.arange(64 * 96).view(64, 96).to(torch.bfloat16)
    bits = read_model.bits(weight)
    packed = packing.pack_panels(bits).reshape(2, 3, 2, 16, 16, 2)
    for panel, step, block, pair, column, half in ((0, 0, 0, 0, 0, 0), (1, 2, 1, 7, 5, 1), (0, 1, 1, 15, 15, 0)):
        expected = bits[panel * 32 + block * 16 + column, step * 32 + pair * 2 + half]
        assert packed[panel, step, block, pair, column, half] == expected


def test_column_blocks_apart_hold_the_same_one_after_the_other() -> None:
    weight = np.random.default_rng(0).integers(0, 1 << 16, (64, 96), np.uint16)
    alternating = packing.pack_panels(weight).reshape(2, 3, 2, 512)
    apart = packing.pack_panels(weight, blocks_apart=True).reshape(2, 2, 3, 512)
    assert np.array_equal(apart, alternating.transpose(0, 2, 1, 3))


def test_panels_packed_by_several_threads_and_from_an_odd_start_are_the_same() -> None:
    weight = np.random.default_rng(0).integers(0, 1 << 16, 1 + 5 * 32 * 64, np.uint16)[1:].reshape(5 * 32, 64)
    out = np.zeros(2 * weight.size, np.uint8)
    with ThreadPoolExecutor(3) as pool:
        packing.pack_on(pool, 3, weight, out)
    assert np.array_equal(out.view(np.uint16), packing.pack_panels(weight.copy()))


def test_gate_and_up_alternate_in_blocks_of_sixteen() -> None:
    rows = packing.interleave_gate_up(np.arange(32), np.arange(100, 132))
    assert rows.tolist() == [*range(16), *range(100, 116), *range(16, 32), *range(116, 132)]


def test_padded_heads_keep_their_columns_and_add_zeros() -> None:
    heads = packing.pad_heads(np.ones((2 * 24, 3)), 2, 24)
    assert heads.shape == (64, 3)
    assert heads[:, 0].nonzero()[0].tolist() == [*range(24), *range(32, 56)]


def test_padded_head_columns_are_the_padded_rows_of_the_transpose() -> None:
    weight = np.arange(5 * 2 * 24).reshape(5, 48)
    padded = packing.pad_head_columns(weight, 2, 24)
    assert padded.shape == (5, 64)
    assert np.array_equal(padded[:, :24], weight[:, :24]) and np.array_equal(padded[:, 32:56], weight[:, 24:])
    assert not padded[:, 24:32].any() and not padded[:, 56:].any()


def test_activation_rows_never_share_a_cache_set() -> None:
    assert all(row_bytes(columns, 2) // 64 % 2 == 1 for columns in (32, 576, 1536, 2048, 4096))


def as_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widen(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def amx_order(x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sums in the order Intel documents for tdpbf16ps: even and odd inputs of 32 apart."""
    total = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for k in range(0, x.shape[1], 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for i in range(k, k + 32, 2):
            even += x[:, i : i + 1] * w[i]
            odd += x[:, i + 1 : i + 2] * w[i + 1]
        total += even + odd
    return total


@pytest.mark.skipif(isinstance(isa.detect(("amx_bf16",)), str), reason="no AMX")
def test_amx_tiles_add_in_the_documented_order_for_any_number_of_rows() -> None:
    kernel = kernels.build(isa.AMX)
    configure, dot = kernel.configure_tiles, kernel.dot_rows
    assert configure is not None

    @njit
    def run(config: int, n: int, x: int, ldx: int, w: int, steps: int, out: int) -> int:
        configure(config)
        done = dot(n, x, ldx, w, w + tiles.STEP_BYTES, steps, 2 * tiles.STEP_BYTES, out, 128, 0, 0)
        configure(0)
        return done

    rng = np.random.default_rng(0)
    x, w = as_bf16(rng.standard_normal((32, 160))), as_bf16(rng.standard_normal((32, 160)))
    packed = packing.pack_panels(w.view(np.uint16))
    config = np.frombuffer(tiles.tile_config(False), np.uint8)
    expected = amx_order(widen(x), widen(w).T)
    for rows, done in ((32, 32), (16, 16), (3, 16)):
        out = np.zeros((32, 32), np.float32)
        assert run(config.ctypes.data, rows, x.ctypes.data, 320, packed.ctypes.data, 5, out.ctypes.data) == done
        assert np.array_equal(out[:rows], expected[:rows])


def test_a_folder_open_to_others_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    assert "open to other users" in str(compile_cache.private_folder(folder))
    assert compile_cache.private_folder(tmp_path / "a" / "new") == tmp_path / "a" / "new"
    assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700


def test_compiled_code_is_loaded_again_and_a_broken_file_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUINTET_COMPILE_CACHE", str(tmp_path / "chosen"))

    def fresh() -> Any:
        function = njit(lambda a: a + 41)
        compile_cache.attach(function, "plus", "test")
        return function

    first = fresh()
    assert first(1) == 42 and not sum(first.stats.cache_hits.values())
    (file,) = (tmp_path / "chosen").rglob("plus-*.bin")
    second = fresh()
    assert second(1) == 42 and sum(second.stats.cache_hits.values()) == 1
    file.write_bytes(b"broken")
    third = fresh()
    assert third(1) == 42 and not sum(third.stats.cache_hits.values())
    assert compile_cache.code_key("a") != compile_cache.code_key("b")


def test_code_unused_for_a_month_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("avx2-0123456789abcdef0123", "avx2-0000000000abcdef0123", "my-files"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9, 1e9))
    os.utime(tmp_path / "avx2-0000000000abcdef0123", (1e9 + 60, 1e9 + 60))
    compile_cache.remove_unused(tmp_path, 1e9 + compile_cache.KEEP_S + 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["avx2-0000000000abcdef0123", "my-files"]


def test_a_worker_announces_the_rows_of_a_full_tile() -> None:
    tiles_of = {one.name: one.tile_tokens for one in isa.ALL}
    assert tiles_of == {
        "amx_bf16": 16, "avx512_bf16": 12, "avx512_bf16_fma": 12, "avx512": 12, "avx2": 6, "neon": 6,
    }  # fmt: skip

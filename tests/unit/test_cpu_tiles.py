"""The register tiles: every height gives the same sums, and the inner loops stay within the registers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
import pytest
import torch
from numba import njit, types

from worker_proc.kernels.cpu import coded_tiles, isa, kernels, packing, read_model, tiles
from worker_proc.kernels.cpu.layout import ROW_PADDING
from worker_proc.kernels.cpu.vector_ir import I64, VOID

RUNNABLE = [one for one in isa.ALL if one.dot != "amx" and not isinstance(isa.detect((one.name,)), str)]


@pytest.mark.parametrize("chosen", RUNNABLE, ids=lambda one: str(one.name))
def test_a_row_has_the_same_sums_in_a_tile_of_any_height(chosen: isa.Isa) -> None:
    dot = kernels.build(chosen).dot_rows

    @njit
    def run(n: int, x: int, ldx: int, w: int, steps: int, out: int) -> int:
        return dot(n, x, ldx, w, w + tiles.STEP_BYTES, steps, 2 * tiles.STEP_BYTES, out, 128, 0, 0)

    steps, inner = 3, 96
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((13 + ROW_PADDING, inner)).astype(np.float32)).to(torch.bfloat16)
    w = torch.from_numpy(rng.standard_normal((32, inner)).astype(np.float32)).to(torch.bfloat16)
    packed = packing.pack_panels(read_model.bits(w))
    rows = (x.float() if chosen.activation_bytes == 4 else x).contiguous()
    ldx, address = inner * chosen.activation_bytes, rows.data_ptr()

    def sums(first: int, count: int) -> np.ndarray[Any, Any]:
        out, row = np.zeros((count + ROW_PADDING, 32), np.float32), 0  # a tile may compute rows that nobody wants
        while row < count:
            at = address + (first + row) * ldx
            row += run(count - row, at, ldx, packed.ctypes.data, steps, out.ctypes.data + row * 128)
        return out[:count]

    alone = np.concatenate([sums(row, 1) for row in range(13)])
    expected = x[:13].double().numpy() @ w.double().numpy().T
    assert np.abs(alone - expected).max() < 1e-4
    for count in range(2, 14):
        assert np.array_equal(sums(0, count).view(np.int32), alone[:count].view(np.int32))


def assembly(
    chosen: isa.Isa, triple: str, cpu: str, features: str, rows: int, one_block: bool = False, pages: bool = False,
    coded: bool = False,
) -> str:  # fmt: skip
    """Machine code of a tile for any processor, as text."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * 10), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    tile = tiles.make_vector_dot(chosen, rows, False, one_block, pages)
    if coded:
        tile = coded_tiles.make_coded_dot(chosen, rows)
    _, emit = tile._defn(None, *(types.int64,) * 10)
    emit(SimpleNamespace(get_dummy_value=lambda: None), builder, None, function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    module.triple = triple
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def inner_loops(text: str, multiply: str) -> list[str]:
    """The loops that multiply: from a label to the jump back to it, with no label between."""
    blocks = re.split(r"^(\.L\w+):", text, flags=re.MULTILINE)
    pairs = zip(blocks[1::2], blocks[2::2], strict=True)
    loops = [re.split(rf"\t(?:j|b\.)\w+\t{re.escape(name)}\b", body) for name, body in pairs]
    return [parts[0] for parts in loops if len(parts) > 1 and multiply in parts[0]]


@pytest.mark.parametrize("rows", isa.AVX2.row_tiles)
def test_avx2_tiles_keep_their_sums_in_registers(rows: int) -> None:
    loops = inner_loops(assembly(isa.AVX2, "x86_64-unknown-linux-gnu", "haswell", "", rows), "vfmadd")
    assert len(loops) == (1 if rows <= isa.AVX2.most_wide_rows else 2)
    assert all("(%rsp" not in loop for loop in loops)


@pytest.mark.parametrize("rows", isa.NEON.row_tiles)
def test_neon_tiles_keep_their_sums_in_registers(rows: int) -> None:
    loops = inner_loops(assembly(isa.NEON, "aarch64-unknown-linux-gnu", "neoverse-n1", "", rows), "fmla")
    assert len(loops) == (1 if rows <= isa.NEON.most_wide_rows else 2)
    assert all("[sp" not in loop for loop in loops)


@pytest.mark.parametrize("rows", range(3, isa.AVX2.row_tiles[0] + 1))
def test_tiles_of_one_column_block_keep_their_sums_in_registers(rows: int) -> None:
    on_intel = assembly(isa.AVX2, "x86_64-unknown-linux-gnu", "haswell", "", rows, one_block=True)
    on_arm = assembly(isa.NEON, "aarch64-unknown-linux-gnu", "neoverse-n1", "", rows, one_block=True)
    (loop,) = inner_loops(on_intel, "vfmadd")
    assert "(%rsp" not in loop
    (loop,) = inner_loops(on_arm, "fmla")
    assert "[sp" not in loop


@pytest.mark.parametrize("rows", isa.AVX512.row_tiles)
def test_avx512_tiles_keep_their_sums_in_registers(rows: int) -> None:
    loops = inner_loops(assembly(isa.AVX512, "x86_64-unknown-linux-gnu", "skylake-avx512", "", rows), "vfmadd")
    assert loops and all("(%rsp" not in loop for loop in loops)


@pytest.mark.parametrize("rows", isa.AVX512_BF16.row_tiles)
@pytest.mark.parametrize("pages", [False, True])
def test_tiles_of_amd_keep_their_sums_in_registers_and_ask_for_a_line_of_each_page(rows: int, pages: bool) -> None:
    code = assembly(isa.AVX512_BF16, "x86_64-unknown-linux-gnu", "znver4", "", rows, pages=pages)
    loops = inner_loops(code, "vdpbf16ps")
    assert loops and all("(%rsp" not in loop for loop in loops)
    for loop in loops:
        turns = loop.count("vdpbf16ps") // (2 * rows)
        assert loop.count("prefetchnta") == (2 * turns if pages else 0)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 12])
def test_tiles_that_decode_keep_their_sums_in_registers_and_ask_for_each_line(rows: int) -> None:
    code = assembly(isa.AVX512_BF16, "x86_64-unknown-linux-gnu", "znver5", "", rows, coded=True)
    (loop,) = inner_loops(code, "vdpbf16ps")
    assert not re.search(r"%zmm\d+, -?\d*\(%rsp\)", loop)
    turns = loop.count("vdpbf16ps") // (4 * rows)
    assert loop.count("prefetchnta") == loop.count("vpshufb") * 3 // 2 == 3 * turns

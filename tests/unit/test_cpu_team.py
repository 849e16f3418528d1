"""How the threads of a step meet: what the machine code of other processors keeps in order."""

from __future__ import annotations

from types import SimpleNamespace

import llvmlite.binding as llvm
import llvmlite.ir as ir
import pytest
from numba import types

from worker_proc.kernels.cpu.scalar import atomic_add, atomic_load
from worker_proc.kernels.cpu.vector_ir import I64


@pytest.mark.parametrize("cpu", ["generic", "neoverse-n1", "neoverse-v2"])
def test_on_arm_no_word_is_read_before_an_addition_to_another_is_seen(cpu: str) -> None:
    """The last arrival at the barrier then looks for sleepers. ``ldapr`` could read too early, ``ldar`` cannot."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(I64, [I64] * 2), "arrive")
    builder = ir.IRBuilder(function.append_basic_block())
    context = SimpleNamespace(get_dummy_value=lambda: None)
    _, add = atomic_add._defn(None, types.int64, types.int64)
    _, load = atomic_load._defn(None, types.int64)
    add(context, builder, None, [function.args[0], ir.Constant(I64, 1)])
    builder.ret(load(context, builder, None, [function.args[1]]))
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu=cpu, opt=3)
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert "\tldar\t" in text and "ldapr" not in text

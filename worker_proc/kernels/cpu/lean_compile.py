"""Compile functions that only compiled code calls, without optimising each of them again for every caller.

Numba optimises a function together with all that it calls, and makes machine code of it, before a caller may use
it; the caller's module then holds all of that once more. Our step is a dozen levels deep, so most of LLVM's time went
into machine code that nobody ever calls. Here an inner function stays as LLVM's plain code until the one function
that Python calls is compiled: that one is linked, optimised and translated as a whole, once.

Numba's documented way to do such things is a compiler with passes of one's own (``pipeline_class``).
"""

from __future__ import annotations

from typing import Any

from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class LeanLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that is linked into its callers, and never called from elsewhere."""

    def _optimize_final_module(self) -> None:
        """Left to the library it ends up in."""

    def _finalize_final_module(self) -> None:
        """Ready to be linked; the execution engine is not told of it."""
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class LeanLowering(NativeLowering):  # type: ignore[misc]
    """Numba's lowering into a :class:`LeanLibrary`."""

    _name = "lean_lowering"

    def run_pass(self, state: Any) -> bool:
        """Lower one function, and let others call it."""
        if state.library is not None:
            return bool(super().run_pass(state))
        state.library = LeanLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True  # no machine code: what Numba would do with it follows here
        super().run_pass(state)
        lowered = state["cr"]
        name = lowered.fndesc.qualname.split(".")[-1]
        # A function object without code stands for it wherever Numba looks functions up.
        entry = _dynfunc.make_function(lowered.fndesc.lookup_module(), name, "", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state.reload_init.extend(state.library._reload_init)
        state["cr"] = lowered._replace(cfunc=entry)
        return True


class LeanCompiler(Compiler):  # type: ignore[misc]
    """``njit(pipeline_class=LeanCompiler)``. The function must have no wrappers (see ``kernels.jit``)."""

    def define_pipelines(self) -> list[Any]:
        """Numba's own passes, but for the lowering."""
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [(LeanLowering if one is NativeLowering else one, why) for one, why in pipeline.passes]
            pipeline._finalized = False
            pipeline.finalize()
        return list(pipelines)

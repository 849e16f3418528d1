"""Importing transformers without the compiler and the distributed tensors that a worker does not use.

``transformers`` imports PyTorch's compiler (``torch._dynamo``, with it inductor, Triton's front end and
SymPy) for decorators that mark functions for it, and ``torch.distributed.tensor`` for models whose
parameters lie in several processes. In eager mode on one rank neither does anything; together they are
half of what importing transformers costs, at each start and each restart of a worker.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed

_COMPILER = "torch._dynamo"
_LIGHT = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""A submodule that transformers' masks want and that needs nothing of the rest."""


def without_ranks() -> None:
    """From now on ``torch.distributed`` says that it is not available, which transformers takes for an answer.

    For a process that is the only rank; it cannot be taken back, since what transformers has left out by then
    stays out.
    """
    torch.distributed.is_available = lambda: False


def without_compiler() -> None:
    """From now on ``torch._dynamo`` is a stand-in. Does nothing where the compiler is loaded already."""
    if _COMPILER not in sys.modules:
        stand_in = _CompilerStandIn()
        sys.modules[_COMPILER] = stand_in
        vars(torch)["_dynamo"] = stand_in
        sys.meta_path.insert(0, stand_in.finder)


def with_compiler() -> None:
    """Whoever imports ``torch._dynamo`` from now on gets the package: for code that we do not know."""
    stand_in = sys.modules.get(_COMPILER)
    if isinstance(stand_in, _CompilerStandIn):
        stand_in.leave()


class _CompilerStandIn(types.ModuleType):
    """The package's name and three decorators. Anything else that is asked of it brings the package itself."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [os.path.join(folder, "_dynamo") for folder in torch.__path__]
        self.allow_in_graph = self.assume_constant_result = self.disable = _unchanged
        self.finder = _SubmoduleFinder(self)

    def leave(self) -> None:
        """Torch and the import system find the package itself at its next use."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        if vars(torch).get("_dynamo") is self:
            del vars(torch)["_dynamo"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)


class _SubmoduleFinder(MetaPathFinder):
    """A submodule is imported while the stand-in is there: the package first, which may import it itself."""

    def __init__(self, stand_in: _CompilerStandIn) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}.") or fullname == _LIGHT:
            return None
        self._stand_in.leave()
        importlib.import_module(_COMPILER)
        found = sys.modules.get(fullname)
        return None if found is None else ModuleSpec(fullname, _Loaded(found, found.__spec__))


class _Loaded(Loader):
    """Gives a module that was loaded while it was looked for."""

    def __init__(self, module: types.ModuleType, spec: ModuleSpec | None) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """A decorator, with arguments or without, that gives the function back."""
    return _unchanged if function is None else function

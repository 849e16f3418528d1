"""The compiled step, made ready beside everything else that a start takes.

The machine code depends on the instruction set alone, not on the model. So a thread can load it while torch is
imported and weights are read; on the first start it has it compiled by a process beside this one
(``compile_beside.py``). Nothing here imports torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, typeof
from numba.core.errors import NumbaError

from worker_proc.kernels.cpu import compile_cache
from worker_proc.kernels.cpu.compile_beside import compile_beside
from worker_proc.kernels.cpu.forward import make_forward
from worker_proc.kernels.cpu.isa import Isa, detect
from worker_proc.kernels.cpu.layout import LAYER, MODEL, OWN, STEP

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A :data:`Progress` that tells nobody."""
    return


def _signature() -> tuple[Any, ...]:
    """Numba's types of ``team_main``'s arguments: the same for every model."""
    records = [typeof(np.zeros(1, dtype)) for dtype in (MODEL, LAYER, STEP, OWN)]
    return (*[typeof(0)] * 4, *records, typeof(True))


def _uncompiled(isa: Isa, progress: Progress) -> Any:
    main = njit(nogil=True, error_model="numpy")(make_forward(isa))
    compile_cache.attach(main, "step", isa.name, progress)
    return main


def compile_step(name: str) -> None:
    """Compile the step of an instruction set into the disk cache. Raises ValueError where this machine lacks it."""
    isa = detect((name,))
    if isinstance(isa, str):
        raise ValueError(isa)
    _uncompiled(isa, silent).compile(_signature())


class StepFunction:
    """``team_main`` of one instruction set; a thread gets it ready from the moment this is made.

    ``progress`` is told, from that thread, what is done and how long it took.
    """

    def __init__(self, isa: Isa, progress: Progress = silent) -> None:
        self.isa = isa
        self._progress = progress
        self._main: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._prepare, name="quintet-compile", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        started = time.monotonic()
        what = f"cpu-fast: {self.isa.name} kernels"
        try:
            main, signature = _uncompiled(self.isa, self._progress), _signature()
            is_new = not compile_cache.has(main, signature)
            if is_new:
                self._progress(f"{what}: compiling, once on this machine (about 15 s)")
                if compile_cache.is_kept(main):
                    compile_beside(self.isa.name)  # where that fails, the next line compiles
            main.compile(signature)
        except Exception as error:  # handed to the thread that waits in compiled()
            self._error = error
            return
        self._main = main
        how = "compiled" if is_new else "loaded"
        self._progress(f"{what}: {how} in {time.monotonic() - started:.1f} s")

    def compiled(self) -> Any:
        """The compiled function; waits for it. Raises RuntimeError when Numba cannot compile it here."""
        self._thread.join()
        if self._error is not None:
            words = str(self._error) if isinstance(self._error, NumbaError) else repr(self._error)
            raise RuntimeError(f"Numba cannot compile its kernels: {words}") from self._error
        return self._main


def begin_early(
    path: str, device: str, dtype: str, progress: Progress, nvidia: Path = Path("/dev/nvidiactl")
) -> StepFunction | None:
    """Start on the step function where the flags let expect that it is used; None: not, or not yet known.

    ``path``, ``device``, ``dtype``: --worker-path, --device, --dtype. To be called before torch is
    imported, so whether there is a CUDA device is only guessed; a wrong guess costs processor time.
    """
    if path not in ("auto", "cpu-fast") or device == "cuda" or dtype not in ("auto", "bfloat16"):
        return None
    if device == "auto" and nvidia.exists():
        return None
    isa = detect()
    return None if isinstance(isa, str) else StepFunction(isa, progress)

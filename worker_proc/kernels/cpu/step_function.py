"""The compiled step, made ready beside everything else that a start takes.

The machine code depends on the instruction set alone, not on the model. So it can be loaded, or
compiled, by a thread while torch is imported and weights are read: LLVM, nearly two thirds of a
compilation, runs without the interpreter's lock. Nothing here imports torch.
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
            main = njit(nogil=True, error_model="numpy")(make_forward(self.isa))
            compile_cache.attach(main, "step", self.isa.name, self._progress)
            self._progress(f"{what}: loading, or compiling on the first start on this machine (about 15 s)")
            main.compile(_signature())
        except Exception as error:  # handed to the thread that waits in compiled()
            self._error = error
            return
        self._main = main
        how = "loaded" if sum(main.stats.cache_hits.values()) else "compiled"
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

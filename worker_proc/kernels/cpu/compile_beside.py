"""Compile the step in a process of its own: ``python -m worker_proc.kernels.cpu.compile_beside ISA``.

More than half of a compilation is Numba's Python, and so are the imports and the loading that a start does at the
same time: in one process they would take turns at the interpreter's lock. The code goes to the disk cache,
where the worker finds it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from common.process import PARENT_PID_VARIABLE, die_with_parent


def compile_beside(isa_name: str) -> bool:
    """Compile on another core and wait. False when that did not work; the caller then compiles by itself."""
    command = [sys.executable, "-P", "-m", __name__, isa_name]
    try:
        environ = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}
        return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    except OSError:
        return False


def main() -> None:
    """Compile for the instruction set named on the command line."""
    from worker_proc.kernels.cpu.step_function import compile_step

    die_with_parent()
    compile_step(sys.argv[1])


if __name__ == "__main__":
    main()

"""When the fast path's compiled step is begun early, and what its thread tells and hands over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numba.core.errors import TypingError

from worker_proc.kernels.cpu import isa, step_function
from worker_proc.kernels.cpu.compile_beside import compile_beside


class Recorded(step_function.StepFunction):
    """Begins nothing."""

    def __init__(self, chosen: isa.Isa, progress: step_function.Progress = step_function.silent) -> None:
        self.isa = chosen


@pytest.mark.parametrize(
    ("flags", "found", "gpu", "begun"),
    [
        (("auto", "auto", "auto"), isa.AMX, False, True),
        (("cpu-fast", "cpu", "bfloat16"), isa.AVX2, True, True),
        (("auto", "auto", "auto"), isa.AMX, True, False),  # perhaps the model runs on the GPU
        (("auto", "cuda", "auto"), isa.AMX, False, False),
        (("generic", "cpu", "auto"), isa.AMX, False, False),
        (("generic-torch", "cpu", "bfloat16"), isa.AMX, False, False),  # the path of the worker before
        (("auto", "cpu", "float32"), isa.AMX, False, False),
        (("auto", "cpu", "auto"), isa.AVX2, False, True),  # bf16 weights, widened
        (("auto", "cpu", "auto"), "no vector instructions", False, False),
    ],
)
def test_begins_early_only_where_the_fast_path_is_expected(
    flags: tuple[str, str, str],
    found: isa.Isa | str,
    gpu: bool,
    begun: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_function, "detect", lambda: found)
    monkeypatch.setattr(step_function, "StepFunction", Recorded)
    nvidia = tmp_path / "nvidiactl"
    if gpu:
        nvidia.touch()
    step = step_function.begin_early(*flags, step_function.silent, nvidia)
    assert (step is not None) == begun
    assert step is None or step.isa is found


def test_an_error_of_the_compiler_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(chosen: isa.Isa) -> None:
        raise TypingError("not on this machine")

    monkeypatch.setattr(step_function, "make_forward", fails)
    with pytest.raises(RuntimeError, match="cannot compile its kernels: not on this machine"):
        step_function.StepFunction(isa.AVX2).compiled()


def test_a_numba_that_is_built_otherwise_is_told_from_a_fault_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(chosen: isa.Isa) -> None:
        raise AttributeError("no attribute '_reload_init'")

    monkeypatch.setattr(step_function, "make_forward", fails)
    with pytest.raises(RuntimeError, match=r"cannot compile its kernels: AttributeError.*_reload_init"):
        step_function.StepFunction(isa.AVX2).compiled()


def small_step(tid: Any, nt: Any, a: Any, b: Any, models: Any, layers: Any, steps: Any, owns: Any, on: Any) -> Any:
    return tid


@pytest.mark.skipif(isinstance(isa.detect(), str), reason="no instruction set for the fast path")
def test_the_thread_tells_that_it_begins_and_ends() -> None:
    chosen = isa.detect()
    assert isinstance(chosen, isa.Isa)
    told: list[str] = []
    step_function.StepFunction(chosen, told.append).compiled()
    assert "loaded in" in told[-1] or ("compiled in" in told[-1] and "compiling, once" in told[-2])


@pytest.mark.skipif(isinstance(isa.detect(), str), reason="no instruction set for the fast path")
def test_what_is_not_on_disk_is_compiled_by_another_process_or_else_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = isa.detect()
    assert isinstance(chosen, isa.Isa)
    monkeypatch.setenv("QUINTET_COMPILE_CACHE", str(tmp_path))
    asked: list[str] = []

    def fails(name: str) -> bool:
        asked.append(name)
        return False

    monkeypatch.setattr(step_function, "compile_beside", fails)
    monkeypatch.setattr(step_function, "make_forward", lambda _: small_step)
    step_function.StepFunction(chosen).compiled()
    assert asked == [chosen.name]
    assert list(tmp_path.rglob("step-*.bin"))
    told: list[str] = []
    step_function.StepFunction(chosen, told.append).compiled()
    assert asked == [chosen.name] and "loaded in" in told[-1]


def test_another_process_that_cannot_compile_says_so() -> None:
    assert not compile_beside("no-such-set")

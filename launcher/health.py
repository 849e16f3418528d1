"""Is a process hung, or only busy?

A process that serves sends heartbeats from its loop. It is hung when

- it said it was busy and its progress has not grown for ``hang_timeout_s``: a stuck kernel or a
  dead lock in the work itself;
- or it has been silent for ``hang_timeout_s``, whatever it does meanwhile;
- or it has been silent for ``SILENCE_S`` without using the CPU, or stopped (SIGSTOP). A long step
  is silent too, but it computes, so it is given the full time; and so is a process that cannot compute because
  others have the cores: one of its threads is runnable, which need not be the first.

A process that has not served yet loads: an import of megabytes of libraries from a slow disk holds every thread of
it for as long as it takes. It has ``start_timeout_s``, unless it is stopped.

Only one that is late, with its heartbeat or its work, is looked at in /proc; whether it uses the CPU is told from
what it had used at the first look.

A process held by a debugger is left alone, and nothing is held against anyone for a time in
which the supervisor itself did not run (the caller shifts the clocks: ``Child.excuse``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.children import LATE_S, Child

SILENCE_S = 10.0
IDLE_CPU_SHARE = 0.01
"""Below this share of one core a silent process is not computing."""


@dataclass(frozen=True, slots=True)
class CpuState:
    """What /proc says of a process."""

    state: str
    """R running or runnable, S waiting, D in the kernel, T stopped, t traced; empty: unknown."""
    cpu_s: float
    """User and system time used so far, seconds."""


def read_cpu_state(pid: int) -> CpuState:
    """From ``/proc/<pid>``: the first thread's state, or R or D where it waits and another is in that state.

    Unknown where there is no such process.
    """
    try:
        fields = _stat(Path(f"/proc/{pid}"))
        state = fields[0]
        if state == "S":
            states = {_stat(task)[0] for task in Path(f"/proc/{pid}/task").iterdir()}
            state = next((each for each in ("R", "D") if each in states), state)
        return CpuState(state, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return CpuState("", 0.0)


def _stat(folder: Path) -> list[str]:
    # The name in parentheses may hold anything, so cut behind the last one.
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()


def why_hung(
    child: Child,
    now: float,
    look: Callable[[int], CpuState] = read_cpu_state,
    *,
    start_timeout_s: float,
    hang_timeout_s: float,
    others_ready: bool = True,
) -> str:
    """The reason to kill ``child``, in words; empty while it is to be left alone. Notes in it when it was looked at.

    ``look``: pid -> what is to be known, asked only where it matters. ``others_ready``: while another process is
    away, one that waits for it is busy without fault.
    """
    silent, waited = now - child.last_beat, now - child.started_at
    stuck = now - child.progress_at if child.busy and others_ready else 0.0
    if child.has_served:
        late = silent > min(LATE_S, hang_timeout_s) or stuck > hang_timeout_s
    else:
        late = silent > hang_timeout_s or waited > start_timeout_s
    if not late or not child.running:
        return ""
    cpu = look(child.pid)
    child.doubt(cpu.cpu_s)
    if cpu.state == "t":
        return ""
    if not child.has_served:
        if cpu.state == "T" and silent > hang_timeout_s:
            return f"stopped and silent for {silent:.1f} s"
        if waited > start_timeout_s:
            return f"not ready {waited:.0f} s after its start (--start-timeout-s {start_timeout_s:g})"
        return ""
    if silent > min(SILENCE_S, hang_timeout_s):
        if cpu.state == "T":
            return f"stopped and silent for {silent:.1f} s"
        if cpu.state == "S" and cpu.cpu_s - child.cpu_when_doubted < IDLE_CPU_SHARE * silent:
            return f"no heartbeat for {silent:.1f} s and no CPU used"
    if silent > hang_timeout_s:
        return f"no heartbeat for {silent:.1f} s (--hang-timeout-s {hang_timeout_s:g})"
    if stuck > hang_timeout_s:
        return f"busy without progress for {stuck:.1f} s (--hang-timeout-s {hang_timeout_s:g})"
    return ""

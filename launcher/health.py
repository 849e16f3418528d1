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

A process held by a debugger is left alone, and nothing is held against anyone for a time in
which the supervisor itself did not run (the caller shifts the clocks: ``Child.excuse``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launcher.children import Child

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


def read_cpu_state(pid: int, *, every_thread: bool = False) -> CpuState:
    """From ``/proc/<pid>/stat``, the first thread's state; unknown where there is none.

    ``every_thread``: R or D where the first thread waits and another is in that state.
    """
    try:
        fields = _stat(Path(f"/proc/{pid}"))
        state = fields[0]
        if every_thread and state == "S":
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
    cpu: CpuState,
    *,
    start_timeout_s: float,
    hang_timeout_s: float,
    others_ready: bool = True,
) -> str:
    """The reason to kill ``child``, in words; empty while it is to be left alone.

    ``others_ready``: while another process is away, one that waits for it is busy without fault.
    """
    if not child.running or cpu.state == "t":
        return ""
    silent = now - child.last_beat
    if not child.has_served:
        if cpu.state == "T" and silent > hang_timeout_s:
            return f"stopped and silent for {silent:.1f} s"
        waited = now - child.started_at
        if waited > start_timeout_s:
            return f"not ready {waited:.0f} s after its start (--start-timeout-s {start_timeout_s:g})"
        return ""
    if silent > min(SILENCE_S, hang_timeout_s):
        if cpu.state == "T":
            return f"stopped and silent for {silent:.1f} s"
        if cpu.state == "S" and cpu.cpu_s - child.cpu_at_beat < IDLE_CPU_SHARE * silent:
            return f"no heartbeat for {silent:.1f} s and no CPU used"
    if silent > hang_timeout_s:
        return f"no heartbeat for {silent:.1f} s (--hang-timeout-s {hang_timeout_s:g})"
    stuck = now - child.progress_at
    if child.busy and others_ready and stuck > hang_timeout_s:
        return f"busy without progress for {stuck:.1f} s (--hang-timeout-s {hang_timeout_s:g})"
    return ""

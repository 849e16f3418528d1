"""Thread settings of the worker, made before torch and Numba are imported because both read them once."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path

from common.cores import SPARE_CORE_FROM, usable_cores


def num_threads(requested: int, tp_size: int = 1) -> int:
    """Threads of this worker: as asked, or its share of the cores this process may use.

    These are the cores of its affinity mask, at most as many as the container's CPU quota pays for
    (rounded down: a thread more would be throttled, and the others wait for it), less one for the
    other processes from :data:`SPARE_CORE_FROM` cores on, divided among the ranks; at least 1.
    """
    if requested > 0:
        return requested
    return default_threads(usable_cores(), cgroup_cores(), tp_size)


def default_threads(cores: int, quota_cores: float, tp_size: int = 1) -> int:
    """The rule of :func:`num_threads`. ``cores``: of the affinity mask; ``quota_cores``: 0 for no quota."""
    usable = max(1, min(cores, int(quota_cores))) if quota_cores else cores
    if usable >= SPARE_CORE_FROM:
        usable -= 1
    return max(1, usable // tp_size)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """CPU quota in cores, the least of this process's cgroup and all above it; 0 without any.

    Both versions: ``cpu.max`` (v2), ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` (v1, and hybrids).
    Inside a container the paths of ``own`` may be the host's and not exist here; then the root counts.
    """
    found = [quota for folder in _cgroup_folders(root, own) for quota in _quotas(folder)]
    return min(found, default=0.0)


def _cgroup_folders(root: Path, own: Path) -> Iterator[Path]:
    """Folders that may limit this process: where the CPU controller is mounted, and its own groups below."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    groups = {name for _, controllers, name in (line for line in lines if len(line) == 3)
              if not controllers or "cpu" in controllers.split(",")}  # fmt: skip
    for mount in (root, root / "unified", root / "cpu", root / "cpu,cpuacct"):
        yield mount
        for name in sorted(groups):
            parts = [part for part in name.split("/") if part not in ("", "..")]
            for depth in range(1, len(parts) + 1):
                yield mount.joinpath(*parts[:depth])


def _quotas(folder: Path) -> Iterator[float]:
    """The quotas that a cgroup folder's files state, in cores."""
    for read in (_quota_v2, _quota_v1):
        try:
            quota, period = read(folder)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:  # v1 says -1 for no quota
            yield quota / period


def _quota_v2(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _quota_v1(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())


def set_thread_environment(environ: MutableMapping[str, str], threads: int) -> None:
    """Set what OpenMP and Numba read at import; what the user has set stays.

    * ``OMP_NUM_THREADS``, ``NUMBA_NUM_THREADS``: as many as asked; both would take every core of the host.
    * ``GOMP_SPINCOUNT``: torch and Numba each have an OpenMP pool, whose idle threads spin. Spinning
      saves a wake-up between two operations of one forward pass (waiting passively was twice as slow),
      but goes on for milliseconds after the pass and takes the cores from sampling and from the other
      processes. 20,000 turns are some tens of microseconds: longer than the gaps within a pass.
    * ``KMP_BLOCKTIME``: the same for builds of torch with Intel's or LLVM's runtime, in milliseconds.
    """
    for name, value in (
        ("OMP_NUM_THREADS", str(threads)),
        ("NUMBA_NUM_THREADS", str(threads)),
        ("GOMP_SPINCOUNT", "20000"),
        ("KMP_BLOCKTIME", "1"),
    ):
        environ.setdefault(name, value)

"""How many KV pages a worker holds, and how a restarted worker gets the same number."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.errors import ConfigError

log = logging.getLogger(__name__)

CPU_FRACTION = 0.3
GPU_FRACTION = 0.85
CPU_DEFAULT_CAP_BYTES = 8 << 30
"""Without --mem-fraction-static or --max-total-tokens a CPU pool stays below this: the machine is somebody's."""
MIN_PAGES = 8


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What decides the size of the pool."""

    page_size: int
    bytes_per_page: int
    free_bytes: int
    on_gpu: bool
    mem_fraction: float
    """--mem-fraction-static; 0: chosen."""
    max_total_tokens: int
    """--max-total-tokens; 0: from memory."""
    useful_tokens: int
    """max_running_requests * context length: more than that only serves as prefix cache."""


def choose_num_pages(request: PoolRequest) -> int:
    """Pages of the pool. Raises ``ConfigError`` with the arithmetic when it would be too small."""
    if request.max_total_tokens:
        num_pages = -(-request.max_total_tokens // request.page_size)
        if num_pages < MIN_PAGES:
            raise ConfigError(
                f"--max-total-tokens {request.max_total_tokens} is {num_pages} KV pages of {request.page_size} tokens; "
                f"at least {MIN_PAGES} are needed: set it to {MIN_PAGES * request.page_size}, or --page-size lower"
            )
        need = num_pages * request.bytes_per_page
        if need > request.free_bytes:
            raise ConfigError(
                f"--max-total-tokens {request.max_total_tokens} needs {need / 2**30:.2f} GiB of KV pages, "
                f"{request.free_bytes / 2**30:.2f} GiB are free"
            )
        return num_pages
    fraction = request.mem_fraction or (GPU_FRACTION if request.on_gpu else CPU_FRACTION)
    if not 0.0 < fraction <= 0.98:
        raise ConfigError(f"--mem-fraction-static {fraction} is not within (0, 0.98]")
    budget = int(request.free_bytes * fraction)
    if not request.on_gpu and not request.mem_fraction:
        budget = min(budget, CPU_DEFAULT_CAP_BYTES)
    num_pages = budget // request.bytes_per_page
    if not request.mem_fraction:
        num_pages = min(num_pages, max(MIN_PAGES, -(-2 * request.useful_tokens // request.page_size)))
    if num_pages < MIN_PAGES:
        raise ConfigError(
            f"{budget / 2**20:.0f} MiB ({fraction:.2f} of {request.free_bytes / 2**20:.0f} MiB free) hold {num_pages} "
            f"KV pages of {request.bytes_per_page} bytes; at least {MIN_PAGES} are needed: raise "
            "--mem-fraction-static, or use a smaller model or dtype"
        )
    return num_pages


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted worker repeats, so that its tokens and limits are the first one's."""

    path: str
    dtype: str
    num_pages: int
    page_size: int
    step_seconds: list[float] = []
    """See ``speculation/step_times.py``; empty where there is no speculation."""


def load_state(run_dir: Path, rank: int) -> WorkerState | None:
    """The first incarnation's choices, None if there was none (or it died before it was ready)."""
    try:
        return msgspec.json.decode((run_dir / f"worker-{rank}.state.json").read_bytes(), type=WorkerState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def save_state(run_dir: Path, rank: int, state: WorkerState) -> None:
    """Remember the choices for the next incarnation."""
    target = run_dir / f"worker-{rank}.state.json"
    temporary = target.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(state))
    temporary.replace(target)


def free_host_bytes() -> int:
    """Available memory of the machine, what the container's limit leaves, or what this process's limit on address space
    (``ulimit -v``, RLIMIT_AS) leaves: whichever is least. The last is not the machine's, so the log says it."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY:
        left = max(0, limit_bytes - int(psutil.Process().memory_info().vms))
        if left < available:
            log.info(
                "the limit on this process's address space (ulimit -v: %d MiB) leaves %d MiB; %d MiB are free",
                limit_bytes >> 20, left >> 20, available >> 20,
            )  # fmt: skip
            return left
    return available

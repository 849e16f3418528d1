"""Life-cycle of a process of the engine: arguments, title, logging, signals, heartbeats.

Each package has a ``main.py`` whose ``main(context)`` is its loop and a ``__main__.py`` of two
lines that calls :func:`run`. The supervisor starts

    python -m <package> --run-dir DIR --index I --generation G

and the process finds ``config.json`` and its channels' sockets in DIR.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import setproctitle

from common import config as config_file
from common import cores
from common.channels import Channels, Sender
from common.config import ServerConfig
from common.curve import engine_curve
from common.errors import ConfigError
from common.messages import Heartbeat
from common.notify import Notifier
from common.trace import SEGMENTS, TraceWriter

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
EARLY_S = 0.005
"""A heartbeat may go out this much before it is due: what wakes a loop so shortly before wakes it for both."""
PARENT_PID_VARIABLE = "QUINTET_PARENT_PID"
_PR_SET_PDEATHSIG = 1

OUR_LOGGERS = (
    "common", "gateway", "tokenizer_proc", "scheduler_proc", "worker_proc", "detokenizer_proc", "launcher", "launch",
)  # fmt: skip

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""The supervisor does not restart a process that ends with this: it would end the same way."""


@dataclass
class ProcessContext:
    """What a role's main loop is given. ``stopping`` turns True on SIGTERM or SIGINT."""

    role: str
    index: int
    generation: int
    config: ServerConfig
    run_dir: Path
    channels: Channels
    stopping: bool = False
    num_stop_requests: int = 0
    """Above 1: whoever asked does not wait any longer; a drain is cut short."""
    trace: TraceWriter | None = None
    """Where ``--trace`` records what this process does; None when it is off."""
    label: str = ""
    """The name of a gateway on another host than the engine; empty: role and index are the name."""
    notifier: Notifier | None = None
    """Who is told instead of the supervisor, for a process that has none: systemd."""
    _heart: Sender | None = None
    _last_beat: float = 0.0
    _last_ready: bool = False
    _stop_hooks: list[Callable[[], None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """``worker-0``: the key of ``EngineStatus.generations``."""
        return self.label or f"{self.role}-{self.index}"

    def on_stop(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` (signal-safe) when the process is asked to stop."""
        self._stop_hooks.append(hook)

    @property
    def beat_in_s(self) -> float:
        """When the next heartbeat is due; 0.0: now. A loop with nothing else to do sleeps as long."""
        left_s = self._last_beat + HEARTBEAT_S - time.monotonic()
        return left_s if left_s > EARLY_S else 0.0

    def beat(
        self,
        *,
        ready: bool,
        progress: int,
        busy_since: float = 0.0,
        detail: str = "",
        info: dict[str, Any] | None = None,
    ) -> None:
        """Tell the supervisor that the loop turns; cheap, sends at most every ``HEARTBEAT_S``.

        Call it whenever the loop turns (a waiting loop wakes for it: ``beat_in_s``). A change of ``ready`` is sent
        at once.
        """
        if self.trace is not None:
            self.trace.flush_when_due()
        if self.beat_in_s and ready == self._last_ready:
            return
        now = time.monotonic()
        if self.notifier is not None:
            self.notifier.ping()
            if ready and not self._last_ready:
                self.notifier.ready(detail)
            self._last_beat, self._last_ready = now, ready
            return
        self._last_beat, self._last_ready = now, ready
        if self._heart is None:
            self._heart = self.channels.sender("supervisor")
        self._heart.send(
            Heartbeat(
                role=self.role,
                index=self.index,
                generation=self.generation,
                pid=os.getpid(),
                ready=ready,
                progress=progress,
                busy_since=busy_since,
                detail=detail,
                info=info or {},
                num_bad_frames=self.channels.num_bad,
            )
        )

    def request_stop(self, *_: object) -> None:
        """Signal handler: let the loop end."""
        self.stopping = True
        self.num_stop_requests += 1
        for hook in self._stop_hooks:
            hook()


def calm_gc() -> None:
    """What is loaded now stays for good, and little is cyclic of the small messages that come and go.

    Without it the collector walks everything there is again and again, and takes a fresh message for old after
    two looks.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux), however it ends.

    The parent may have ended before the kernel was asked: a supervisor puts its pid into
    ``PARENT_PID_VARIABLE``, and a process that finds itself with another parent ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get(PARENT_PID_VARIABLE, "")
    if expected.isdigit() and os.getppid() != int(expected):
        os._exit(EXIT_FAILED)


def reason_file(run_dir: Path, name: str) -> Path:
    """Where a process that ends with ``EXIT_CONFIG`` leaves its words for the supervisor's last line."""
    return run_dir / f"{name}.reason"


def open_trace(context: ProcessContext) -> TraceWriter | None:
    """The process's trace, in a folder per run of the server; None without ``--trace``."""
    config = context.config
    if not config.runtime.trace:
        return None
    http = msgspec.structs.replace(config.http, api_key=[], admin_api_key=[])
    return TraceWriter(
        Path(config.runtime.trace) / context.run_dir.name,
        context.role,
        context.index,
        context.generation,
        config=config_file.save(msgspec.structs.replace(config, http=http)),
        segment_bytes=(config.runtime.trace_mib << 20) // SEGMENTS,
        total_bytes=config.runtime.trace_mib << 20,
    )


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: time (seconds), level, process, logger, message; extra fields as given."""

    _STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def __init__(self, name: str) -> None:
        super().__init__()
        self._process_name = name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line.update({key: value for key, value in vars(record).items() if key not in self._STANDARD})
        return json.dumps(line, default=str, ensure_ascii=False)


def setup_logging(config: ServerConfig, name: str) -> None:
    """Log to stderr, one line per event, each with the process's name (``--log-format``)."""
    level = getattr(logging, config.runtime.log_level.upper())
    handler = logging.StreamHandler(sys.stderr)
    if config.runtime.log_format == "json":
        handler.setFormatter(_JsonFormatter(name))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s [{name}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))
    if level < logging.INFO:  # of our own packages alone: Numba's debug output is megabytes
        for package in OUR_LOGGERS:
            logging.getLogger(package).setLevel(level)


def run(role: str, main: Callable[[ProcessContext], None], argv: list[str] | None = None) -> int:
    """Run a role as a process: parse arguments, set up, call ``main``, return the exit code.

    Without ``argv`` (a real process) it does not return but ends the process at once: taking an
    interpreter full of torch and compiled code apart takes seconds and frees nothing that the
    kernel does not free.
    """
    code = _run(role, main, argv)
    if argv is None:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


def _run(role: str, main: Callable[[ProcessContext], None], argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog=role)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--generation", type=int, default=0)
    args = parser.parse_args(argv)
    die_with_parent()
    if role != "worker":
        cores.give_way(cores.usable_cores())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for stacks before it kills
    config = config_file.load((args.run_dir / "config.json").read_bytes())
    channels = Channels(args.run_dir, lambda: engine_curve(Path(config.hosts.curve_keys)))
    context = ProcessContext(role, args.index, args.generation, config, args.run_dir, channels)
    context.trace = open_trace(context)
    setup_logging(config, context.name)
    setproctitle.setproctitle(f"quintet {context.name}")
    signal.signal(signal.SIGTERM, context.request_stop)
    # A terminal's Ctrl-C reaches the whole group; the supervisor decides the order in which we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main(context)
    except ConfigError as error:
        log.error("%s", error)
        reason_file(context.run_dir, context.name).write_text(str(error), encoding="utf-8")
        return EXIT_CONFIG
    except Exception:
        log.exception("%s ended by an unexpected error", context.name)
        return EXIT_FAILED
    finally:
        if context.trace is not None:
            context.trace.close()
        context.channels.close()
    return EXIT_OK

"""The run directory: one per server, mode 0700, holds config.json and the sockets.

It is locked (``flock``) while its server lives, so the next server can tell a live directory from
one left behind by a power cut, and systemd-tmpfiles leaves it alone. When the supervisor is killed
outright, a waiting shell sees its pipe close and removes the directory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from common.errors import ConfigError

PREFIX = "quintet-"
MAX_SOCKET_PATH = 107
LONGEST_SOCKET_NAME = "gateway-" + "x" * 32


class RunDir:
    """A fresh run directory; ``close`` removes it."""

    def __init__(self, parent: Path | None = None) -> None:
        """Make it in ``parent`` (default: the system's temporary folder) and sweep dead ones there.

        Raises ``ConfigError`` when the folder cannot be used.
        """
        parent = parent or Path(tempfile.gettempdir())
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
        except OSError as error:
            raise ConfigError(f"cannot make a run directory in {parent}: {error.strerror}; set TMPDIR") from None
        if len(str(self.path / LONGEST_SOCKET_NAME)) > MAX_SOCKET_PATH:
            self.path.rmdir()
            raise ConfigError(
                f"{parent} is too long a path for sockets (at most {MAX_SOCKET_PATH} bytes); set TMPDIR to another"
            )
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / "supervisor.pid").write_text(str(os.getpid()))
        self._janitor = _start_janitor(self.path)
        sweep(parent)

    def close(self) -> None:
        """Remove the directory and end the shell that waits for our death."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        if self._janitor.stdin is not None:
            self._janitor.stdin.close()
        self._janitor.wait()


def _start_janitor(path: Path) -> subprocess.Popen[bytes]:
    # `read` returns when the pipe's other end, which only we hold, is closed: by us or by our death.
    script = 'read -r _; rm -rf -- "$1"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "quintet-janitor", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def sweep(parent: Path) -> list[Path]:
    """Remove run directories of ours whose server is gone; returns them.

    A directory is dead when nobody holds its lock and it has the marks of one that was alive, so
    one that is just being made is never taken.
    """
    removed = []
    for path in parent.glob(PREFIX + "*"):
        try:
            if not (path / "supervisor.pid").is_file() or path.stat().st_uid != os.getuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
    return removed

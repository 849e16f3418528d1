"""The errors that cross a module boundary, and how each looks to a client.

    QuintetError
    ├── ConfigError       wrong flag, file or model: the process ends with the message (exit code 2)
    ├── RequestError      the client's fault or ours, for one request: carries the HTTP status
    └── InvariantError    our own bookkeeping is wrong: a bug; never caught to go on
"""

from __future__ import annotations

from common.messages import ErrorInfo


class QuintetError(Exception):
    """Base of all errors of ours."""


class ConfigError(QuintetError):
    """A flag, a file or the model cannot be used; the message names the value and the way out."""


class InvariantError(QuintetError):
    """A broken invariant (page equation, reference count, illegal status change)."""


class RequestError(QuintetError):
    """One request is refused or failed.

    ``status`` is the HTTP status clients of the OpenAI API expect, ``param`` the field at fault,
    ``code`` a short machine-readable word (``context_length_exceeded``).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.info = ErrorInfo(status=status, message=message, code=code, param=param, retry_after_s=retry_after_s)


_SPARE_BYTES = 8 << 20


def raise_if_starved(error: BaseException) -> None:
    """Raise ``error`` again if it says that this *process* has no memory, not that one request asked for too much.

    For handlers that lay any exception to one request's charge. A process that cannot allocate must not go on
    failing one request after the other: it ends, is replaced, and the requests go on in its successor.
    """
    if not isinstance(error, MemoryError):
        return
    try:
        bytearray(_SPARE_BYTES)
    except MemoryError:
        raise error from None

"""How far the loading of weights is, in the worker's own words instead of a bar of transformers' on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as hf_logging

SAY_EVERY_S = 2.0


@contextmanager
def loading_told(progress: Callable[[str], None]) -> Iterator[None]:
    """While weights are loaded, tell ``progress`` every few seconds how many tensors of how many are there."""
    set_hook = getattr(hf_logging, "set_tqdm_hook", None)  # since transformers 5
    if set_hook is None:
        yield
        return

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and kwargs.get("desc") == "Loading weights":
            return _told(args[0], progress)
        return factory(*args, **kwargs)

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


def _told(tensors: Iterable[Any], progress: Callable[[str], None]) -> Iterator[Any]:
    items = list(tensors)
    said_at = time.monotonic()
    for number, item in enumerate(items):
        now = time.monotonic()
        if now - said_at >= SAY_EVERY_S:
            said_at = now
            progress(f"loading weights: {number} of {len(items)} tensors, {100 * number // len(items)} %")
        yield item

"""Which field of a body holds a number that is none: NaN, an infinity, or one beyond what a float holds.

The parser of bodies refuses such a body at once and says at which character. Which field that is in, the standard
library's parser tells, which takes them all.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_BYTES = 64 << 10
"""Of a larger body the field stays unnamed: this parser can take half a microsecond a byte, and all streams wait."""


def find_unusable(body: bytes) -> str | None:
    """The path of the first such number, ``tools[0].x``; None when it is something else that is wrong."""
    if len(body) > MAX_BYTES:
        return None
    try:
        path = _path_in(json.loads(body, parse_int=float), "")
    except (ValueError, RecursionError):
        return None
    # A key may hold what no answer can be written with: lone surrogates.
    return path if path and path.isprintable() else None


def _path_in(value: Any, path: str) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    found: str | None = None
    if isinstance(value, dict):
        for key, item in value.items():
            found = found or _path_in(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found = found or _path_in(item, f"{path}[{index}]")
    return found

"""Keeps text that merely spells a control token from becoming that token.

A chat template writes control tokens (``<|im_end|>``) and the messages' contents into one string.
Before rendering, every string a client sent is *guarded*: a secret mark is put into each
occurrence of a control token, and where a string ends in the beginning, or begins with the end, of
one (so that two harmless strings cannot be joined to a token). After rendering, what still spells a
control token was written by the template. Those are replaced by secret aliases, the marks are
removed, and the text is encoded by a tokenizer that knows the aliases and no control token.

The mark and the aliases are drawn at start-up from a private-use plane, so that no input can
contain them. Strings that need no guard are left as they are, and if none needs one the text is
encoded the plain way.
"""

from __future__ import annotations

import json
import re
import secrets
from itertools import pairwise
from typing import Any

from common.errors import RequestError

_PLANE = range(0xF0000, 0xFFFFE)
_FIXED_WORDS = frozenset({"system", "developer", "user", "assistant", "tool", "function", "text"})
"""Values that templates compare with; never guarded."""
_MAX_DEPTH = 200


def secret_text(length: int = 4) -> str:
    """Private-use characters that no input can contain by chance or by guess (16 bits each)."""
    return "".join(chr(secrets.choice(_PLANE)) for _ in range(length))


class ControlTokens:
    """The texts of the control tokens of one tokenizer. Immutable, safe to share between threads."""

    def __init__(self, texts: list[str]) -> None:
        ordered = sorted({text for text in texts if text}, key=len, reverse=True)
        # Leftmost and longest, as the tokenizer itself matches them.
        any_of = "|".join(map(re.escape, ordered))
        self._pattern = re.compile(any_of) if ordered else None
        self._starts = re.compile(f"(?={any_of})") if ordered else None
        self._prefixes = frozenset(text[:k] for text in ordered for k in range(1, len(text)))
        self._suffixes = frozenset(text[-k:] for text in ordered for k in range(1, len(text)))
        self._max_len = max((len(text) for text in ordered), default=0)
        self.mark = secret_text()
        self._json_mark = json.dumps(self.mark)[1:-1]

    def guard(self, value: Any, param: str = "messages") -> tuple[Any, bool]:
        """Guard every string (keys too) inside a JSON-like value.

        Returns a copy and whether anything was marked.

        Raises:
            RequestError: a string holds a lone surrogate, or the value is nested too deeply.
        """
        marked = [False]
        return self._walk(value, param, marked, 0), marked[0]

    def _walk(self, value: Any, param: str, marked: list[bool], depth: int) -> Any:
        if isinstance(value, str):
            guarded = self.guard_text(value, param)
            marked[0] |= guarded is not value
            return guarded
        if depth > _MAX_DEPTH:
            raise RequestError(f"'{param}' is nested more than {_MAX_DEPTH} levels deep", param=param)
        if isinstance(value, dict):
            return {
                self._walk(key, param, marked, depth + 1): self._walk(item, param, marked, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._walk(item, param, marked, depth + 1) for item in value]
        return value

    def guard_text(self, text: str, param: str = "messages") -> str:
        """One string; the very same object where nothing had to be marked."""
        check_text(text, param)
        if self._starts is None or text in _FIXED_WORDS:
            return text
        # After the first character of every place where a token begins, overlapping ones included.
        cuts = {match.start() + 1 for match in self._starts.finditer(text)}
        cuts.update(self._edges(text))
        if not cuts:
            return text
        bounds = [0, *sorted(cuts), len(text)]
        return self.mark.join(text[start:end] for start, end in pairwise(bounds))

    def _edges(self, text: str) -> list[int]:
        """Where to cut a string so that its neighbours in the rendered text cannot complete a token with it."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        longest = min(self._max_len, end - begin)
        cuts = []
        for k in range(longest, 0, -1):
            if text[end - k : end] in self._prefixes:
                cuts.append(end - k + 1)  # inside, so that trimming does not part the mark from it
                break
        if any(text[begin : begin + k] in self._suffixes for k in range(longest, 0, -1)):
            cuts.append(begin)
        return cuts

    def unguard(self, rendered: str) -> str:
        """Remove every mark (also as ``tojson`` with ASCII escapes writes it)."""
        return rendered.replace(self.mark, "").replace(self._json_mark, "")

    def with_aliases(self, rendered: str, aliases: dict[str, str], cut: str = "") -> str:
        """Replace unmarked control tokens by their aliases, then the marks by ``cut``."""
        if self._pattern is not None:
            rendered = self._pattern.sub(lambda match: aliases[match[0]], rendered)
        return rendered.replace(self.mark, cut).replace(self._json_mark, cut)


def check_text(text: str, param: str) -> None:
    """Raises ``RequestError`` for text that is not valid Unicode (lone surrogates)."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"'{param}' holds a lone surrogate (U+{code:04X} at character {error.start}), which is not valid Unicode",
            param=param,
        ) from None

r"""Regular expressions made to mean the same under every engine that may check the output.

Rust, Python and JavaScript disagree on ``\d``, ``\w``, ``\s`` and their complements (ASCII or
Unicode), and on brackets inside a class. What is let through here is what all of them match: ASCII
members for the sets, and for the complements only what no engine counts in.
"""

from __future__ import annotations

import re

_PIECE = re.compile(r"\\(?:[pPxuk][{<][^}>]*[}>]|.)|\[\^?|.", re.DOTALL)
_INSIDE = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_WIDEST = {"d": r"\p{N}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\s\p{Z}\x1c-\x1f\x85"}


def portable_regex(pattern: str) -> str:
    """The same expression in Rust's syntax, with one meaning everywhere. Malformed ones stay malformed."""
    out: list[str] = []
    in_class = negated = False
    for piece in _PIECE.findall(pattern):
        name = piece[1:].lower()
        if piece[0] == "\\" and name in _INSIDE and len(piece) == 2:
            out.append(_set(name, piece[1].isupper(), in_class, negated))
        elif in_class and piece in ("[", "[^"):
            out.append("\\[" + ("\\^" if len(piece) == 2 else ""))  # nested classes are Rust's alone
        elif in_class and piece in ("&", "~"):
            out.append("\\" + piece)
        elif piece in ("[", "[^") and not in_class:
            in_class, negated = True, len(piece) == 2
            out.append(piece)
        elif piece == "]" and in_class:
            first = out[-1] in ("[", "[^")
            in_class = first
            out.append("\\]" if first else "]")
        else:
            out.append(piece)
    return "".join(out)


def _set(name: str, complement: bool, in_class: bool, negated: bool) -> str:
    r"""``\d``, ``\w``, ``\s`` or a complement: what all engines agree on, also inside ``[...]`` and ``[^...]``."""
    # Inside [^...] what is left out must be what any engine would leave out.
    members = _WIDEST[name] if complement != negated else _INSIDE[name]
    if complement:
        return f"[^{members}]"
    return members if in_class else f"[{members}]"

"""Pieces of llguidance's Lark dialect, and a writer that puts them together.

The dialect: ``name: ...`` rules, ``NAME: ...`` terminals (the longest match wins, or the shortest for
a rule marked ``[lazy]``), ``%json {...}`` for a schema, ``<[5]>`` for the token with that id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from common.errors import RequestError
from common.grammar_ebnf import ebnf_to_lark, is_lark
from common.grammar_regex import portable_regex
from common.grammar_schema import prepare_schema
from common.schema_rewrites import Json

ANY_TEXT = "/(?s:.*)/"

_SLASHES = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
# Comments, strings, regexes and special tokens are skipped, so that only names are renamed.
_LARK_PIECE = re.compile(
    r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|<[^<>\s]+>|(?<![\w@.-])start(?![\w-])"""
)


def literal(text: str) -> str:
    """A Lark string. Raises RequestError (400) for text that is not Unicode (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{json.dumps(text)[:80]} is not valid Unicode", code="invalid_grammar") from None
    return json.dumps(text, ensure_ascii=False)


def regex_literal(pattern: str) -> str:
    """A regular expression (Rust's syntax; the whole text must match) as a Lark terminal."""
    return regex_terminal(portable_regex(pattern))


def regex_terminal(pattern: str) -> str:
    """:func:`regex_literal` of an expression that is portable already."""
    if not pattern:
        return '""'
    return f"/{_SLASHES.sub(lambda found: _ESCAPED.get(found.group(), found.group()), pattern)}/"


def rename_start(lark: str, name: str) -> str:
    """The same Lark grammar with its ``start`` rule called ``name``."""
    return _LARK_PIECE.sub(lambda found: name if found.group() == "start" else found.group(), lark)


class LarkWriter:
    """Collects rules under fresh names. ``special_tokens``: name -> id of the tokenizer's special tokens.

    Text that contains a special token's name means that token: its bytes alone would never be
    what the model writes, nor what it reads.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        self._rules: list[str] = []
        names = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule; its name."""
        name = f"q_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal; its name."""
        name = f"Q_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        """An expression for exactly this text; empty for the empty text."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else literal(piece) for piece in self.pieces(text)
        )

    def pieces(self, text: str) -> list[str]:
        """``text`` cut at its special tokens; none is empty."""
        return [piece for piece in (self._split.split(text) if self._split else [text]) if piece]

    def is_special(self, piece: str) -> bool:
        """Whether a piece is a special token's name."""
        return piece in self._special

    def until(self, end: str, text: str = ANY_TEXT) -> str:
        """Any text (or a terminal's) up to and including the first occurrence of ``end``; no special tokens inside."""
        first, *rest = self.pieces(end)
        tail = self.text("".join(rest))
        if self.is_special(first):
            head = self.rule(f"{text} {self.text(first)}")
        elif text == ANY_TEXT:
            head = self.rule(f"{text} {literal(first)}", lazy=True)
        else:
            # A text that may not end yet could contain ``end``, which whoever reads it takes for the end.
            later = regex_terminal("(?s:.*)" + re.escape(first) + "(?s:.+)")
            head = self.rule(f"({text} {literal(first)}) & ~{later}", lazy=True)
        return f"{head} {tail}".strip()

    def free_text(self, except_for: str = "") -> str:
        """Any text that any special token may interrupt, but for the one named ``except_for``."""
        ids = sorted(number for name, number in self._special.items() if name != except_for)
        if not ids:
            return ""
        return self.rule(f"({ANY_TEXT} <[{','.join(map(str, ids))}]>)*")

    def schema(self, schema: Json) -> str:
        """A value of a JSON schema."""
        return self.rule("%json " + json.dumps(prepare_schema(schema)))

    def grammar(self, text: str) -> str:
        """The language of an EBNF or Lark grammar."""
        name = f"q_{len(self._rules)}"
        if is_lark(text):
            self._rules.append(rename_start(text, name))
        else:
            self._rules.append(ebnf_to_lark(text, start=name, prefix=f"{name}_"))
        return name

    def finish(self, start: str) -> str:
        """The whole grammar, beginning with ``start: ...``."""
        return "\n".join(["start: " + start, *self._rules]) + "\n"

"""EBNF as llama.cpp (GBNF), xgrammar and SGLang write it, translated to the Lark that llguidance reads.

    root ::= greeting (" " name)? "!"
    name ::= [A-Z] [a-z]{1,20}      # comment

Rules without recursion become terminals (regular expressions, which llguidance matches fast and
exactly); the others become rules over these, where a terminal takes the longest match, as lexers do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from common.errors import RequestError

MAX_NESTING = 64
MAX_REPEAT = 100_000


@dataclass(frozen=True, slots=True)
class Literal:
    """Text as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character: any of ``ranges`` (inclusive code points), or none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """``node`` at least ``least`` and at most ``most`` (None: any number of) times."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after another; empty: the empty string."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    nodes: tuple[Node, ...]


Node = Literal | CharClass | Ref | Repeat | Sequence | Choice

_TOKEN = re.compile(
    r"""(?P<skip>(?:\s|\#[^\n]*)+)|(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)|(?P<def>::=)|(?P<string>"(?:\\.|[^"\\])*")"""
    r"""|(?P<klass>\[(?:\\.|[^\]\\])*\])|(?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?\})|(?P<op>\(=|[()|*+?.])""",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def is_lark(text: str) -> bool:
    """Whether a grammar is written in Lark already: it has a ``start:`` rule or a %llguidance line."""
    return re.search(r"^\s*(%llguidance\b|start\s*(\[[^\]]*\])?\s*:(?!:=))", text, re.MULTILINE) is not None


def ebnf_to_lark(text: str, *, start: str = "start", prefix: str = "e") -> str:
    """Lark rules for an EBNF grammar whose first rule to match is ``root``.

    ``start`` is the name the root gets; every other name begins with ``prefix``, so that several
    grammars fit in one text. Raises RequestError (400) with line and column.
    """
    rules = _Parser(text).parse()
    if "root" not in rules:
        raise RequestError("EBNF grammar: there is no rule named 'root'", code="invalid_grammar")
    for name, node in rules.items():
        for ref in _refs(node):
            if ref not in rules:
                words = f"EBNF grammar: rule {name!r} uses {ref!r}, which is not defined"
                raise RequestError(words, code="invalid_grammar")
    terminals = _terminals(rules)
    names = {}
    for index, name in enumerate(rules):
        word = f"{prefix}{index}_" + re.sub(r"[^a-z0-9]", "_", name.lower())
        names[name] = word.upper() if name in terminals else word
    lines = [f"{start}: {names['root']}"]
    lines += [f"{names[name]}: {_lark(node, names)}" for name, node in rules.items()]
    return "\n".join(lines) + "\n"


def _refs(node: Node) -> Iterator[str]:
    match node:
        case Ref(name):
            yield name
        case Repeat(inner, _, _):
            yield from _refs(inner)
        case Sequence(nodes) | Choice(nodes):
            for inner in nodes:
                yield from _refs(inner)
        case _:
            pass


def _terminals(rules: dict[str, Node]) -> set[str]:
    """Names of the rules that reach no recursion: found from the leaves up."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    missing: dict[str, int] = {}
    for name, node in rules.items():
        refs = set(_refs(node))
        missing[name] = len(refs)
        for ref in refs:
            users[ref].append(name)
    ready = [name for name, count in missing.items() if count == 0]
    found = set(ready)
    while ready:
        for user in users[ready.pop()]:
            missing[user] -= 1
            if missing[user] == 0:
                found.add(user)
                ready.append(user)
    return found


def _lark(node: Node, names: dict[str, str]) -> str:
    match node:
        case Literal(text):
            return json.dumps(text, ensure_ascii=False)
        case CharClass(ranges, negated):
            if not ranges:
                return "/(?s:.)/"
            body = "".join(_class_char(low) + ("-" + _class_char(high) if high != low else "") for low, high in ranges)
            return f"/[{'^' if negated else ''}{body}]/"
        case Ref(name):
            return names[name]
        case Repeat(inner, least, most):
            return f"({_lark(inner, names)}){{{least},{'' if most is None else most}}}"
        case Sequence(nodes):
            return " ".join(_lark(inner, names) for inner in nodes) or '""'
        case Choice(nodes):
            return "(" + " | ".join(_lark(inner, names) for inner in nodes) + ")"


def _class_char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


class _Parser:
    """Recursive descent over the tokens of one grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        self._next = 0
        position = 0
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                self._fail(f"{text[position]!r} is not understood", position)
            if found.lastgroup != "skip":
                self._tokens.append((found.lastgroup or "", found.group(), position))
            position = found.end()

    def parse(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._next < len(self._tokens):
            kind, name, position = self._tokens[self._next]
            if kind != "name" or self._kind(1) != "def":
                self._fail(f"expected 'name ::=', found {name!r}", position)
            if name in rules:
                self._fail(f"rule {name!r} is defined twice", position)
            self._next += 2
            rules[name] = self._choice(0)
        return rules

    def _fail(self, words: str, position: int) -> NoReturn:
        line = self._text.count("\n", 0, position) + 1
        column = position - self._text.rfind("\n", 0, position)
        raise RequestError(f"EBNF grammar, line {line}, column {column}: {words}", code="invalid_grammar")

    def _kind(self, ahead: int = 0) -> str:
        at = self._next + ahead
        return self._tokens[at][0] if at < len(self._tokens) else ""

    def _peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def _choice(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            self._fail(f"parentheses nested deeper than {MAX_NESTING}", self._tokens[self._next - 1][2])
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self._next += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        nodes: list[Node] = []
        while self._next < len(self._tokens):
            kind, text, position = self._tokens[self._next]
            if text in ("|", ")") or (kind == "name" and self._kind(1) == "def"):
                break
            self._next += 1
            nodes.append(self._repeats(self._atom(kind, text, position, depth)))
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _atom(self, kind: str, text: str, position: int, depth: int) -> Node:
        if kind == "string":
            return Literal("".join(map(chr, self._characters(text[1:-1], position))))
        if kind == "klass":
            return self._class(text[1:-1], position)
        if kind == "name":
            return Ref(text)
        if text == ".":
            return CharClass((), False)
        if text == "(":
            inner = self._choice(depth + 1)
            if self._peek() != ")":
                self._fail("this '(' is not closed", position)
            self._next += 1
            return inner
        if text == "(=":
            self._fail("look-ahead assertions are not supported", position)
        self._fail(f"{text!r} has nothing before it", position)

    def _repeats(self, node: Node) -> Node:
        while self._next < len(self._tokens):
            kind, text, position = self._tokens[self._next]
            if kind == "repeat":
                least_text, comma, most_text = text[1:-1].replace(" ", "").partition(",")
                least = int(least_text or 0)
                most = int(most_text) if most_text else (None if comma else least)
                if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
                    self._fail(f"a repetition must be in order and at most {MAX_REPEAT}, not {text}", position)
                node = Repeat(node, least, most)
            elif text in ("*", "+", "?"):
                node = Repeat(node, 1 if text == "+" else 0, 1 if text == "?" else None)
            else:
                return node
            self._next += 1
        return node

    def _characters(self, body: str, position: int) -> list[int]:
        """Code points of a literal, escapes resolved."""
        return [code for code, _ in self._units(body, position)]

    def _units(self, body: str, position: int) -> list[tuple[int, bool]]:
        """(code point, was it escaped) of each character."""
        units: list[tuple[int, bool]] = []
        at = 0
        while at < len(body):
            char = body[at]
            at += 1
            if char != "\\":
                units.append((ord(char), False))
                continue
            escape = body[at]
            at += 1
            if escape in _HEX_DIGITS:
                digits = body[at : at + _HEX_DIGITS[escape]]
                at += _HEX_DIGITS[escape]
                if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[escape]}}}", digits):
                    self._fail(f"\\{escape} needs {_HEX_DIGITS[escape]} hexadecimal digits", position)
                code = int(digits, 16)
            else:
                code = ord(_ESCAPES.get(escape, escape))
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                self._fail(f"U+{code:X} is not a character", position)
            units.append((code, True))
        return units

    def _class(self, body: str, position: int) -> Node:
        negated = body.startswith("^")
        units = self._units(body[1:] if negated else body, position)
        if not units:
            self._fail("an empty character class matches nothing", position)
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(units):
            low = units[at][0]
            if at + 2 < len(units) and units[at + 1] == (ord("-"), False):
                high = units[at + 2][0]
                if high < low:
                    self._fail(f"the range {chr(low)!r}-{chr(high)!r} is the wrong way round", position)
                ranges.append((low, high))
                at += 3
            else:
                ranges.append((low, low))
                at += 1
        return CharClass(tuple(ranges), negated)

"""The strings of a JSON schema as bare text, without JSON's quotes and escapes: a Lark terminal.

For call syntaxes that write an argument between tags (``<parameter=city>`` ... ``</parameter>``). Every
keyword about strings becomes a regular language, and llguidance intersects them.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from llguidance import LLTokenizer

from common.errors import RequestError
from common.grammar_compile import compile_matcher
from common.grammar_lark import ANY_TEXT, literal, regex_terminal
from common.grammar_schema import prepare_schema
from common.schema_formats import FORMAT_REGEX
from common.schema_rewrites import Json, Schema, pointer, refuse

_PIECE = re.compile(r"\\(?:[pPxuk][{<][^}>]*[}>]|.)|\[\^?|.", re.DOTALL)
_FLAGS = re.compile(r"\(\?[a-zA-Z]+\)")
_OPENING = re.compile(r"\((?:\?:|\?P?<\w+>|(?!\?))")
_NOTHING = "no string satisfies it"
_MAX_DEPTH = 32


def string_terminal(schema: Json, excludes: tuple[str, ...] = ()) -> str:
    """A terminal for the texts that are strings of the schema and contain none of ``excludes``.

    Raises RequestError (400) with the place of what cannot be enforced, and where no text is left.
    """
    prepared = prepare_schema(schema)
    found = _Strings(prepared).terminal(prepared, "#", ())
    if found is None:
        refuse("#", _NOTHING)
    if found != ANY_TEXT or excludes:
        found = " & ".join([ANY_TEXT, *([found] if found != ANY_TEXT else []), *map(_without, excludes)])
        found = f"({found})"
    if words := _why_unusable(found):
        refuse("#", words)
    return found


def _without(text: str) -> str:
    return f"~{regex_terminal('(?s:.*)' + re.escape(text) + '(?s:.*)')}"


@lru_cache(1024)
def _why_unusable(terminal: str) -> str:
    """Why no text can be written by a terminal; empty: some can. (Within a grammar llguidance would not say.)"""
    try:
        compile_matcher(f"start: ONE\nONE: {terminal}\n", _byte_tokenizer())
    except RequestError as error:
        return _NOTHING if error.info.code == "unsatisfiable_grammar" else error.info.message
    return ""


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


class _Strings:
    """Walks a prepared schema; ``root`` has the ``$defs`` that references name."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def terminal(self, schema: Json, path: str, seen: tuple[str, ...]) -> str | None:
        """The strings of ``schema``; None when there is none."""
        if isinstance(schema, bool):
            return ANY_TEXT if schema else None
        if len(seen) > _MAX_DEPTH:
            refuse(path, f"references nested deeper than {_MAX_DEPTH}")
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return None
        parts = self._own(schema, path)
        for index, each in enumerate(schema.get("allOf", ())):
            parts.append(self.terminal(each, pointer(path, f"allOf/{index}"), seen))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                parts.append(self._any(schema[key], pointer(path, key), key, seen))
        if "$ref" in schema:
            parts.append(self._ref(schema["$ref"], pointer(path, "$ref"), seen))
        if any(part is None for part in parts):
            return None
        return _both([part for part in parts if part is not None and part != ANY_TEXT])

    def _own(self, schema: Schema, path: str) -> list[str | None]:
        parts: list[str | None] = []
        values = [schema["const"]] if "const" in schema else None
        for choices in (values, schema.get("enum")):
            if choices is not None:
                strings = [literal(value) for value in choices if isinstance(value, str)]
                parts.append(f"({' | '.join(strings)})" if strings else None)
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        if least or most is not None:
            if most is not None and most < least:
                return [None]
            parts.append(f"/(?s:.{{{least},{'' if most is None else int(most)}}})/")
        if "pattern" in schema:
            place = pointer(path, "pattern")
            parts.append(regex_terminal(search_regex(schema["pattern"], place)))
            if (words := _why_unusable(parts[-1] or "")) and words != _NOTHING:
                refuse(place, words)
        if "format" in schema:
            parts.append(regex_terminal(FORMAT_REGEX[schema["format"]]))
        return parts

    def _any(self, options: list[Json], path: str, key: str, seen: tuple[str, ...]) -> str | None:
        found = [self.terminal(option, pointer(path, index), seen) for index, option in enumerate(options)]
        strings = [each for each in found if each is not None]
        if key == "oneOf" and any(self._overlap(a, b) for i, a in enumerate(strings) for b in strings[:i]):
            refuse(path, "the keyword 'oneOf' cannot be enforced where two alternatives share a string")
        return f"({' | '.join(strings)})" if strings else None

    @staticmethod
    def _overlap(first: str, second: str) -> bool:
        return _why_unusable(f"({ANY_TEXT} & {first} & {second})") != _NOTHING

    def _ref(self, ref: str, path: str, seen: tuple[str, ...]) -> str | None:
        if ref in seen:
            refuse(path, f"{json.dumps(ref)} leads back to itself")
        target: Json = self._root
        for part in ref[2:].split("/") if ref != "#" else ():
            target = target[part.replace("~1", "/").replace("~0", "~")]
        return self.terminal(target, ref, (*seen, ref))


def _both(parts: list[str]) -> str:
    if not parts:
        return ANY_TEXT
    return parts[0] if len(parts) == 1 else f"({' & '.join(parts)})"


# --------------------------------------------------------------------------- patterns


def search_regex(pattern: str, place: str) -> str:
    """An expression for the whole of every text in which ``pattern`` is found.

    ``^`` and ``$`` may stand at the ends of an alternative; elsewhere they are refused (RequestError).
    """
    flags = _FLAGS.match(pattern)
    head = flags.group() if flags else ""
    return head + _search(pattern[len(head) :], place)


def _search(pattern: str, place: str) -> str:
    alternatives = []
    for pieces in _alternatives(pattern):
        begins, ends = pieces[:1] in (["^"], ["\\A"]), pieces[-1:] in (["$"], ["\\z"], ["\\Z"])
        middle = pieces[begins : len(pieces) - ends]
        inner = "".join(middle)
        opening = _OPENING.match(inner)
        if not begins and not ends and opening and _is_one_group(middle):
            alternatives.append(_search(inner[opening.end() : -1], place))
            continue
        if _has_anchor(middle):
            refuse(place, f"{json.dumps(pattern)[:80]}: an anchor that is not at the end of an alternative")
        alternatives.append(("" if begins else "(?s:.*)") + f"(?:{inner})" + ("" if ends else "(?s:.*)"))
    return f"(?:{'|'.join(alternatives)})"


def _alternatives(pattern: str) -> list[list[str]]:
    """The pieces of each alternative at the top of a pattern; a class is one piece."""
    found: list[list[str]] = [[]]
    depth = 0
    in_class = False
    for piece in _PIECE.findall(pattern):
        if in_class:
            found[-1][-1] += piece
            in_class = piece != "]" or found[-1][-1] in ("[]", "[^]")
            continue
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            found.append([])
            continue
        in_class = piece in ("[", "[^")
        found[-1].append(piece)
    return found


def _is_one_group(pieces: list[str]) -> bool:
    """Whether the pieces are ``( ... )`` as a whole."""
    depth = 0
    for index, piece in enumerate(pieces):
        depth += (piece == "(") - (piece == ")")
        if depth == 0:
            return index == len(pieces) - 1 and piece == ")"
    return False


def _has_anchor(pieces: list[str]) -> bool:
    return any(piece in ("^", "$", "\\A", "\\z", "\\Z", "\\b", "\\B") for piece in pieces)

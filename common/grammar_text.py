"""From a request's :class:`~common.messages.Grammar` to the text llguidance compiles. Pure text.

=============== =============================================================================
kind            ``Grammar.text``
=============== =============================================================================
json_object     ignored
json_schema     the schema as JSON (an OpenAI ``{"name", "schema", "strict"}`` wrapper is not
                unwrapped here: the gateway passes what is under ``schema``)
regex           an expression the whole output matches, Rust's syntax, no look-around
choice          a JSON list of strings
ebnf            GBNF / xgrammar EBNF, or Lark
lark            llguidance's Lark dialect
structural_tag  JSON, see common/grammar_tags.py
=============== =============================================================================

With ``lazy_trigger`` the output is free up to and including the first occurrence of that text, and
what follows must be a word of the grammar (or the output ends without the text ever occurring).
JSON has one spelling of white space, ``", "`` and ``": "``, so that a model cannot loop in it and
every separator and fixed key is forced; ``x-guidance`` at a schema's root chooses another.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import RequestError
from common.grammar_ebnf import is_lark
from common.grammar_lark import ANY_TEXT, LarkWriter, literal, regex_literal
from common.grammar_schema import load_json
from common.grammar_tags import triggers_of, write_tags
from common.messages import Grammar

MAX_GRAMMAR_CHARS = 512 << 10
MAX_REGEX_CHARS = 64 << 10
MAX_CHOICES = 10_000


def to_llguidance(grammar: Grammar, special_tokens: Mapping[str, int] | None = None) -> str:
    """Lark text of a grammar.

    ``special_tokens``: name -> id of the tokenizer's special tokens, the end-of-sequence ids left
    out. Where structural tags or the trigger name one, they mean the token; in free text any may
    occur. Raises RequestError (400) with the place of what is malformed or unsupported.
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        words = f"the grammar has {len(grammar.text)} characters; the limit is {MAX_GRAMMAR_CHARS}"
        raise RequestError(words, code="grammar_too_large")
    if grammar.kind in ("ebnf", "lark") and not grammar.lazy_trigger and is_lark(grammar.text):
        return grammar.text  # as it is, so that the places in llguidance's messages are the client's
    writer = LarkWriter(special_tokens or {})
    body = _body(writer, grammar)
    if not grammar.lazy_trigger:
        return writer.finish(body)
    trigger = grammar.lazy_trigger
    if len(writer.pieces(trigger)) > 1:
        raise RequestError(f"the trigger {trigger!r} must be one special token or contain none", code="invalid_grammar")
    free = writer.free_text(except_for=trigger)
    return writer.finish(f"{free} {writer.until(trigger)} {body} | {free} {ANY_TEXT}")


def tool_triggers(grammar: Grammar) -> tuple[str, ...] | None:
    """Texts after which the output is inside a tool call; () from the beginning, None never."""
    if grammar.lazy_trigger:
        return (grammar.lazy_trigger,)
    return triggers_of(grammar.text) if grammar.kind == "structural_tag" else None


def _body(writer: LarkWriter, grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return writer.schema({"type": "object"})
        case "json_schema":
            return writer.schema(load_json(grammar.text, "JSON schema"))
        case "regex":
            if len(grammar.text) > MAX_REGEX_CHARS:
                words = f"the regex has {len(grammar.text)} characters; the limit is {MAX_REGEX_CHARS}"
                raise RequestError(words, code="grammar_too_large")
            return writer.rule(regex_literal(grammar.text))
        case "choice":
            return writer.rule(" | ".join(map(literal, _choices(grammar.text))))
        case "structural_tag":
            return write_tags(writer, grammar.text)
        case "ebnf" | "lark":
            return writer.grammar(grammar.text)


def _choices(text: str) -> list[str]:
    choices = load_json(text, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError("choice must be a list of strings that is not empty", code="invalid_grammar")
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"choice has {len(choices)} entries; the limit is {MAX_CHOICES}", code="grammar_too_large")
    return list(dict.fromkeys(choices))

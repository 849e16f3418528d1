"""Structural tags: constrained stretches within free text, in xgrammar's and SGLang's JSON.

The older form lists ``structures`` (begin, schema, end) and ``triggers``. The newer one has a
``format``, a tree of: const_string, json_schema, regex, grammar, any_text, bare_string, sequence, or, tag,
triggered_tags, tags_with_separator. An any_text may have ``min_length`` and ``max_length`` (characters). A bare_string
is a string of its ``json_schema``, written without quotes and escapes, in which none of ``excludes`` occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import RequestError
from common.grammar_lark import ANY_TEXT, LarkWriter, regex_literal
from common.grammar_schema import load_json
from common.schema_text import string_terminal

MAX_TAG_DEPTH = 32

Format = dict[str, Any]


def tags_format(text: str) -> Format:
    """The ``format`` tree of a structural tag's JSON text; RequestError (400) when it is none."""
    tag = load_json(text, "structural tag")
    if not isinstance(tag, dict):
        _refuse("$", "must be an object")
    if "structures" not in tag:
        return _checked(tag.get("format"), "$.format")
    structures, triggers = _list(tag, "structures", "$"), _list(tag, "triggers", "$")
    tags = [
        {"begin": item.get("begin"), "end": item.get("end"),
         "content": {"type": "json_schema", "json_schema": item.get("schema", item.get("json_schema", {}))}}
        for item in (_checked(each, f"$.structures[{index}]", False) for index, each in enumerate(structures))
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def triggers_of(text: str) -> tuple[str, ...]:
    """Texts that open a tag; empty: the output is inside one from its beginning."""
    form = tags_format(text)
    return tuple(form["triggers"]) if form["type"] == "triggered_tags" else ()


def write_tags(writer: LarkWriter, text: str) -> str:
    """Lark expression of a structural tag; rules go to ``writer``. Raises RequestError (400)."""
    return _write(writer, tags_format(text), "$.format", 0)


def _refuse(path: str, words: str) -> NoReturn:
    raise RequestError(f"structural tag at {path}: {words}", code="invalid_grammar")


def _checked(value: Any, path: str, typed: bool = True) -> Format:
    if not isinstance(value, dict):
        _refuse(path, "must be an object")
    if typed and value.get("type") not in _WRITERS:
        _refuse(path, f"unknown type {value.get('type')!r}; known: {', '.join(sorted(_WRITERS))}")
    return value


def _string(form: Format, key: str, path: str) -> str:
    value = form.get(key)
    if not isinstance(value, str):
        _refuse(f"{path}.{key}", "must be a string")
    return value


def _list(form: Format, key: str, path: str) -> list[Any]:
    value = form.get(key)
    if not isinstance(value, list) or not value:
        _refuse(f"{path}.{key}", "must be a list that is not empty")
    return value


def _write(writer: LarkWriter, value: Any, path: str, depth: int) -> str:
    form = _checked(value, path)
    if depth > MAX_TAG_DEPTH:
        _refuse(path, f"nested deeper than {MAX_TAG_DEPTH}")
    return _WRITERS[form["type"]](writer, form, path, depth)


def _const(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    return writer.text(_string(form, "value", path)) or '""'


def _schema(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    return writer.schema(form.get("json_schema", {}))


def _regex(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    return writer.rule(regex_literal(_string(form, "pattern", path)))


def _grammar(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    return writer.grammar(_string(form, "grammar", path))


def _any_text(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    least, most = form.get("min_length", 0), form.get("max_length")
    for key in ("min_length", "max_length"):
        if not isinstance(form.get(key, 0), int) or form.get(key, 0) < 0:
            _refuse(f"{path}.{key}", "must be an integer of at least 0")
    return ANY_TEXT if not least and most is None else f"/(?s:.{{{least},{'' if most is None else most}}})/"


def _bare_string(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    excludes = form.get("excludes", [])
    if not isinstance(excludes, list) or not all(isinstance(each, str) and each for each in excludes):
        _refuse(f"{path}.excludes", "must be a list of strings that are not empty")
    text = string_terminal(form.get("json_schema", {}), tuple(excludes))
    return text if text == ANY_TEXT else writer.terminal(text)


def _is_text(value: Any) -> bool:
    """Whether a format is one terminal, to which what ends it must be joined."""
    return isinstance(value, dict) and value.get("type") in ("any_text", "bare_string")


def _sequence(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    elements = _list(form, "elements", path)
    out: list[str] = []
    skip = False
    for index, element in enumerate(elements):
        place = f"{path}.elements[{index}]"
        following = elements[index + 1] if index + 1 < len(elements) else None
        if skip:
            skip = False
        elif _is_text(element) and following is not None:
            # Text is greedy, so what ends it must be one lazy lexeme with it.
            if not (isinstance(following, dict) and following.get("type") == "const_string" and following.get("value")):
                _refuse(place, f"{element['type']} must be the last element or be followed by a const_string")
            out.append(writer.until(_string(following, "value", place), _write(writer, element, place, depth + 1)))
            skip = True
        else:
            out.append(_write(writer, element, place, depth + 1))
    return writer.rule(" ".join(out))


def _or(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    options = _list(form, "elements", path)
    written = [_write(writer, option, f"{path}.elements[{index}]", depth + 1) for index, option in enumerate(options)]
    return writer.rule(" | ".join(written))


def _tag_body(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    end = _string(form, "end", path)
    content = form.get("content")
    if _is_text(content):
        text = _write(writer, content, f"{path}.content", depth + 1)
        return writer.until(end, text) if end else writer.rule(text)
    return f"{_write(writer, content, f'{path}.content', depth + 1)} {writer.text(end)}"


def _tag(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    begin = writer.text(_string(form, "begin", path))
    return writer.rule(f"{begin} {_tag_body(writer, form, path, depth)}")


def _tags(writer: LarkWriter, form: Format, path: str, depth: int) -> list[str]:
    tags = enumerate(_list(form, "tags", path))
    return [_tag(writer, _checked(tag, f"{path}.tags[{i}]", False), f"{path}.tags[{i}]", depth + 1) for i, tag in tags]


def _separated(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    one = writer.rule(" | ".join(_tags(writer, form, path, depth)))
    more = "" if form.get("stop_after_first") else f" ({writer.text(_string(form, 'separator', path))} {one})*"
    return writer.rule(f"{one}{more}" if form.get("at_least_one") else f"({one}{more})?")


def _triggered(writer: LarkWriter, form: Format, path: str, depth: int) -> str:
    triggers = _list(form, "triggers", path)
    opened: dict[str, list[str]] = {}
    for index, value in enumerate(_list(form, "tags", path)):
        place = f"{path}.tags[{index}]"
        tag = _checked(value, place, False)
        begin = _string(tag, "begin", place)
        trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None)
        if trigger is None:
            _refuse(f"{place}.begin", f"{begin!r} begins with none of the triggers")
        rest = writer.text(begin[len(trigger) :])
        opened.setdefault(trigger, []).append(f"{rest} {_tag_body(writer, tag, place, depth + 1)}")
    tags = [writer.rule(f"{writer.until(trigger)} ({' | '.join(bodies)})") for trigger, bodies in opened.items()]
    one = writer.rule(" | ".join(tags))
    # A special token that opens a tag is not also one that may interrupt the text.
    free = writer.free_text(except_for=next((each for each in opened if writer.is_special(each)), ""))
    least = 1 if form.get("at_least_one") else 0
    if form.get("stop_after_first"):
        call = f"{free} {one}"
        return writer.rule(call if least else f"{call} | {free} {ANY_TEXT}")
    return writer.rule(f"({free} {one}){{{least},}} {free} {ANY_TEXT}")


_WRITERS: dict[str, Callable[[LarkWriter, Format, str, int], str]] = {
    "const_string": _const, "json_schema": _schema, "regex": _regex, "grammar": _grammar, "any_text": _any_text,
    "bare_string": _bare_string, "sequence": _sequence, "or": _or, "tag": _tag, "tags_with_separator": _separated,
    "triggered_tags": _triggered,
}

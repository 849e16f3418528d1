"""Colours on a terminal, and the same screen as an SVG."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

SLOT_COLORS = (39, 208, 77, 170, 220, 45, 203, 141, 113, 215)
"""Of the terminal's 256, well apart; a request has that of its slot."""
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
_HEX = {
    39: "#00afff", 208: "#ff8700", 77: "#5fd75f", 170: "#d75fd7", 220: "#ffd700", 45: "#00d7ff", 203: "#ff5f5f",
    141: "#af87ff", 113: "#87d75f", 215: "#ffaf5f", 244: "#808080", 250: "#bcbcbc",
}  # fmt: skip
_CELL_W, _CELL_H = 7.85, 17


class Style:
    """Wraps text in colours; with ``color`` False it returns it as it is."""

    def __init__(self, color: bool = True) -> None:
        self.color = color

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color else text

    def slot(self, slot: int, text: str) -> str:
        """In the colour of a slot."""
        return self._wrap(f"38;5;{SLOT_COLORS[slot % len(SLOT_COLORS)]}", text)

    def dim(self, text: str) -> str:
        """What matters less."""
        return self._wrap("38;5;244", text)

    def soft(self, text: str) -> str:
        """Between dim and plain."""
        return self._wrap("38;5;250", text)

    def bold(self, text: str) -> str:
        """Titles."""
        return self._wrap("1", text)

    def alert(self, text: str) -> str:
        """What went wrong, or is held."""
        return self._wrap("38;5;203", text)


def plain(text: str) -> str:
    """Without colours."""
    return _ESCAPE.sub("", text)


def clip(text: str, width: int) -> str:
    """At most ``width`` visible characters, colours kept and closed."""
    if len(plain(text)) <= width:
        return text
    out, seen, at = [], 0, 0
    while at < len(text) and seen < width - 1:
        match = _ESCAPE.match(text, at)
        if match is not None:
            out.append(match[0])
            at = match.end()
            continue
        out.append(text[at])
        seen, at = seen + 1, at + 1
    return "".join(out) + "…" + ("\x1b[0m" if "\x1b[" in text else "")


def _pieces(line: str) -> Iterator[tuple[str, str]]:
    """(style attributes, text) of a line."""
    at, attributes = 0, ""
    for match in _ESCAPE.finditer(line):
        if match.start() > at:
            yield attributes, line[at : match.start()]
        codes = match[1].split(";")
        if codes[:2] == ["38", "5"]:
            attributes = f' fill="{_HEX.get(int(codes[2]), "#d0d0d0")}"'
        elif codes == ["1"]:
            attributes = ' font-weight="bold" fill="#ffffff"'
        else:
            attributes = ""
        at = match.end()
    if at < len(line):
        yield attributes, line[at:]


def to_svg(lines: Sequence[str], width: int) -> str:
    """The screen as a picture of a terminal, ``width`` columns wide."""
    w, h = width * _CELL_W + 24, len(lines) * _CELL_H + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h:.0f}" font-size="13"'
        ' font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">',
        '<rect width="100%" height="100%" rx="8" fill="#16181d"/>',
    ]
    for row, line in enumerate(lines):
        column = 0
        for attributes, text in _pieces(line):
            x, y = 12 + column * _CELL_W, 24 + row * _CELL_H
            if text.strip():
                fill = attributes or ' fill="#d0d0d0"'
                out.append(
                    f'<text x="{x:.1f}" y="{y}" xml:space="preserve"{fill} textLength="{len(text) * _CELL_W:.1f}">'
                    f"{escape(text)}</text>"
                )
            column += len(text)
    return "\n".join([*out, "</svg>\n"])

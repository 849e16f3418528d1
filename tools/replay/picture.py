"""A run as an SVG: one line per request, time from left to right, what it did in colour."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tools.replay.lives import Life, Run
from tools.replay.timeline import headline

_ROW = 16
_LEFT, _TOP, _RIGHT = 150, 64, 20
_WIDTH = 980
_COLORS = {
    "tokenize": "#9467bd",
    "wait": "#d62728",
    "wait again": "#ff9896",
    "prefill": "#ff7f0e",
    "decode": "#1f77b4",
}
_SHOWN = 200


def write_picture(path: Path, run: Run) -> None:
    """Draw the first 200 requests of a run."""
    lives = sorted((life for life in run.lives.values() if life.queued >= 0), key=lambda life: life.began)[:_SHOWN]
    start = min((life.began for life in lives), default=0.0)
    end = max((life.ended for life in lives), default=1.0)
    scale = _WIDTH / max(end - start, 1e-3)
    height = _TOP + _ROW * len(lives) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
        *_legend(),
        *_axis(end - start, scale, height),
    ]
    for number, life in enumerate(lives):
        parts += _line(life, start, scale, _TOP + _ROW * number)
    parts += [_mark(_LEFT + (at - start) * scale, height) for at in run.lost]
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _legend() -> Iterator[str]:
    x = _LEFT
    for name, color in _COLORS.items():
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"/><text x="{x + 17}" y="20">{name}</text>'
        x += 105
    yield f'<text x="{x}" y="20">| first content written</text><text x="{x + 150}" y="20">x left by its client</text>'


def _axis(seconds: float, scale: float, height: int) -> Iterator[str]:
    every = next((t for t in (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60) if seconds / t <= 14), 300)
    for i in range(int(seconds / every) + 1):
        x = _LEFT + i * every * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 24}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle" fill="#555555">{i * every:g} s</text>'


def _line(life: Life, start: float, scale: float, y: int) -> Iterator[str]:
    def at(t: float) -> float:
        return _LEFT + (t - start) * scale

    def box(a: float, b: float, color: str, words: str) -> str:
        return (
            f'<rect x="{at(a):.2f}" y="{y + 2}" width="{max((b - a) * scale, 0.6):.2f}" height="{_ROW - 4}"'
            f' fill="{color}"><title>{escape(words)}</title></rect>'
        )

    yield (
        f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(_short(life.rid))}'
        f"<title>{escape(headline(life))}</title></text>"
    )
    if life.arrivals and life.tokenized >= 0:
        yield box(life.arrivals[0].time, life.tokenized, _COLORS["tokenize"], "tokenize")
    for a, b, why in life.waits:
        yield box(a, b, _COLORS["wait" if why == "new" else "wait again"], f"waits ({why})")
    for timed in life.rows:
        kind = "prefill" if timed.row.chunk else "decode"
        words = f"{kind}, step {timed.step}, {timed.row.num_tokens} tokens"
        yield box(timed.started, timed.ended, _COLORS[kind], words)
    if life.written >= 0:
        x = at(life.written)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + _ROW}" stroke="#000000" stroke-width="1.5"/>'
    if any(words.startswith("abort") for _, words in life.notes):
        yield f'<text x="{at(life.ended) + 3:.1f}" y="{y + 12}" font-weight="bold">x</text>'


def _mark(x: float, height: int) -> str:
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 24}" stroke="#d62728" stroke-dasharray="4 3"/>'
        f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle" fill="#d62728">the worker was killed</text>'
    )


def _short(rid: str) -> str:
    return rid if len(rid) <= 20 else rid[:11] + "…" + rid[-7:]

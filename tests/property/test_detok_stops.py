"""Stop strings are found however the text is cut into tokens, and nothing of them is sent before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from detokenizer_proc.stops import StopMatcher

STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text(alphabet="ab🙂c", max_size=4), max_size=12)


def reference(stops: tuple[str, ...], text: str) -> tuple[int, str] | None:
    """The stop string complete first (the longest of several), by trying every end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(stops=STOPS, pieces=PIECES)
def test_matches_like_a_search_in_the_whole_text(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    before = 0
    for piece in pieces:
        peeked = matcher.peek(piece)
        match = matcher.feed(piece)
        assert match == peeked
        if match is not None:
            assert reference(stops, "".join(pieces)) == (before + match.end, match.stop)
            return
        before += len(piece)
    assert reference(stops, "".join(pieces)) is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(stops=STOPS, pieces=PIECES)
def test_holds_exactly_the_longest_possible_beginning(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        if matcher.feed(piece) is not None:
            return
        text += piece
        beginnings = [k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])]
        assert matcher.held == max(beginnings, default=0)

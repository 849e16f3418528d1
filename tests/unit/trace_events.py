"""What "Trace Event Format" (Google, 2016) asks of a file, and viewers of slices: checked event by event."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]
PHASES = "MXiCsf"
"""What we use of the format: names, complete slices, instants, counters, both ends of arrows."""
_METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


def check_file(data: object) -> list[Event]:
    """Check a whole file's JSON; returns its events."""
    assert isinstance(data, dict) and data["displayTimeUnit"] == "ms"
    events: list[Event] = data["traceEvents"]
    for event in events:
        check_event(event)
    _check_order(events)
    _check_names(events)
    _check_nesting(events)
    _check_arrows(events)
    return events


def check_event(event: Event) -> None:
    """Its required fields, with the types and ranges the format gives them."""
    phase = event["ph"]
    assert phase in PHASES, event
    assert isinstance(event["name"], str) and event["name"], event
    assert type(event["pid"]) is int and type(event["tid"]) is int, event
    if phase == "M":
        (argument,) = event["args"].values()
        assert type(argument) is _METADATA[event["name"]] and "ts" not in event, event
        return
    assert type(event["ts"]) is int and event["ts"] >= 0, event
    assert isinstance(event.get("args", {}), dict)
    assert ("dur" in event) == (phase == "X"), event
    if phase == "X":
        assert type(event["dur"]) is int and event["dur"] >= 0 and isinstance(event["cat"], str), event
    if phase == "i":
        assert event["s"] in "gpt", event
    if phase == "C":
        assert event["args"] and all(type(value) in (int, float) and value >= 0 for value in event["args"].values())
    if phase in "sf":
        assert type(event["id"]) is int and event["cat"], event
        assert phase == "s" or event["bp"] == "e", event


def _check_order(events: list[Event]) -> None:
    """Names come first; then time never falls, on any track or between them."""
    names = [event["ph"] == "M" for event in events]
    assert names == sorted(names, reverse=True)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def _check_names(events: list[Event]) -> None:
    """Every process and every track has one name and one place."""
    named: dict[tuple[str, int, int], int] = defaultdict(int)
    for event in events:
        if event["ph"] == "M":
            thread = event["tid"] if event["name"].startswith("thread") else 0
            named[event["name"], event["pid"], thread] += 1
    assert set(named.values()) == {1}, named
    for pid, tid in {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}:
        for kind in ("name", "sort_index"):
            assert (f"process_{kind}", pid, 0) in named and (f"thread_{kind}", pid, tid) in named


def slices(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """(pid, tid) -> complete slices in file order."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def _check_nesting(events: list[Event]) -> None:
    """Slices of a track lie side by side or one within the other, to the microsecond."""
    for track in slices(events).values():
        stack: list[Event] = []
        for event in track:
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            inside = not stack or event["ts"] + event["dur"] <= stack[-1]["ts"] + stack[-1]["dur"]
            assert inside, f"{event} is not within {stack[-1]}"
            stack.append(event)


def _check_arrows(events: list[Event]) -> None:
    """Each has one start and one end, not before it, and both begin with a slice of their track."""
    found = slices(events)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) + len(ends) == sum(event["ph"] in "sf" for event in events) and set(starts) == set(ends)
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        for event in (start, ends[number]):
            assert any(event["ts"] == one["ts"] for one in found[event["pid"], event["tid"]]), event

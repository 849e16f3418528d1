"""The table of pauses: what is printed, and what stands in docs/operations.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tests.faults.cells import FAULTS, PHASES, ROLES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
BEGIN, END = "<!-- pauses: written by `make faults` -->", "<!-- /pauses -->"


class Row(NamedTuple):
    """What was measured of one fault of one role."""

    pauses: dict[str, float]
    """Phase -> seconds."""
    note: str = ""


Rows = dict[tuple[str, str], Row]


def markdown(rows: Rows, load: str) -> str:
    """The table, one row per role and fault, a column per phase, seconds in the cells."""
    lines = ["| process | fault | " + " | ".join(PHASES.values()) + " |", "|" + "---|" * (2 + len(PHASES))]
    for role in ROLES:
        for fault, words in FAULTS.items():
            row = rows.get((role, fault))
            if row is not None:
                cells = " | ".join(f"{row.pauses[phase]:.1f}" if phase in row.pauses else "" for phase in PHASES)
                words += f": {row.note}" if row.note else ""
                lines.append(f"| {role} | {words} | {cells} |")
    return "\n".join(lines) + f"\n\nSeconds. {load}\n"


def measured_on() -> str:
    """What the machine was, and how busy: a pause is mostly the start of a process."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, load average at the end of the run {os.getloadavg()[2]:.1f} (15 minutes)."


def report(rows: Rows, *, write: bool) -> None:
    """Print the table; write it into the docs if asked and if no cell is missing."""
    text = markdown(rows, measured_on())
    print("\n" + text)
    num = sum(len(row.pauses) for row in rows.values())
    if write and num == len(ROLES) * len(FAULTS) * len(PHASES):
        put(DOCS, text)


def put(path: Path, text: str) -> None:
    """Replace what stands between the marks; raises ValueError when they are not there."""
    old = path.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise ValueError(f"{path} must have the lines {BEGIN!r} and {END!r} once each")
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")

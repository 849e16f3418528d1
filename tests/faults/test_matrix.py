"""Every process, every fault, every phase: what clients assemble is what they would have had.

Without ``QUINTET_FAULTS=all`` (``make faults``) a slice that has every pair of role, fault and phase.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import table
from tests.faults.cells import FAULTS, PHASES, ROLES, Cell, pairwise_slice, whole_matrix
from tests.faults.conftest import WHOLE, Fleet
from tests.faults.faults import FAULTS as DO
from tests.faults.scene import Scene
from tests.faults.streams import Reply
from tests.faults.table import Row
from tests.integration.server import Server

CELLS = whole_matrix() if WHOLE else pairwise_slice()


def server_key(cell: Cell) -> str:
    """Cells with the same key share a server. A shutdown ends it; and where pauses are measured, the restarts that
    went before must not make one longer."""
    if cell.fault == "shutdown":
        return cell.name
    return cell.fault if WHOLE else "shared"


def next_key(cell: Cell) -> str:
    """The server of the cell after this one, to be started meanwhile; not where that would lengthen a pause."""
    place = CELLS.index(cell) + 1
    return server_key(CELLS[place]) if place < len(CELLS) and not WHOLE else ""


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_streams_end_as_if_nothing_had_happened(
    cell: Cell,
    fleet: Fleet,
    reference: Callable[[Server], dict[str, Reply]],
    measured: dict[tuple[str, str], Row],
) -> None:
    server = fleet.get(server_key(cell), then=next_key(cell))
    scene = Scene(server, cell, reference(server), salt=cell.name)
    fault = DO[cell.fault](server, cell.role)
    scene.play(fault)
    assert set(scene.pauses) >= set(cell.phases)
    measured[cell.role, cell.fault] = Row({phase: scene.pauses[phase] for phase in cell.phases}, fault.note)


def test_the_slice_has_every_pair() -> None:
    cells = pairwise_slice()
    assert sum(len(cell.phases) for cell in cells) == 30
    assert {(cell.role, cell.fault) for cell in cells} == {(role, fault) for role in ROLES for fault in FAULTS}
    assert {(cell.role, phase) for cell in cells for phase in cell.phases} == {(r, p) for r in ROLES for p in PHASES}
    assert {(cell.fault, phase) for cell in cells for phase in cell.phases} == {(f, p) for f in FAULTS for p in PHASES}


def test_the_matrix_has_every_cell() -> None:
    assert sum(len(cell.phases) for cell in whole_matrix()) == len(ROLES) * len(FAULTS) * len(PHASES) == 150


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    rows = {("worker", "kill"): Row({"greedy": 2.04, "json": 3.0}, "noted")}
    path = tmp_path / "operations.md"
    path.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    table.put(path, table.markdown(rows, "On a quiet machine."))
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| worker | kill -9: noted |  | 2.0 |  | 3.0 |  |  |" in text.splitlines()
    table.DOCS.read_text(encoding="utf-8").index(table.BEGIN)
    path.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="must have the lines"):
        table.put(path, "")

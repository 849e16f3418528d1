"""The parameter table of docs/api.md, row by row: the value that should work and the one that should not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.protocols.openai_chat import ChatBody
from gateway.protocols.openai_completions import CompletionBody
from tests.unit.gateway_live import Live, live_gateway

DOC = Path(__file__).resolve().parents[2] / "docs" / "api.md"
ALIASES_TOGETHER = re.compile(r"`([^`]+)`")


def rows() -> Iterator[tuple[str, str, Any, Any, int]]:
    """(parameter, endpoint, accepted value, refused value, status) of every row."""
    lines = DOC.read_text(encoding="utf-8").splitlines()
    start = lines.index("| parameter | endpoint | default | range | accepted | refused | result |")
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        names, endpoints, _, _, accepted, refused, result = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in ALIASES_TOGETHER.findall(names):
            for endpoint in endpoints.split(", "):
                yield name, endpoint, json.loads(accepted[1:-1]), json.loads(refused[1:-1]), int(result)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


@pytest.mark.parametrize(("name", "endpoint", "accepted", "refused", "status"), list(rows()))
def test_row(live: Live, name: str, endpoint: str, accepted: Any, refused: Any, status: int) -> None:
    send = live.chat if endpoint == "chat" else live.complete
    if name != "any_other_name":
        response = send(**{name: accepted})
        assert response.status_code == 200, response.text
    response = send(**{name: refused})
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"].partition(".")[0].partition("[")[0] == name


def test_the_table_of_statuses_has_those_that_the_served_document_names(live: Live) -> None:
    table = DOC.read_text(encoding="utf-8").partition("| status | when |")[2].partition("\n\n")[0]
    listed = {status for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for status in cell.split(", ")}
    paths = live.client.get("/openapi.json").json()["paths"].values()
    named = {status for path in paths for operation in path.values() for status in operation["responses"]} - {"200"}
    assert listed == named | {"405", "431"}, "the last two are answered before a route is found"
    assert "504" in listed


def test_every_field_a_client_may_send_is_in_the_table() -> None:
    listed = {(name, endpoint) for name, endpoint, *_ in rows()}
    for endpoint, body in (("chat", ChatBody), ("completions", CompletionBody)):
        missing = [
            name for name in body.model_fields if name not in ("messages", "prompt") and (name, endpoint) not in listed
        ]
        assert not missing

"""schemathesis over the served OpenAPI document: no 5xx, no undocumented status. Skipped where not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.gateway_live import live_gateway


def test_generated_requests_get_documented_answers() -> None:
    pytest.importorskip("schemathesis")
    with live_gateway() as pair:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{pair.url}/openapi.json", "--url", pair.url,
            "--max-examples", "10", "--phases", "fuzzing", "--seed", "1",
            "--checks", "not_a_server_error,status_code_conformance", "--request-timeout", "20",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        assert pair.chat().status_code == 200

"""A short soak in the suite; the long one with ``make faults``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.conftest import WHOLE
from tests.faults.soak import soak

SECONDS = float(os.environ.get("QUINTET_SOAK_SECONDS", "1800" if WHOLE else "12"))


@pytest.mark.integration
@pytest.mark.timeout(SECONDS + 600)
def test_a_soaked_server_is_as_it_was(long_folder: Path) -> None:
    report, wrong = soak(long_folder, SECONDS)
    print("\n" + "\n".join(report))
    assert not wrong, "\n".join(wrong)

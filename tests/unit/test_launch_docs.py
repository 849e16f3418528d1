"""What README and docs name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common import flags
from gateway.join import JoinCommand

ROOT = Path(__file__).resolve().parents[2]
ALIASES = {"--" + name.replace("_", "-") for name in flags.ALIASES}
PAGES = [ROOT / "README.md", ROOT / "docs" / "operations.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_flags_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    paths = set(re.findall(r"`([a-z_]+(?:/[\w.]+)*(?:\.py|/))`", text))
    assert not [path for path in paths if not (ROOT / path).exists()]
    known = {flag.option for flag in (*flags.all_flags(), *flags.all_flags(JoinCommand))}
    known |= {"--help", "--config", "--make-curve-keys", *ALIASES}
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert not named - known


def test_the_operators_guide_names_every_file_of_deploy_and_says_what_was_not_tried() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    missing = [path.name for path in (ROOT / "deploy").iterdir() if f"`deploy/{path.name}`" not in text]
    assert not missing
    assert "`deploy/Dockerfile`\nand `deploy/compose.yaml`, untested" in text
    for name in ("Dockerfile", "compose.yaml"):
        assert (ROOT / "deploy" / name).read_text().startswith("# UNTESTED"), name


def test_the_operators_guide_leads_to_every_flag() -> None:
    assert "(../README.md#flags)" in (ROOT / "docs" / "operations.md").read_text()
    assert re.search(r"^#+ Flags$", (ROOT / "README.md").read_text(), re.MULTILINE)

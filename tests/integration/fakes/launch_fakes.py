"""launch.py with processes from role.py in place of the real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import launch
from launcher.children import Command, Spec

ROLE = Path(__file__).with_name("role.py")


def fake_command(run_dir: Path) -> Command:
    def command(spec: Spec, generation: int) -> list[str]:
        where = ["--run-dir", str(run_dir), "--index", str(spec.index), "--generation", str(generation)]
        return [sys.executable, str(ROLE), spec.role, *where]

    return command


if __name__ == "__main__":
    sys.exit(launch.main(command_for=fake_command))

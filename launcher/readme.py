"""``python -m launcher.readme``: write the table of flags into README.md, between its two marks."""

from __future__ import annotations

import sys
from pathlib import Path

from common.flags import markdown_table

BEGIN, END = "<!-- flags -->\n", "<!-- /flags -->"


def with_table(readme: str) -> str:
    """``readme`` with what is between the marks replaced. Raises ``ValueError`` when a mark is missing."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"README.md has no {BEGIN.strip()} ... {END}")
    return f"{before}{BEGIN}{markdown_table()}{END}{after}"


def main() -> int:
    """Rewrite README.md in the current folder."""
    path = Path("README.md")
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

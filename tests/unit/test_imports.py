"""The import table of DESIGN.md: who may import whom, and who may import torch."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "common": set(),
    "gateway": {"common"},
    "tokenizer_proc": {"common"},
    "scheduler_proc": {"common"},
    "worker_proc": {"common"},
    "detokenizer_proc": {"common"},
    "launcher": {"common"},
    "launch": {"common", "launcher", "worker_proc.prepare"},
}
"""Package -> what of ours it may import, itself aside. tools and bench: anything."""
OURS = {*ALLOWED, "tools", "bench"}
HEAVY = {"torch", "transformers", "triton"}
COMMON_FILES = {
    "__init__", "channels", "config", "cores", "curve", "errors", "flags", "grammar_compile", "grammar_ebnf",
    "grammar_lark", "grammar_regex", "grammar_schema", "grammar_tags", "grammar_text", "inboxes", "notify", "process",
    "schema_formats", "schema_keywords", "schema_place", "schema_rewrites", "schema_text", "trace", "trace_channels",
}  # fmt: skip
"""A closed list: what every process shares is a decision, never a drawer."""


def sources(package: str) -> list[Path]:
    single = ROOT / f"{package}.py"
    return [single] if single.is_file() else sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, allowed: set[str]) -> bool:
    # "worker_proc" comes along with "from worker_proc.prepare import x" only in its dotted form
    return any(name == one or name.startswith(one + ".") for one in allowed)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_only_the_arrows_of_the_table(package: str) -> None:
    allowed = ALLOWED[package] | {package}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports(path)
        if name.split(".")[0] in OURS and not is_within(name, allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(set(ALLOWED) - {"worker_proc"}))
def test_only_the_worker_imports_torch(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


def test_common_is_a_closed_list() -> None:
    assert {path.stem for path in (ROOT / "common").glob("*.py")} == COMMON_FILES
    assert {path.name for path in (ROOT / "common").iterdir() if (path / "__init__.py").is_file()} == {"messages"}


def test_every_package_is_listed_for_installation() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in OURS
        for path in (ROOT / package).rglob("*.py")
    }
    assert listed == present
    without_init = [name for name in present if not (ROOT / Path(*name.split(".")) / "__init__.py").is_file()]
    assert not without_init, "python -m and the wheel both want an __init__.py"

"""Flags and the config file, read off the fields of ``ServerConfig``.

A setting is declared once, in ``common/config.py``: its name, type, limits, help and default. From
there come the flag (``context_length`` -> ``--context-length``), its place in ``--help``, the name
it has in ``--config file.yaml``, the check of its value and its row in the README's table.

Another command with settings of its own (a gateway on another host) has a struct like ``ServerConfig``,
the *schema* of the functions below; ``LEFT_OUT`` names the fields of its sections that are no flags there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from common import curve
from common.config import Section, ServerConfig, check, check_finite
from common.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)

ALIASES = {"model_path": "model", "tensor_parallel_size": "tp_size"}
"""SGLang's other spellings."""
SECRET = frozenset({"api_key", "admin_api_key"})
"""Settings whose value no message shows."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting, as the command line and the config file see it."""

    section: str
    title: str
    name: str
    type: Any
    """The field's type with its limits (``Annotated``)."""
    help: str
    default: Any

    @property
    def option(self) -> str:
        """``--context-length``"""
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return _plain(self.type) is bool

    @property
    def is_list(self) -> bool:
        return get_origin(_plain(self.type)) is list

    @property
    def choices(self) -> tuple[str, ...]:
        """The words a ``Literal`` allows; empty for other types."""
        plain = _plain(self.type)
        return get_args(plain) if get_origin(plain) is Literal else ()

    @property
    def kind(self) -> str:
        """What the help shows for the value: ``{auto,cpu}``, ``INT``, ``NAME ...``"""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return "TEXT" if self.is_list else {int: "INT", float: "NUMBER", str: "TEXT", bool: ""}[_plain(self.type)]

    @property
    def shown_default(self) -> str:
        """The default as the help and the README print it."""
        if self.is_bool:
            return "on" if self.default else "off"
        if self.default in ("", []):
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def read(self, value: Any) -> Any:
        """A value from the command line or the file, converted and checked.

        Raises ``ConfigError`` that names the flag, the value and what is allowed.
        """
        if self.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        try:
            return msgspec.convert(value, self.type, strict=False)
        except msgspec.ValidationError as error:
            allowed = f"one of {', '.join(self.choices)}" if self.choices else str(error).replace("`", "")
            shown = "(not shown)" if self.name in SECRET else repr(value)
            raise ConfigError(f"{self.option} {shown}: {allowed[:1].lower()}{allowed[1:]}") from None


def _plain(annotated: Any) -> Any:
    return get_args(annotated)[0] if get_origin(annotated) is Annotated else annotated


def all_flags(schema: type[msgspec.Struct] = ServerConfig) -> list[Flag]:
    """Every setting in the order of its declaration."""
    found: list[Flag] = []
    left_out: frozenset[str] = getattr(schema, "LEFT_OUT", frozenset())
    for section, section_type in get_type_hints(schema).items():
        if not (isinstance(section_type, type) and issubclass(section_type, Section)):
            continue  # model_dir: filled in by launch.py, no flag
        defaults = section_type()
        for name, hint in get_type_hints(section_type, include_extras=True).items():
            if name in left_out:
                continue
            meta = next(m for m in hint.__metadata__ if isinstance(m, msgspec.Meta))
            title = (section_type.__doc__ or section).strip()
            found.append(Flag(section, title, name, hint, meta.description or "", getattr(defaults, name)))
    return found


class _Parser(argparse.ArgumentParser):
    """argparse whose errors say where help is, without the whole usage before them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n(see {self.prog} --help)\n")


class _MakeKeys(argparse.Action):
    """Makes keys and ends, as ``--help`` prints and ends."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, __: str | None = None) -> None:
        try:
            made = curve.make_keys(Path(values[0]), values[1:])
        except ConfigError as error:
            parser.error(str(error))
        print(f"The engine's keys are in {values[0]}: give --curve-keys {values[0]} and --engine-listen to launch.py.")
        for folder in made:
            print(f"Move {folder} to the gateway's host, its secret is nowhere else: --curve-keys of python -m gateway")
        parser.exit()


def build_parser(prog: str = "launch.py", schema: type[msgspec.Struct] = ServerConfig) -> argparse.ArgumentParser:
    """The command line: one group per section, each flag with its default in the help."""
    is_server = schema is ServerConfig
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--model MODEL] [--port PORT] [any flag below]" if is_server else None,
        allow_abbrev=False,
        description=(
            "Start the server: gateways, tokenizers, the scheduler, a worker per rank and the detokenizer."
            if is_server else (schema.__doc__ or "").strip()
        ),
        epilog="Lists are given as repeated values (--api-key a --api-key b) or comma separated (--api-key a,b).",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the names below; a flag beats it")
    if is_server:
        parser.add_argument(
            "--make-curve-keys", nargs="+", metavar=("DIR", "NAME"), action=_MakeKeys, default=argparse.SUPPRESS,
            help="make the keys for --curve-keys DIR and for gateways NAME on other hosts [gateway], and end",
        )  # fmt: skip
    flags = all_flags(schema)
    groups = {flag.title: parser.add_argument_group(flag.title) for flag in flags}
    for flag in flags:
        _add(groups[flag.title], flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    options = [flag.option] + ["--" + a.replace("_", "-") for a, name in ALIASES.items() if name == flag.name]
    text = f"{flag.help} [{flag.shown_default}]".replace("%", "%%")
    common: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "help": text}
    if flag.is_bool:
        group.add_argument(*options, action=argparse.BooleanOptionalAction, **common)
        return
    if flag.is_list:
        common.update(action="extend", nargs="+")
    group.add_argument(*options, metavar=flag.kind, **common)


def read_file(path: Path, schema: type[msgspec.Struct] = ServerConfig) -> dict[str, Any]:
    """The settings of a YAML file: ``name: value`` with the flags' names, ``-`` or ``_``.

    Raises ``ConfigError`` for a file that cannot be read, an unknown name or a wrong value.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content, keys = yaml.safe_load(text), _keys(yaml.compose(text, yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must be a list of `name: value` lines, not a {type(content).__name__}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        values[_name_of(str(key))] = value
    if len(values) < len(keys):
        twice = sorted({name for name in keys if keys.count(name) > 1})
        raise ConfigError(f"--config {path}: {', '.join(twice)} is set twice")
    try:
        return _checked(values, schema)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _name_of(key: str) -> str:
    name = key.replace("-", "_")
    return ALIASES.get(name, name)


def _keys(node: Any) -> list[str]:
    """The names as written: YAML's own reader lets the last of two equal ones win in silence."""
    return [_name_of(str(key.value)) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []


def _checked(values: Mapping[str, Any], schema: type[msgspec.Struct]) -> dict[str, Any]:
    known = {flag.name: flag for flag in all_flags(schema)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)} (see --help for the names)")
    return {name: known[name].read(value) for name, value in values.items()}


def build(values: Mapping[str, Any]) -> ServerConfig:
    """The configuration in which exactly ``values`` (flat, by field name) differ from the defaults.

    Raises ``ConfigError`` for unknown names and for values outside their type or limits.
    """
    return build_as(ServerConfig, values)


def build_as(schema: type[S], values: Mapping[str, Any]) -> S:
    """``build`` for any schema."""
    values = _checked(values, schema)
    sections: dict[str, dict[str, Any]] = {}
    for flag in all_flags(schema):
        if flag.name in values:
            sections.setdefault(flag.section, {})[flag.name] = values[flag.name]
    types = get_type_hints(schema)
    config = schema(**{section: types[section](**fields) for section, fields in sections.items()})
    if isinstance(config, ServerConfig):
        check(config)
    else:
        check_finite(config)
    return config


def parse(argv: list[str] | None = None, prog: str = "launch.py") -> ServerConfig:
    """Read the command line (and its ``--config`` file). Exits with code 2 and a message if it is wrong."""
    return parse_as(ServerConfig, argv, prog)


def parse_as(schema: type[S], argv: list[str] | None, prog: str) -> S:
    """``parse`` for any schema. What its ``__post_init__`` raises as ``ConfigError`` is shown like a wrong flag."""
    parser = build_parser(prog, schema)
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    try:
        from_file = read_file(path, schema) if path is not None else {}
        lists = {flag.name for flag in all_flags(schema) if flag.is_list}
        from_flags = {name: ",".join(value) if name in lists else value for name, value in given.items()}
        return build_as(schema, {**from_file, **from_flags})
    except ConfigError as error:
        parser.error(str(error))


def markdown_table() -> str:
    """The README's table of flags."""
    lines = ["| flag | default | what it does |", "|---|---|---|"]
    title = ""
    for flag in all_flags():
        if flag.title != title:
            title = flag.title
            lines.append(f"| **{title}** | | |")
        value = f" {flag.kind}".replace("|", "\\|").rstrip()
        lines.append(f"| `{flag.option}{value}` | {flag.shown_default} | {flag.help} |")
    return "\n".join(lines) + "\n"

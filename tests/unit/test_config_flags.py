"""Flags, config file and the checks between settings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common import config as config_file
from common import flags
from common.config import ServerConfig
from common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_no_flags_give_the_defaults() -> None:
    assert flags.parse([]) == ServerConfig()


def test_every_field_is_a_flag_with_help_and_default() -> None:
    text = flags.build_parser().format_help()
    for flag in flags.all_flags():
        assert flag.help and flag.option in text
    names = [flag.name for flag in flags.all_flags()]
    assert len(names) == len(set(names)), "names are unique over the sections"


def test_flags_that_the_fast_cpu_path_refuses_name_the_path_that_takes_them() -> None:
    for name, value in (("attention-backend", "torch"), ("kv-cache-dtype", "fp8_e4m3")):
        (flag,) = (flag for flag in flags.all_flags() if flag.option == f"--{name}")
        assert "generic path" in flag.help
        with pytest.raises(SystemExit):
            flags.parse([flag.option, value, "--worker-path", "cpu-fast"])


def test_sglang_spellings() -> None:
    config = flags.parse(["--model-path", "m", "--tensor-parallel-size", "2", "--context-length=512"])
    assert (config.model.model, config.worker.tp_size, config.model.context_length) == ("m", 2, 512)


def test_booleans_and_lists() -> None:
    config = flags.parse(["--disable-radix-cache", "--api-key", "a,b", "--api-key", "c"])
    assert config.cache.disable_radix_cache and config.http.api_key == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nope"], "--nope"),
        (["--port", "99999"], "65535"),
        (["--port", "abc"], "abc"),
        (["--dtype", "int3"], "one of auto, bfloat16, float16, float32"),
        (["--page-size", "24"], "power of two"),
        (["--mem-fraction-static", "nan"], "mem-fraction-static"),
        (["--drain-seconds", "inf"], "finite"),
        (["--max-running-requests", "0"], "max-running-requests"),
        (["--model"], "expected one argument"),
        (["stray"], "stray"),
        (["--context", "4"], "--context"),
    ],
)
def test_wrong_flags_exit_with_2_and_say_what(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        flags.parse(argv)
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1234\ncontext-length: 99\ndisable_radix_cache: true\napi_key: [k1, k2]\nmodel-path: m\n")
    config = flags.parse(["--config", str(file), "--port", "4321", "--no-disable-radix-cache"])
    assert (config.http.port, config.model.context_length, config.cache.disable_radix_cache) == (4321, 99, False)
    assert (config.http.api_key, config.model.model) == (["k1", "k2"], "m")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "unknown setting prot"),
        ("port: many", "--port 'many'"),
        ("port: null", "--port None"),
        ("served_model_name: [1]", "served-model-name"),
        ("- a", "name: value"),
        ("a: [", "cannot be read"),
        ("port: 1\nport: 2", "port is set twice"),
        ("api-key: a\napi_key: b", "set twice"),
    ],
)
def test_wrong_files_are_refused_with_their_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        flags.read_file(file)
    assert str(file) in str(error.value)


def test_an_empty_file_changes_nothing_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\n")
    assert flags.parse(["--config", str(file)]) == ServerConfig()
    with pytest.raises(ConfigError, match="cannot be read"):
        flags.read_file(tmp_path / "none.yaml")


def test_config_json_round_trip_and_refusal_of_unknown_names() -> None:
    config = flags.build({"port": 1, "served_model_name": ["a"], "mem_fraction_static": 0.5})
    assert config_file.load(config_file.save(config)) == config
    with pytest.raises(msgspec.ValidationError):
        config_file.load(b'{"http": {"prot": 1}}')


@pytest.mark.parametrize("text", ["api_key: [7134]", "admin_api_key: 7134", "api_key: {a: '7134'}"])
def test_a_key_of_the_wrong_form_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"api-key \(not shown\): expected") as refused:
        flags.read_file(file)
    assert "7134" not in str(refused.value)


def test_empty_api_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        flags.build({"api_key": [""]})


def test_readme_table_is_the_configuration() -> None:
    readme = (ROOT / "README.md").read_text()
    assert flags.markdown_table() in readme, "run: python -m launcher.readme"

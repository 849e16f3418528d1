"""API keys of a running server are in its 0600 config.json and nowhere else."""

from __future__ import annotations

import stat
from pathlib import Path

import httpx
import pytest

from tests.integration.fakes.launch_no_model import __file__ as no_model
from tests.integration.fakes.launch_no_model import make_folder
from tests.integration.server import Server

pytestmark = pytest.mark.integration
KEYS = ("clients-secret-7f1", "admins-secret-9c3", "wrong-secret-5d2")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_keys_are_in_no_log_trace_metric_or_answer(tmp_path: Path, log_format: str) -> None:
    folder, trace, config = make_folder(tmp_path / "tiny"), tmp_path / "trace", tmp_path / "server.yaml"
    config.write_text(f"api_key: {KEYS[0]}\nadmin_api_key: {KEYS[1]}\n")
    args = ["--config", str(config), "--trace", str(trace), "--log-level", "debug", "--log-format", log_format]
    one = Server(["--model", str(folder), "--load-format", "dummy", *args], script=Path(no_model))
    try:
        one.wait_ready()
        answers = []
        for key in KEYS:
            headers = {"Authorization": f"Bearer {key}"}
            for path in ("/get_server_info", "/metrics", "/v1/models", "/flush_cache", f"/health?key={key}"):
                answers.append(httpx.get(one.url + path, headers=headers, timeout=20).text)
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
            answers.append(httpx.post(one.url + "/v1/completions", json=body, headers=headers, timeout=20).text)
        files = {path.name: path for path in one.run_dir().iterdir() if path.is_file()}
        holds = [name for name, path in files.items() if any(key.encode() in path.read_bytes() for key in KEYS)]
        assert holds == ["config.json"]
        assert stat.S_IMODE(files["config.json"].stat().st_mode) == 0o600
        assert stat.S_IMODE(one.run_dir().stat().st_mode) == 0o700
        assert one.stop() == 0
        traced = [path.read_bytes() for path in trace.rglob("*") if path.is_file()]
        assert traced
        for key in KEYS:
            assert key not in one.log and not any(key in answer for answer in answers)
            assert not any(key.encode() in data for data in traced)
    finally:
        one.close()

"""schemathesis over the served OpenAPI document of a live server: no 5xx, no undocumented status."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from tests.integration.server import Server

pytestmark = pytest.mark.integration
CONSTRAINTS = (
    "response_format", "structured_outputs", "regex", "ebnf", "json_schema", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "choice", "structural_tag", "tools", "tool_choice",
)  # fmt: skip
REFUSED = (
    "timeout", "store", "service_tier", "modalities", "max_completion_tokens", "stream_options", "best_of", "suffix",
    "top_logprobs", "continue_final_message", "stop_token_ids", "logit_bias", "top_logprobs_num", "logprob_start_len",
    "spaces_between_special_tokens", "max_new_tokens",
)  # fmt: skip
"""Fields of which most values are refused, or ask for another field."""
GENERATING = ["/v1/chat/completions", "/v1/completions", "/generate"]


def test_generated_requests_get_documented_answers(session_server: Server, tmp_path: Path) -> None:
    """Every endpoint but the profiler's, which would write where the generated paths point."""
    url = session_server.url
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--url", url, "--seed", "1",
        "--max-examples", "5", "--phases", "coverage,fuzzing", "--exclude-path-regex", "profile",
        "--checks", "not_a_server_error,status_code_conformance,negative_data_rejection,content_type_conformance",
        "--request-timeout", "30",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert httpx.get(url + "/health_generate", timeout=30).status_code == 200


def in_vocabulary(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [in_vocabulary(item) for item in prompt[:4]]
    return int(prompt) % 384 if isinstance(prompt, (int, float)) else prompt


def tame(body: Any, path: str) -> None:
    """Make what is generated acceptable and short: few random bodies get as far as the engine by themselves."""
    if not isinstance(body, dict):
        return
    for key in REFUSED:
        body.pop(key, None)
    for key in [key for key in CONSTRAINTS if key in body][int(len(body) % 3 == 0) :]:
        del body[key]  # at most one is left
    for key, value in body.items():
        if isinstance(value, float) and value.is_integer():
            body[key] = int(value)  # 2.0 is an integer by JSON Schema, and refused here
    if path in ("/v1/chat/completions", "/v1/completions"):
        body["model"], body["max_tokens"] = "tiny", 1 + len(body) % 5
        if "prompt" in body:
            body["prompt"] = in_vocabulary(body["prompt"])
    elif path == "/generate":
        text = body["text"] = body.get("text") or "x"
        body["input_ids"] = None
        if isinstance(body.get("return_logprob"), list):
            body["return_logprob"] = bool(body["return_logprob"])
        given = body.get("sampling_params")
        each = [one or {} for one in (given if isinstance(given, list) else [given])]
        for one in each:
            tame(one, "")
            one |= {"max_new_tokens": 3, "n": each[0].get("n")}
        num_prompts = len(text) if isinstance(text, list) else 1
        one_each = [each[i % len(each)] for i in range(num_prompts)]
        body["sampling_params"] = one_each if isinstance(given, list) else each[0]
    else:
        body.pop("model", None)
    for key, least, span in (("n", 1, 3), ("min_tokens", 0, 2), ("min_new_tokens", 0, 2)):
        if isinstance(body.get(key), int):
            body[key] = least + body[key] % span
    for message in body.get("messages") or ():
        if isinstance(message, dict):
            message["role"], message["content"] = "user", message.get("content") or "x"
            for key in [key for key in message if key not in ("role", "content", "name")]:
                del message[key]


@pytest.mark.parametrize("path", GENERATING)
def test_bodies_that_are_valid_by_the_schema_reach_the_engine(session_server: Server, path: str) -> None:
    operation = schemathesis.openapi.from_url(f"{session_server.url}/openapi.json")[path]["POST"]
    statuses: Counter[int] = Counter()

    @settings(max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        tame(case.body, path)
        response = case.call(base_url=session_server.url, timeout=30)
        case.validate_response(response, checks=[not_a_server_error, status_code_conformance])
        statuses[response.status_code] += 1

    run()
    assert statuses[200] >= 25, statuses

"""What the user sees at start-up: the table, the ready line, a curl line that works."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.config import ServerConfig
from launcher.children import Child
from launcher.ports import url_host

WORKER_ROWS = ("device", "dtype", "path", "threads", "weights", "pages", "kv", "context")
"""Keys of the worker's ``Heartbeat.info`` that the table shows, under their own names."""


def base_url(config: ServerConfig) -> str:
    """``http://127.0.0.1:30000``"""
    return f"http://{url_host(config.http.host)}:{config.http.port}"


def startup_table(config: ServerConfig, children: Iterable[Child]) -> list[str]:
    """The lines of the start-up table, from the configuration and the ready processes' heartbeats."""
    children = list(children)
    info: dict[str, Any] = {}
    for child in children:
        if child.spec.role == "worker" and child.spec.index == 0:
            info = child.info
    rows = [("model", ", ".join(config.model.served_model_name)), ("folder", config.model_dir)]
    rows += [(key, str(info[key])) for key in WORKER_ROWS if key in info]
    rows.append(("processes", ", ".join(f"{child.name} ({child.pid})" for child in children)))
    rows.append(("address", base_url(config)))
    return [f"  {label:<16}{value}" for label, value in rows]


def has_chat_template(config: ServerConfig) -> bool:
    """Whether ``/v1/chat/completions`` can work with this model folder."""
    if config.model.chat_template:
        return True
    folder = Path(config.model.tokenizer or config.model_dir)
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def curl_line(config: ServerConfig) -> str:
    """A command that talks to the server just started; ready to paste."""
    model = config.model.served_model_name[0]
    if has_chat_template(config):
        path = "chat/completions"
        question = {"role": "user", "content": "What is the capital of France?"}
        body: dict[str, Any] = {"model": model, "messages": [question], "temperature": 0}
    else:
        path = "completions"
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.http.api_key else ""
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {base_url(config)}/v1/{path} -H 'Content-Type: application/json'{key} -d '{data}'"

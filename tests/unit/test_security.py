"""What the source must not do, and what a model's files or an idle client cannot."""

from __future__ import annotations

import ast
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from common.config import ServerConfig
from common.errors import RequestError
from common.messages import ChatPrompt
from tests.unit.gateway_live import live_gateway
from tests.unit.test_imports import ALLOWED, ROOT, imports, sources
from tests.unit.text_tokenizers import byte_level_json
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.encoder import TextEncoder

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}

EXCEPT = {"worker_proc/kernels/cpu/compile_cache.py"}
"""Numba keeps compiled code pickled, in a folder of mode 0700 that is ours alone."""


def all_sources() -> list[Path]:
    return [path for package in ALLOWED for path in sources(package)]


def test_nothing_of_ours_unpickles_evaluates_or_trusts_code() -> None:
    wrong = []
    for path in all_sources():
        names = {name.split(".")[0] for name in imports(path)} & FORBIDDEN_IMPORTS
        if str(path.relative_to(ROOT)) not in EXCEPT:
            wrong += [f"{path}: imports {name}" for name in names]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                wrong.append(f"{path}:{node.lineno}: {node.func.id}()")
            if ast.unparse(node.func) == "torch.load":
                wrong.append(f"{path}:{node.lineno}: torch.load()")
            for keyword in node.keywords:
                trusted = keyword.arg == "trust_remote_code" and isinstance(keyword.value, ast.Constant)
                if trusted and keyword.value.value:  # type: ignore[attr-defined]
                    wrong.append(f"{path}:{node.lineno}: trust_remote_code whatever the flag says")
    assert not wrong
    assert ServerConfig().model.trust_remote_code is False


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for x in range(99999999999) %}{% endfor %}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(template: str) -> None:
    chat = ChatTemplate({"default": template}, {})
    control = TextEncoder(Tokenizer.from_str(byte_level_json())).control
    with pytest.raises(RequestError):
        chat.render(ChatPrompt(messages=[{"role": "user", "content": "hi"}]), control)


def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.server.KEEP_ALIVE_S", 1)
    with live_gateway() as live:
        connection = live.raw({"messages": [{"role": "user", "content": "hi"}]})
        data = b""
        while chunk := connection.recv(65536):  # the reply, and then the end of the connection
            data += chunk
        assert data.startswith(b"HTTP/1.1 200")
        assert httpx.get(live.url + "/health").status_code == 200

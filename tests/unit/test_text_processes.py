"""The two text processes as processes: quick to start, no torch, messages in and out, a clean end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from common import config as config_file
from common.channels import Channels, Receiver
from common.config import ServerConfig
from common.messages import (
    Abort,
    BeginOutput,
    ChatPrompt,
    Finish,
    Generate,
    Grammar,
    Rejected,
    SamplingParams,
    StopHit,
    TextBatch,
    TextParams,
    TokenBatch,
    Tokenized,
    TokenizerReady,
    TokenRow,
    pack_i32,
    unpack_i32,
)
from tests.unit.text_tokenizers import CHAT_TEMPLATE, byte_level_json, load

pytestmark = pytest.mark.integration
M = TypeVar("M")
LIMIT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


class Fleet:
    """A run directory, the inboxes of everybody else, and the processes started in it."""

    def __init__(self, path: Path) -> None:
        model = path / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"vocab_size": 420, "max_position_embeddings": 128}))
        (model / "tokenizer.json").write_text(byte_level_json())
        about = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
        (model / "tokenizer_config.json").write_text(json.dumps(about))
        self.run_dir = path / "run"
        self.run_dir.mkdir()
        (self.run_dir / "config.json").write_bytes(config_file.save(ServerConfig(model_dir=str(model))))
        self.channels = Channels(self.run_dir)
        self.inboxes = {name: self.channels.receiver(name) for name in ("scheduler", "gateway-0", "supervisor")}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, package: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", package, "--run-dir", str(self.run_dir)]
        process = subprocess.Popen(command, cwd=ROOT)
        self.processes.append(process)
        return process

    def wait_for(self, inbox: str, kind: type[M], accept: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of a kind; others are dropped."""
        receiver: Receiver[Any] = self.inboxes[inbox]
        while receiver.wait(LIMIT_S):
            for message in receiver.receive(1):
                if isinstance(message, kind) and accept(message):
                    return message
        raise AssertionError(f"no {kind.__name__} within {LIMIT_S} s")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.channels.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(LIMIT_S)


def test_the_tokenizer_process_serves_and_ends(fleet: Fleet) -> None:
    process = fleet.start("tokenizer_proc")
    assert fleet.wait_for("gateway-0", TokenizerReady).context_len == 128
    assert fleet.wait_for("scheduler", TokenizerReady).vocab_size == 420
    tokenizer = fleet.channels.sender("tokenizer-0")

    def submit(rid: str, grammar: Grammar | None = None, content: str = "hi") -> None:
        prompt = ChatPrompt(messages=[{"role": "user", "content": content}])
        tokenizer.send(
            Generate(
                rid=rid, gateway="gateway-0", prompt=prompt, sampling=SamplingParams(max_tokens=4), text=TextParams(),
                grammar=grammar,
            )
        )  # fmt: skip

    submit("bad", Grammar(kind="regex", text="("))
    submit("long", content="word " * 200)
    submit("good")
    tokenizer.send(Abort(rid="good", gateway="gateway-0"))
    submit("constrained", Grammar(kind="regex", text="[0-9]+"))
    good = fleet.wait_for("scheduler", Tokenized)
    assert good.rid == "good"
    assert (
        load("byte_level")
        .decode(unpack_i32(good.input_ids).tolist(), skip_special_tokens=False)
        .endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    )
    assert fleet.wait_for("scheduler", Abort).rid == "good"
    assert fleet.wait_for("scheduler", Tokenized).rid == "constrained"
    assert {fleet.wait_for("gateway-0", Rejected).rid for _ in range(2)} == {"bad", "long"}
    assert stop(process) == 0


def test_the_detokenizer_process_serves_and_ends(fleet: Fleet) -> None:
    process = fleet.start("detokenizer_proc")
    detokenizer = fleet.channels.sender("detokenizer")
    ids = load("byte_level").encode("over 🙂 there").ids
    begin = BeginOutput("r", 0, "gateway-0", 3, 0, TextParams(stop=(" there",)))
    detokenizer.send(TokenBatch(scheduler_generation=0, step=0, begins=[begin]))
    for n, token_id in enumerate(ids):
        row = TokenRow("r", 0, n, pack_i32([token_id]))
        detokenizer.send(TokenBatch(scheduler_generation=0, step=n + 1, rows=[row]))
    rows = []
    while not rows or rows[-1].finish is None:
        rows += fleet.wait_for("gateway-0", TextBatch).rows
    assert "".join(row.text for row in rows) == "over 🙂"
    assert rows[-1].finish == Finish("stop", " there")
    assert fleet.wait_for("scheduler", StopHit).rid == "r"
    assert stop(process) == 0


@pytest.mark.parametrize("package", ["tokenizer_proc", "detokenizer_proc"])
def test_the_text_processes_import_neither_torch_nor_transformers(package: str) -> None:
    code = f"import {package}.main, sys; print(*{{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=LIMIT_S, cwd=ROOT).split() == []

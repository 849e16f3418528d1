"""The worker as a process: a tiny float32 model, driven over its channels as the scheduler would."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers as hf

from common import config as config_file
from common.channels import Channels, Receiver, Sender
from common.config import CacheConfig, ModelConfig, ServerConfig, WorkerConfig
from common.errors import ConfigError
from common.messages import (
    BeginRequest,
    ForwardBatch,
    Heartbeat,
    Message,
    Reset,
    RowFlag,
    SamplingParams,
    StepResult,
    WorkerControl,
    WorkerControlReply,
    WorkerReady,
    pack_i32,
    unpack_i32,
)
from tests.integration.tiny_models import greedy_alone, tiny_model
from worker_proc.generic.probe import LayerProbe
from worker_proc.loading import load_worker
from worker_proc.memory import WorkerState
from worker_proc.runner import PackedBatch

pytestmark = pytest.mark.integration

PAGE = 16


@dataclasses.dataclass
class WorkerProcess:
    """A running worker and the channels of its neighbours."""

    process: subprocess.Popen[bytes]
    channels: Channels
    results: Receiver[Any]
    heartbeats: Receiver[Any]
    inbox: Sender

    def next(self, timeout_s: float = 120.0) -> Message:
        """Its next answer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.results.wait(0.1):
                message: Message = self.results.receive(limit=1)[0]
                return message
            if self.process.poll() is not None:
                raise AssertionError(f"the worker ended with {self.process.returncode}")
        raise AssertionError("no answer")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.channels.close()


def start(run_dir: Path, config: ServerConfig, generation: int = 0) -> WorkerProcess:
    (run_dir / "config.json").write_bytes(config_file.save(config))
    channels = Channels(run_dir)
    results, heartbeats = channels.receiver("scheduler-work"), channels.receiver("supervisor")
    command = [sys.executable, "-m", "worker_proc", "--run-dir", str(run_dir), "--generation", str(generation)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"})
    return WorkerProcess(process, channels, results, heartbeats, channels.sender("worker-0"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    return folder


def config_for(folder: Path, **kwargs: Any) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(page_size=PAGE, max_total_tokens=1000),
        worker=WorkerConfig(cpu_threads=1, **kwargs),
        model_dir=str(folder),
    )


@pytest.fixture
def worker(model_dir: Path, tmp_path: Path) -> Iterator[WorkerProcess]:
    one = start(tmp_path, config_for(model_dir))
    yield one
    one.close()


def test_pipelined_steps_give_what_the_model_gives_alone(worker: WorkerProcess, tmp_path: Path) -> None:
    ready = worker.next()
    assert isinstance(ready, WorkerReady)
    assert (ready.epoch, ready.num_pages, ready.page_size, ready.context_len) == (0, 63, PAGE, 512)
    assert (ready.model_path, ready.dtype, ready.device) == ("generic-torch", "float32", "cpu")
    assert ready.kv_bytes_per_token == 3 * 2 * 2 * 12 * 4
    worker.inbox.send(Reset(epoch=7, scheduler_generation=0))
    answer = worker.next()
    assert isinstance(answer, WorkerReady) and answer.epoch == 7

    prompts = [list(range(3, 3 + n)) for n in (1, 5, 16, 33)]
    tokens = 6
    begins, pages = [], iter(range(63))
    for slot, prompt in enumerate(prompts):
        need = -(-(len(prompt) + tokens) // PAGE)
        table = pack_i32([next(pages) for _ in range(need)])
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        begins.append(BeginRequest(slot, f"r{slot}", pack_i32(prompt), len(prompt), 0, table, params))
    slots, none = pack_i32(range(4)), pack_i32([0] * 4)
    lens = pack_i32([len(prompt) for prompt in prompts])
    # Everything is sent before the first result is there; the last step is one too many.
    worker.inbox.send(ForwardBatch(epoch=3, step=0, begins=begins, slots=slots, num_tokens=lens, num_new_pages=none))
    for number in range(tokens + 1):
        batch = ForwardBatch(
            epoch=7, step=number + 1, begins=begins if number == 0 else [], slots=slots,
            num_tokens=lens if number == 0 else none, num_new_pages=none,
        )  # fmt: skip
        assert worker.inbox.send(batch)
    outputs: list[list[int]] = [[] for _ in prompts]
    for number in range(tokens + 1):
        result = worker.next()
        assert isinstance(result, StepResult)
        assert (result.epoch, result.step) == (7, number + 1), "the step of another epoch is dropped"
        if number < tokens:
            for output, token in zip(outputs, unpack_i32(result.ids).tolist(), strict=True):
                output.append(token)
        else:
            assert list(result.flags) == [RowFlag.SKIPPED] * 4
    model = tiny_model("llama")
    assert outputs == [greedy_alone(model, prompt, tokens) for prompt in prompts]

    traces = tmp_path / "traces"
    worker.inbox.send(WorkerControl(request_id="a", action="stop_profile"))
    refused = worker.next()
    assert isinstance(refused, WorkerControlReply) and not refused.ok and "no profile" in refused.message
    worker.inbox.send(WorkerControl(request_id="b", action="start_profile", directory=str(traces)))
    assert worker.next() == WorkerControlReply(request_id="b", ok=True, message=f"profiling into {traces}")
    worker.inbox.send(WorkerControl(request_id="c", action="stop_profile"))
    stopped = worker.next()
    assert isinstance(stopped, WorkerControlReply) and stopped.ok
    assert [str(path) for path in traces.iterdir()] == [stopped.message]

    beats: list[Heartbeat] = []
    deadline = time.monotonic() + 20
    while not (beats and beats[-1].ready) and time.monotonic() < deadline:  # its beats come every half second
        worker.heartbeats.wait(0.1)
        beats += [beat for beat in worker.heartbeats.receive() if isinstance(beat, Heartbeat)]
    assert beats and not beats[0].ready, "it beats while it loads"
    assert beats[-1].ready and beats[-1].info["pages"] == "63 x 16"
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(20) == 0


def test_restarted_worker_has_the_first_ones_pages_dtype_and_path(model_dir: Path) -> None:
    state = WorkerState(path="generic-torch", dtype="bfloat16", num_pages=17, page_size=8)
    loaded = load_worker(config_for(model_dir), 1, state)
    assert (loaded.num_pages, loaded.runner.page_size, loaded.runner.dtype) == (17, 8, "bfloat16")
    assert loaded.runner.name == "generic-torch"
    loaded.runner.close()


def test_fast_path_that_does_not_cover_a_model_falls_back_and_says_why(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker_proc.loading.try_cpu_fast", lambda *_: "heads of 12")
    config = config_for(model_dir)
    config = msgspec.structs.replace(config, model=ModelConfig(dtype="bfloat16"))
    loaded = load_worker(config, 1, None)
    assert loaded.runner.name == "generic-torch"
    assert "the fast CPU path is not used: heads of 12" in caplog.text
    loaded.runner.close()
    forced = msgspec.structs.replace(config, worker=WorkerConfig(worker_path="cpu-fast"))
    with pytest.raises(ConfigError, match="heads of 12; --worker-path generic can"):
        load_worker(forced, 1, None)


def test_dummy_weights_are_a_function_of_the_seed(model_dir: Path) -> None:
    def logits(seed: int) -> list[float]:
        model = ModelConfig(dtype="float32", load_format="dummy", random_seed=seed)
        loaded = load_worker(msgspec.structs.replace(config_for(model_dir), model=model), 1, None)
        ids = np.arange(4, dtype=np.int32)
        ends, table = np.array([0, 4], np.int32), np.zeros((1, 1), np.int32)
        out = loaded.runner.forward(PackedBatch(ids, ids, ends, ends[1:], table, ids[3:]))
        row: list[float] = np.array(out)[0].tolist()
        return row

    first = logits(1)
    assert logits(1) == first
    assert logits(2) != first


def test_unsupported_models_are_refused_before_weights_load(tmp_path: Path) -> None:
    hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="MambaForCausalLM is not supported: it is recurrent"):
        load_worker(config_for(tmp_path), 1, None)


def test_a_strange_mask_is_refused_where_a_layer_uses_it() -> None:
    probe = LayerProbe()
    heads = torch.zeros(1, 2, 3, 4)
    plain = probe.mask(q_length=3, mask_function=lambda b, h, q, k: k <= q)
    strange = probe.mask(q_length=3, mask_function=lambda b, h, q, k: k <= q + 1)
    probe.attention(torch.nn.Identity(), heads, heads, heads, plain)
    with pytest.raises(ConfigError, match=r"Identity \(attention call 1\) is not supported: its attention mask"):
        probe.attention(torch.nn.Identity(), heads, heads, heads, strange)

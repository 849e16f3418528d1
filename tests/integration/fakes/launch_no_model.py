"""launch.py with everything real but the worker: quick to start where the model is not what is tested.

The worker is the scheduler tests' own: it checks that every cell it attends to was written, and its tokens depend on
all that came before, so streams can be compared. A step takes ``STEP_S``, and the request ``POISON`` kills it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import launch
from common.process import ProcessContext, run
from launcher.children import Command, Spec, package_command
from scheduler_proc.fakes import FakeWorker, WorkerCrash
from tests.unit.text_tokenizers import CHAT_TEMPLATE, byte_level_json

STEP_S = 0.004
CONTEXT_LEN = 2048
VOCAB_SIZE = 420
POISON = "poison"
"""rid of a request that ends the worker, as the kernel would end it, where ``POISON_AT`` is computed."""
POISON_AT = 30
ME = Path(__file__)


def make_folder(folder: Path) -> Path:
    """A model folder without a model."""
    folder.mkdir()
    about = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LEN}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "tokenizer.json").write_text(byte_level_json())
    names = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def worker(context: ProcessContext) -> None:
    """Answer the scheduler until told to stop."""
    inbox, results = context.channels.receiver("worker-0"), context.channels.sender("scheduler-work")
    limit = context.config.model.context_length or CONTEXT_LEN
    fake = FakeWorker(
        num_pages=1024, context_len=limit, vocab_size=VOCAB_SIZE, max_slots=128, generation=context.generation,
        poison={POISON: POISON_AT},
    )  # fmt: skip
    results.send(fake.ready())
    turns = 0
    while not context.stopping:
        context.beat(ready=True, progress=turns)
        inbox.wait(0.1)
        for message in inbox.receive(1):
            turns += 1
            time.sleep(STEP_S)
            try:
                answers = fake.handle(message)
            except WorkerCrash:
                os.kill(os.getpid(), signal.SIGKILL)
            for answer in answers:
                results.send(answer)  # type: ignore[arg-type]


def command_for(run_dir: Path) -> Command:
    real = package_command(run_dir)

    def command(spec: Spec, generation: int) -> list[str]:
        if spec.role != "worker":
            return real(spec, generation)
        return [sys.executable, str(ME), "worker", *real(spec, generation)[4:]]

    return command


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        del sys.argv[1]
        sys.exit(run("worker", worker))
    sys.exit(launch.main(command_for=command_for))

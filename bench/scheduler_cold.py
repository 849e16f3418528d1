"""The scheduler's process while a worker computes on the same cores: ``python -m bench.scheduler_step --cold``.

In the server hundreds of megabytes of weights pass through the caches between two turns of the scheduler, so code
and data come from memory each time; a loop that only calls ``Scheduler.step`` shows a tenth of what that takes. Here
the real process runs, with its channels, between others that are played: a worker without a model, whose steps
last ``STEP_S`` and in which a row gives several ids now and then, clients that keep ``rows`` requests of
``OUTPUT_LEN`` tokens going, a gateway. Meanwhile one process per core walks through an array that fits into no cache.

Processor time is what the kernel counted (``schedstat``), ZeroMQ's thread apart. Other work on the machine makes it
larger, so two versions are compared by turns, and the least of several windows is given beside their median.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.children import start, stop
from bench.paced_worker import MAX_DRAFTS, num_drawn
from common import config as config_file
from common.channels import Channels
from common.config import RuntimeConfig, ServerConfig
from common.messages import (
    ForwardBatch,
    GatewayLease,
    Heartbeat,
    Reset,
    SamplingParams,
    StepResult,
    TextParams,
    TokenBatch,
    Tokenized,
    WorkerReady,
    pack_i32,
    unpack_i32,
)
from scheduler_proc.pacing import LATE_S

PAGE, NUM_PAGES, MAX_SLOTS = 16, 4096, 256
STEP_S = 0.03
"""Longer than the longest lead of ``pacing.py``, so that each step has the second turn that it has in the server."""
PROMPT_LEN, OUTPUT_LEN = 40, 64
WALK_BYTES = 64 << 20
_WALK = f"import numpy; a = numpy.zeros({WALK_BYTES // 8}); a += 1\nwhile True: a.sum()"
GATEWAY = "gateway-0"


@dataclass
class Usage:
    """Of the scheduler's process since it started."""

    main_ns: int
    others_ns: int
    """ZeroMQ's threads."""
    sleeps: int
    """Times its main thread waited."""

    @classmethod
    def of(cls, pid: int) -> Usage:
        """As it is now."""
        tasks = {int(task.name): task for task in Path(f"/proc/{pid}/task").iterdir()}
        ns = {tid: int((task / "schedstat").read_text().split()[0]) for tid, task in tasks.items()}
        status = (tasks[pid] / "status").read_text()
        sleeps = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        return cls(ns[pid], sum(ns.values()) - ns[pid], sleeps)


@dataclass
class Others:
    """Worker, detokenizer, gateway, tokenizer, supervisor and clients, in one thread."""

    channels: Channels
    rows: int
    epoch: int = -1
    open: set[str] = field(default_factory=set)
    num_begun: int = 0
    num_steps: int = 0
    num_late: int = 0
    """Steps that the worker had to wait for."""
    turns: int = 0
    """Of the scheduler's loop, as its last heartbeat says."""
    known: dict[int, list[int]] = field(default_factory=dict)
    """Slot -> [ids known, ids computed]."""
    flying: deque[ForwardBatch] = field(default_factory=deque)
    due: float = 0.0
    """When the first of them ends."""
    free: float = 0.0
    """When the last one answered ended."""
    idle_s: float = 0.0
    """How long the worker had had nothing to do when the first of them came."""

    def __post_init__(self) -> None:
        names = ("worker-0", "detokenizer", "tokenizer-0", GATEWAY, "supervisor")
        self.inboxes = [self.channels.receiver(name) for name in names]
        self.to_scheduler = self.channels.sender("scheduler")
        self.results = self.channels.sender("scheduler-work")
        self.results.send(self._ready(0))
        self._lease_at = 0.0
        self._rng = np.random.default_rng(0)

    @staticmethod
    def _ready(epoch: int) -> WorkerReady:
        return WorkerReady(
            epoch=epoch, generation=0, rank=0, num_pages=NUM_PAGES, page_size=PAGE, context_len=2048,
            vocab_size=32000, max_slots=MAX_SLOTS, model_path="none", batch_invariant=True, dtype="none",
            device="none", threads=0, max_drafts=MAX_DRAFTS,
        )  # fmt: skip

    def play(self, seconds: float) -> None:
        """Everyone's part for so long."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            if now >= self._lease_at:
                self._lease_at = now + 1.0
                self.to_scheduler.send(GatewayLease(gateway=GATEWAY, address=self.inboxes[3].address, generation=0))
            while self.epoch > 0 and len(self.open) < self.rows:
                self._begin()
            wait_s = min(end, self._lease_at, self.due if self.flying else end) - now
            # In whole milliseconds, rounded down; a moment too early is slept away.
            if not Channels.wait_any(self.inboxes, max(wait_s, 0.0)) and 0 < wait_s < 0.001:
                time.sleep(wait_s)
            for inbox in self.inboxes:
                for message in inbox.receive():
                    self._take(message)
            if self.flying and time.monotonic() >= self.due:
                self._answer(self.flying.popleft())
                self.free = time.monotonic()
                self.due, self.idle_s = self.free + STEP_S, 0.0

    def _begin(self) -> None:
        rid = f"request-{self.num_begun:06d}"
        self.num_begun += 1
        self.open.add(rid)
        self.to_scheduler.send(
            Tokenized(rid=rid, gateway=GATEWAY, input_ids=pack_i32(self._rng.integers(10, 32000, PROMPT_LEN)),
                      sampling=SamplingParams(max_tokens=OUTPUT_LEN), eos_token_ids=(2,), text=TextParams())
        )  # fmt: skip

    def _take(self, message: object) -> None:
        if isinstance(message, Reset):
            self.epoch = message.epoch
            self.results.send(self._ready(message.epoch))
        elif isinstance(message, ForwardBatch):
            if not self.flying:
                now = time.monotonic()
                self.due, self.idle_s = now + STEP_S, now - self.free
            self.flying.append(message)
        elif isinstance(message, TokenBatch):
            self.open.difference_update(row.rid for row in message.rows if row.finish is not None)
        elif isinstance(message, Heartbeat):
            self.turns = message.progress

    def _answer(self, batch: ForwardBatch) -> None:
        for begin in batch.begins:
            self.known[begin.slot] = [len(begin.ids) // 4, begin.computed_len]
        counts = []
        for slot, chunk in zip(unpack_i32(batch.slots).tolist(), unpack_i32(batch.num_tokens).tolist(), strict=True):
            state = self.known[slot]
            state[1] += chunk or state[0] - state[1]
            samples = state[1] == state[0]
            counts.append(num_drawn(state[0] + slot) if samples and not chunk else int(samples))
            state[0] += counts[-1]
            state[1] += max(counts[-1] - 1, 0)
        ids = self._rng.integers(10, 32000, sum(counts))
        self.num_steps += 1
        self.num_late += self.idle_s > LATE_S
        drafts = [max(n - 1, 0) for n in counts]
        self.results.send(
            StepResult(epoch=batch.epoch, step=batch.step, num_ids=pack_i32(counts), ids=pack_i32(ids),
                       flags=bytes(len(counts)), num_drafts=pack_i32(drafts) if any(drafts) else b"",
                       started=time.time(), forward_s=STEP_S, idle_s=self.idle_s)
        )  # fmt: skip


@contextmanager
def busy_cores() -> Iterator[None]:
    """Somebody walks through memory on each core."""
    cores = sorted(os.sched_getaffinity(0))
    walkers = [subprocess.Popen([sys.executable, "-c", _WALK]) for _ in cores]
    try:
        for core, walker in zip(cores, walkers, strict=True):
            os.sched_setaffinity(walker.pid, {core})
        yield
    finally:
        for walker in walkers:
            walker.send_signal(signal.SIGKILL)
            walker.wait()


def measure_cold(rows: int, windows: int, seconds: float, trace: bool) -> dict[str, float]:
    """Per step: milliseconds of a core, turns of the loop, waits of its thread, steps that came late."""
    with tempfile.TemporaryDirectory(prefix="qt-bench-") as folder:
        run_dir = Path(folder)
        runtime = RuntimeConfig(log_level="warning", trace=str(run_dir / "trace") if trace else "")
        (run_dir / "config.json").write_bytes(config_file.save(ServerConfig(runtime=runtime)))
        channels = Channels(run_dir)
        others = Others(channels, rows)
        child = start("scheduler_proc", "--run-dir", folder)
        samples = []
        try:
            with busy_cores():
                others.play(4.0)
                for _ in range(windows):
                    before, steps, turns = Usage.of(child.pid), others.num_steps, others.turns
                    others.num_late = 0
                    others.play(seconds)
                    after, num = Usage.of(child.pid), max(others.num_steps - steps, 1)
                    samples.append((
                        (after.main_ns - before.main_ns) / num / 1e6,
                        (after.others_ns - before.others_ns) / num / 1e6,
                        (others.turns - turns) / num,
                        (after.sleeps - before.sleeps) / num,
                        others.num_late / num,
                    ))  # fmt: skip
        finally:
            stop(child)
            channels.close()
    out = {"steps_per_s": num / seconds}
    for i, name in enumerate(("main_ms", "zmq_ms", "turns", "sleeps", "late")):
        values = [sample[i] for sample in samples]
        out |= {f"{name}_median": statistics.median(values), f"{name}_least": min(values)}
    return out

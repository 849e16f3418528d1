"""Requests and step costs from files: a recorded trace of this server, or JSON lines.

A JSON line has ``input_length`` and ``output_length`` (or ``prompt_len`` and ``output_len``), a
``timestamp`` in milliseconds (or ``time`` in seconds), and where known what is shared:
``hash_ids``, names of blocks of 512 tokens as in the public Mooncake traces, or ``prefix`` and
``prefix_len``; further ``user`` and ``priority``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.messages import Tokenized, WorkerReady
from common.trace import AnyRecord, SchedulerStep
from tools.replay.reader import read_run
from tools.replay.rows import SlotReader, StepDone
from tools.simulate.cost import CostModel, fit
from tools.simulate.worker import StepLoad
from tools.simulate.workload import SimRequest, Workload, WorkloadSpec

HASH_BLOCK = 512


def load(path: Path, spec: WorkloadSpec) -> Workload:
    """The requests of a file (JSON lines) or folder (a recorded trace), at most ``spec.num_requests``.

    Raises ConfigError naming the line at fault.
    """
    requests = _recorded(path) if path.is_dir() else _json_lines(path, spec)
    if not requests:
        raise ConfigError(f"--trace-file {path}: holds no requests")
    requests.sort(key=lambda request: request.time)
    first = requests[0].time
    for request in requests:
        request.time -= first
    return Workload(spec, requests[: spec.num_requests])


def _json_lines(path: Path, spec: WorkloadSpec) -> list[SimRequest]:
    requests = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--trace-file {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_json_request(json.loads(line), f"t{number}", spec))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"--trace-file {path}, line {number}: {error!r}") from None
    return requests


def _json_request(entry: dict[str, Any], rid: str, spec: WorkloadSpec) -> SimRequest:
    prompt_len = int(entry["prompt_len"] if "prompt_len" in entry else entry["input_length"])
    output_len = int(entry["output_len"] if "output_len" in entry else entry["output_length"])
    if prompt_len < 1 or output_len < 1:
        raise ValueError(f"lengths must be at least 1, not {prompt_len} and {output_len}")
    output_len = min(output_len, spec.context_len // 2)
    prompt_len = min(prompt_len, spec.context_len - output_len)
    blocks = tuple(int(name) for name in entry.get("hash_ids", ()))
    prefix_len = prompt_len if blocks else min(int(entry.get("prefix_len", 0)), prompt_len - 1)
    return SimRequest(
        rid=rid,
        time=float(entry["time"]) if "time" in entry else float(entry.get("timestamp", 0)) / 1e3,
        output_len=output_len,
        max_tokens=min(int(entry.get("max_tokens", output_len)), spec.context_len - prompt_len),
        user=int(entry.get("user", 0)),
        priority=int(entry.get("priority", 0)),
        prefix=int(entry.get("prefix", -1)),
        prefix_len=prefix_len,
        own_len=prompt_len - prefix_len,
        blocks=blocks,
        block_len=HASH_BLOCK,
    )


def scheduler_records(folder: Path) -> list[AnyRecord]:
    """Everything the schedulers of a run recorded, in order."""
    return [record for s in read_run(folder) if s.start.role == "scheduler" for record in s.records]


def page_size_of(records: list[AnyRecord]) -> int:
    """As the worker announced it; 16 when the trace begins later."""
    for record in records:
        if isinstance(record, SchedulerStep):
            for message in record.messages:
                if isinstance(message, WorkerReady):
                    return message.page_size
    return 16


def _recorded(folder: Path) -> list[SimRequest]:
    records = scheduler_records(folder)
    lengths: Counter[str] = Counter()
    for step in SlotReader(page_size_of(records)).steps(records):
        for row in step.rows:
            lengths[row.rid] += len(row.ids)
    requests: dict[str, SimRequest] = {}
    for record in records:
        if not isinstance(record, SchedulerStep):
            continue
        for message in record.messages:
            if isinstance(message, Tokenized) and message.rid not in requests:
                requests[message.rid] = SimRequest(
                    rid=message.rid,
                    time=message.received or record.now,
                    output_len=max(lengths[message.rid], 1),
                    max_tokens=message.sampling.max_tokens or 1,
                    user=0,
                    priority=message.priority,
                    ids=np.frombuffer(message.input_ids, dtype="<i4"),
                )
    return list(requests.values())


def load_of(step: StepDone) -> StepLoad:
    """What a recorded step had to do."""
    ran = [row for row in step.rows if row.num_tokens]
    return StepLoad(
        sum(row.chunk for row in ran),
        sum(not row.chunk for row in ran),
        sum(row.start + row.num_tokens for row in ran),
    )


def fit_cost(folder: Path) -> tuple[CostModel, float, int]:
    """The cost model of a recorded run: (model, R squared, steps used). Raises ConfigError."""
    records = scheduler_records(folder)
    # A batch that only ends requests computes nothing; its microseconds would outweigh every real step.
    steps = [step for step in SlotReader(page_size_of(records)).steps(records) if any(r.num_tokens for r in step.rows)]
    seconds = [step.result.forward_s + step.result.sample_s for step in steps]
    model, quality = fit([load_of(step) for step in steps], seconds)
    return model, quality, len(steps)

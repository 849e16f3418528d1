"""At start-up: does a runner give the logits that transformers gives? Checked by running both.

Rules cannot know what every architecture does. Two short sequences run through transformers whole
and alone, and through the runner packed together, in three steps (two chunks, one decode), over shuffled
pages. A state that
is not in the pages, a position that depends on the batch, or a bias that was missed shows as
different logits. Only transformers' side needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_proc.runner import ModelRunner, PackedBatch

TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 1.2e-1}
"""Largest accepted relative error |a - b| / |b| of a row of logits: median row for 16-bit types, where one token
routed to another expert may differ by itself, worst row for float32. A wrong bias or position gives 0.3 and more."""
FP8_TOLERANCE = 1.2e-1
"""The same with an fp8 KV pool, median row for every dtype: keys and values then have three bits of mantissa."""
CHECK_LENS = (11, 22)
"""Neither a multiple of a page; the second is longer than a page of 16."""
NUM_CHECK_PAGES = 8


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of :func:`compare`."""

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """The runner's logits are the model's, as far as its dtype can tell."""
        return self.error <= self.tolerance


def check_prompts(vocab_size: int) -> list[NDArray[np.int32]]:
    """The check's token ids: fixed, spread over the vocabulary."""
    rng = np.random.default_rng(20)
    return [rng.integers(0, vocab_size, size=n, dtype=np.int32) for n in CHECK_LENS]


def reference_logits(model: Any) -> list[NDArray[np.float32]]:
    """Transformers' own logits [n, vocab] of the check prompts, each alone; resets the model's attention to eager."""
    import torch

    model.set_attn_implementation("eager")
    out = []
    with torch.inference_mode():
        for ids in check_prompts(model.get_input_embeddings().num_embeddings):
            batch = torch.from_numpy(ids.astype(np.int64)).to(model.device)[None]
            out.append(model(input_ids=batch, use_cache=False).logits[0].float().cpu().numpy())
    return out


def runner_logits(runner: ModelRunner, num_embeddings: int) -> list[NDArray[np.float32]]:
    """The runner's logits of the check prompts: packed, in three steps. Overwrites the pool's first pages."""
    prompts = check_prompts(num_embeddings)
    num_pages = [-(-len(ids) // runner.page_size) for ids in prompts]
    order = np.random.default_rng(21).permutation(max(NUM_CHECK_PAGES, sum(num_pages))).astype(np.int32)
    table = np.zeros((len(prompts), max(num_pages)), np.int32)
    for s, count in enumerate(num_pages):
        table[s, :count], order = order[:count], order[count:]
    parts: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
    stops = [[0, len(ids) * 2 // 3, len(ids) - 1, len(ids)] for ids in prompts]
    for begins, ends in pairwise(zip(*stops, strict=True)):
        lens = [e - b for b, e in zip(begins, ends, strict=True)]
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        logits = runner.forward(
            PackedBatch(
                ids=np.concatenate([ids[b:e] for ids, b, e in zip(prompts, begins, ends, strict=True)]),
                positions=np.concatenate([np.arange(b, e, dtype=np.int32) for b, e in zip(begins, ends, strict=True)]),
                query_start=starts,
                context_lens=np.array(ends, np.int32),
                page_table=table,
                logit_rows=np.arange(starts[-1], dtype=np.int32),
            )
        )
        rows = np.array(logits if isinstance(logits, np.ndarray) else logits.cpu())
        for s in range(len(prompts)):
            parts[s].append(rows[starts[s] : starts[s + 1]])
    return [np.concatenate(part) for part in parts]


def compare(
    runner: ModelRunner, reference: list[NDArray[np.float32]], num_embeddings: int, tolerance: float | None = None
) -> CheckResult:
    """Relative error of the runner's logits against :func:`reference_logits`. Needs NUM_CHECK_PAGES pages.

    ``tolerance``: of the median row; None: by the runner's dtype, see :data:`TOLERANCE`.
    """
    ours = np.concatenate(runner_logits(runner, num_embeddings))
    theirs = np.concatenate(reference)[:, : ours.shape[1]]
    finite = np.isfinite(theirs)
    difference = np.where(finite, ours - theirs, 0.0)
    norms = np.linalg.norm(np.where(finite, theirs, 0.0), axis=1)
    errors = np.linalg.norm(difference, axis=1) / np.maximum(norms, 1e-30)
    worst = runner.dtype == "float32" and tolerance is None
    error = float(np.max(errors) if worst else np.median(errors))
    accepted = TOLERANCE.get(runner.dtype, 1.2e-1) if tolerance is None else tolerance
    return CheckResult(error if np.isfinite(error) else float("inf"), accepted)

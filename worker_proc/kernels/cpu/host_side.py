"""What the calling thread does right before and after a step, compiled.

Weights pass through the caches in between, so each call of NumPy would come from memory: ten small ones take
a tenth of a millisecond there, and the other threads wait for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from worker_proc.kernels.cpu import compile_cache
from worker_proc.runner import PackedBatch

_ROW = types.Array(types.int32, 1, "C")
_TABLE = types.Array(types.int32, 2, "C")
_LOGITS = types.Array(types.float32, 2, "C")
_INT = types.int64


def _check_batch(
    ids: Any, positions: Any, starts: Any, contexts: Any, table: Any, logit_rows: Any, vocab: int, max_positions: int,
    num_pages: int, page_size: int,
) -> int:  # fmt: skip
    """The highest page of a ``PackedBatch``'s arrays; -1 where something is out of range or does not fit together."""
    num_tokens, num_seqs = ids.size, contexts.size
    if num_tokens == 0 or positions.size != num_tokens or table.shape[0] != num_seqs or starts.size != num_seqs + 1:
        return -1
    if starts[0] != 0 or starts[num_seqs] != num_tokens:
        return -1
    fits = True
    for token in range(num_tokens):
        fits &= 0 <= ids[token] < vocab and 0 <= positions[token] < max_positions
    for row in logit_rows:
        fits &= 0 <= row < num_tokens
    for seq in range(num_seqs):
        end = starts[seq + 1]
        if end <= starts[seq] or end > num_tokens:
            return -1
        fits &= positions[end - 1] + 1 == contexts[seq] and contexts[seq] <= table.shape[1] * page_size
    highest = -1
    for seq in range(num_seqs):
        for page in table[seq]:
            fits &= 0 <= page < num_pages
            highest = max(highest, page)
    return highest if fits else -1


def what_is_wrong(batch: PackedBatch, vocab_size: int, max_positions: int, num_pages: int, page_size: int) -> str:
    """Words for a batch that ``check_batch`` refuses."""
    limits = (
        ("token id", batch.ids, vocab_size),
        ("position", batch.positions, max_positions),
        ("page id", batch.page_table, num_pages),
        ("logit row", batch.logit_rows, len(batch.ids)),
    )
    for what, values, limit in limits:
        if values.size and (int(values.min()) < 0 or int(values.max()) >= limit):
            return f"{what} {int(values.min())}..{int(values.max())} outside 0..{limit - 1}"
    starts, contexts = batch.query_start, batch.context_lens
    if len(starts) != len(contexts) + 1 or int(starts[0]) or int(starts[-1]) != len(batch.ids) or not len(batch.ids):
        return f"query_start {starts.tolist()} does not cover {len(batch.ids)} tokens"
    if batch.page_table.shape[0] != len(contexts) or len(batch.positions) != len(batch.ids):
        return "page_table needs a row per sequence and positions an entry per token"
    if int(contexts.max()) > batch.page_table.shape[1] * page_size:
        return f"context {int(contexts.max())} exceeds {batch.page_table.shape[1]} pages"
    return "a sequence's last position must be context_len - 1, and each needs a token"


def _find_largest(logits: Any, rows: Any, vocab: int, peaks: int, tokens: Any, largest: Any) -> None:
    """Fill ``tokens`` and ``largest`` [n]: see ``ArgmaxRunner``. In a row of ``logits`` [R, ...] the largest of each 32
    begin at column ``peaks``; those of the last few, if ``vocab`` is no multiple of 32, count padding too."""
    for i in range(rows.size):
        row = rows[i]
        block, best = 0, np.float32(-np.inf)
        for number in range(vocab // 32):
            peak = logits[row, peaks + number]
            if not peak <= best:
                block, best = number, peak
                if peak != peak:
                    break
        token = 32 * block
        while token < vocab - 1 and not (logits[row, token] == best or logits[row, token] != logits[row, token]):
            token += 1
        if best == best:
            for rest in range(vocab // 32 * 32, vocab):
                if not logits[row, rest] <= best:
                    token, best = rest, logits[row, rest]
                    if best != best:
                        break
        tokens[i], largest[i] = token, best


def _compiled(function: Any, *signature: Any) -> Any:
    compiled = njit(nogil=True)(function)
    compile_cache.attach(compiled, function.__name__.strip("_"), "any")
    compiled.compile(signature)
    return compiled


class HostSide:
    """Both functions, loaded or compiled when this is made."""

    def __init__(self) -> None:
        self.check_batch = _compiled(_check_batch, _ROW, _ROW, _ROW, _ROW, _TABLE, _ROW, _INT, _INT, _INT, _INT)
        floats = types.Array(types.float32, 1, "C")
        self.find_largest = _compiled(_find_largest, _LOGITS, _ROW, _INT, _INT, _ROW, floats)

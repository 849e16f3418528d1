"""What changes the logits before a choice: penalties, grammar masks, then single entries (biases, banned ids).

The order is that of ``SampleRequest``. A mask after a bias and a ban gives what it gives before: -inf stays.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOGIT_ROW, INVERSE_TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, UNIFORM, GREEDY, COUNTS_ROW, MASK_ROW, REPETITION, PRESENCE, \
    FREQUENCY, NUM_PARAMETERS = (tl.constexpr(i) for i in range(13))  # fmt: skip
"""Columns of the parameters, float64 [R, NUM_PARAMETERS]: float64 holds every one of them exactly."""
SEEN = tl.constexpr(1 << 30)
BLOCK = 4096


@triton.jit
def _count(tokens, places, counts, num_ids, vocab_size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_ids
    place = tl.load(places + at, mask=live, other=0)
    cell = counts + (place // 2).to(tl.int64) * vocab_size + tl.load(tokens + at, mask=live, other=0)
    tl.atomic_or(cell, SEEN, mask=live)
    tl.atomic_add(cell, 1, mask=live & (place % 2 == 1))


@triton.jit
def _adjust(logits, parameters, counts, masks, work, has_nan, stride_logits, vocab_size, num_words,
            COUNTS: tl.constexpr, MASKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < vocab_size
    own = parameters + row * NUM_PARAMETERS
    x = tl.load(logits + tl.load(own + LOGIT_ROW).to(tl.int64) * stride_logits + at, mask=live, other=0.0)
    x = x.to(tl.float32)
    if tl.max((x != x).to(tl.int32), 0) > 0:
        tl.store(has_nan + row, 1)
    if COUNTS:
        counts_row = tl.load(own + COUNTS_ROW).to(tl.int64)
        if counts_row >= 0:
            count = tl.load(counts + counts_row * vocab_size + at, mask=live, other=0)
            repetition = tl.load(own + REPETITION).to(tl.float32)
            x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
            number = count % SEEN
            presence, frequency = tl.load(own + PRESENCE).to(tl.float32), tl.load(own + FREQUENCY).to(tl.float32)
            x = x - tl.where(number > 0, presence + frequency * number.to(tl.float32), 0.0)
    if MASKS:
        mask_row = tl.load(own + MASK_ROW).to(tl.int64)
        if mask_row >= 0:
            words = tl.load(masks + mask_row * num_words + at // 32, mask=live & (at // 32 < num_words), other=0)
            x = tl.where((words >> (at % 32)) & 1 == 1, x, float("-inf"))
    tl.store(work + row * vocab_size + at, x, mask=live)


@triton.jit
def _change(rows, tokens, values, work, num_entries, vocab_size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_entries
    token = tl.load(tokens + at, mask=live, other=0)
    cell = work + tl.load(rows + at, mask=live, other=0).to(tl.int64) * vocab_size + token
    value = tl.load(values + at, mask=live, other=0.0)
    old = tl.load(cell, mask=live, other=0.0)
    tl.store(cell, tl.where(value == float("-inf"), value, old + value), mask=live)


def count_ids(tokens: Tensor, places: Tensor, num_rows: int, vocab_size: int) -> Tensor:
    """int32 [num_rows, V]: how often each id is an output, and bit 30 if it is a prompt or output id at all.

    ``tokens`` int32 [N]; ``places`` int32 [N]: 2 * row, plus 1 for an output id.
    """
    counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=tokens.device)
    _count[(triton.cdiv(tokens.numel(), 1024),)](tokens, places, counts, tokens.numel(), vocab_size, BLOCK=1024)
    return counts


def adjust(
    logits: Tensor, parameters: Tensor, counts: Tensor | None, masks: Tensor | None, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """(work float32 [R, V], has_nan int32 [R]): the rows' logits with penalties and masks applied.

    ``logits`` [N, V]; ``masks`` int32 [M, words], bit b of word w allows id 32 * w + b; ids past it are forbidden.
    """
    num_rows, vocab_size = parameters.shape[0], logits.shape[1]
    work = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    has_nan = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    _adjust[(num_rows, triton.cdiv(vocab_size, block))](
        logits, parameters, has_nan if counts is None else counts, has_nan if masks is None else masks, work, has_nan,
        logits.stride(0), vocab_size, 0 if masks is None else masks.shape[1], COUNTS=counts is not None,
        MASKS=masks is not None, BLOCK=block,
    )  # fmt: skip
    return work, has_nan


def change_entries(work: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add float32 ``values`` [E] to ``work`` at (row, token), each pair at most once; -inf replaces."""
    _change[(triton.cdiv(rows.numel(), 1024),)](
        rows, tokens, values, work, rows.numel(), work.shape[1], BLOCK=1024
    )  # fmt: skip

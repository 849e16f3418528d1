"""Where a segment's K and V lie, and those of the segment that a thread attends to next.

A thread's scratch has lists of block addresses: of the K and the V that it works on, and of the next K, which it asks
for meanwhile.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from worker_proc.kernels.cpu.kernels import jit
from worker_proc.kernels.cpu.layout import (
    BLOCK_LISTS,
    BLOCK_TOKENS,
    ITEM_FIELDS,
    ITEM_FIRST,
    ITEM_SEGMENT,
    ITEM_SEQ,
    NUM_ITEMS,
    SEGMENT_BLOCKS,
    SEGMENT_TOKENS,
    WHOLE,
)
from worker_proc.kernels.cpu.rowwise import block_address
from worker_proc.kernels.cpu.scalar import i32_pointer, i64_pointer

K, V, AHEAD = range(BLOCK_LISTS)
"""The lists; V's and the next K's are neighbours, which the tiles rely on (``tiles.make_vector_weigh``)."""


@jit
def first_visible(position: int, window: int) -> int:
    """The first position a token sees."""
    return max(0, position + 1 - window) if window > 0 else 0


@jit
def num_blocks(reach: int) -> int:
    """Blocks of the first ``reach`` tokens of a segment (not more than it has; 0 if negative)."""
    return max(0, (min(SEGMENT_TOKENS, reach) + BLOCK_TOKENS - 1) // BLOCK_TOKENS)


@jit
def find_keys(seq: int, number: int, count: int, head: int, model: Any, layer: Any, step: Any, keys: Any) -> None:
    """Addresses of a segment's first ``count`` K blocks."""
    pages = carray(i32_pointer(step.page_table), (step.num_seqs, step.table_width))
    for b in range(count):
        position = number * SEGMENT_TOKENS + b * BLOCK_TOKENS
        page = pages[seq, position // model.page_size]
        keys[b] = block_address(layer.kv, page, position % model.page_size, head, model)


@jit
def find_blocks(seq: int, number: int, count: int, head: int, model: Any, layer: Any, step: Any, blocks: Any) -> None:
    """Addresses of a segment's K blocks and V blocks."""
    find_keys(seq, number, count, head, model, layer, step, blocks[K])
    for b in range(count):
        blocks[V, b] = blocks[K, b] + model.page_bytes // 2


@jit
def segment_ahead(seq: int, number: int, last: int, head: int, model: Any, layer: Any, step: Any, own: Any) -> Any:
    """Addresses of a segment's K blocks up to position ``last`` into the list ``AHEAD``; how many."""
    count = num_blocks(last + 1 - number * SEGMENT_TOKENS)
    lists = carray(i64_pointer(own.blocks), (BLOCK_LISTS, SEGMENT_BLOCKS))
    find_keys(seq, number, count, head, model, layer, step, lists[AHEAD])
    return count


@jit
def work_ahead(work: int, model: Any, layer: Any, step: Any, own: Any) -> Any:
    """The same of the first segment that a piece of work attends to, if there is such a piece."""
    counts = carray(i32_pointer(step.counts), (2,))
    items = carray(i32_pointer(step.items), (step.num_tokens + step.partial_rows, ITEM_FIELDS))
    positions = carray(i32_pointer(step.positions), (step.num_tokens,))
    if work >= counts[NUM_ITEMS] * model.num_kv_heads:
        return 0
    item, head = items[work // model.num_kv_heads], work % model.num_kv_heads
    token, number = item[ITEM_FIRST], item[ITEM_SEGMENT]
    if number == WHOLE:
        number = first_visible(positions[token], layer.window) // SEGMENT_TOKENS
    else:
        token = carray(i32_pointer(step.split_tokens), (step.num_tokens,))[token]
    return segment_ahead(item[ITEM_SEQ], number, positions[token], head, model, layer, step, own)

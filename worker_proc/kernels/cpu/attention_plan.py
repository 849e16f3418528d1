"""Cut a step's attention into items, once per step, for all layers.

Two ways to attend, with identical bits (both join segments in position order):

whole   a run of up to 32 query rows of one sequence walks over its context. For prefill.
split   the few tokens of a decoding sequence attend to one 128-token segment; partial results are
        stored and joined in a second phase. A single row's context is thus shared by all threads,
        and **sequences whose pages in a segment are the same ones are one item**: a shared prefix is
        read once for all of them. (The idea is cascade inference's, Ye et al. 2024.)

For the second, sequences are ordered by their page tables, so that those with a common prefix are
neighbours. Sharing is by whole segments; what is shared beyond the last whole one is read per row.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from worker_proc.kernels.cpu.kernels import jit
from worker_proc.kernels.cpu.layout import (
    ITEM_COUNT,
    ITEM_FIELDS,
    ITEM_FIRST,
    ITEM_ROWS,
    ITEM_SEGMENT,
    ITEM_SEQ,
    NUM_ITEMS,
    NUM_SPLIT_TOKENS,
    SEGMENT_TOKENS,
    WHOLE,
)
from worker_proc.kernels.cpu.scalar import i32_pointer


@jit
def num_segments(context_len: int) -> Any:
    """Segments a context reaches into."""
    return (context_len + SEGMENT_TOKENS - 1) // SEGMENT_TOKENS


@jit
def tokens_per_item(model: Any) -> Any:
    """Query tokens whose heads of one group fit into an item's rows."""
    return max(1, ITEM_ROWS // (model.num_heads // model.num_kv_heads))


@jit
def same_pages(pages: Any, a: int, b: int, first: int, count: int) -> bool:
    """Whether two sequences have the same pages at these places of their tables."""
    different = 0
    for i in range(first, first + count):
        if pages[a, i] != pages[b, i]:
            different += 1
    return different == 0


@jit
def before(pages: Any, contexts: Any, a: int, b: int, stride: int) -> bool:
    """Order of two sequences by the first page of each segment, then by length."""
    common = min(num_segments(contexts[a]), num_segments(contexts[b]))
    for i in range(common):
        if pages[a, i * stride] != pages[b, i * stride]:
            return bool(pages[a, i * stride] < pages[b, i * stride])
    return bool(contexts[a] < contexts[b])


@jit
def put_item(items: Any, index: int, first: int, count: int, seq: int, segment: int) -> int:
    """Write one item; the next index."""
    items[index, ITEM_FIRST] = first
    items[index, ITEM_COUNT] = count
    items[index, ITEM_SEQ] = seq
    items[index, ITEM_SEGMENT] = segment
    return index + 1


@jit
def insert_ordered(order: Any, length: int, seq: int, pages: Any, contexts: Any, stride: int) -> None:
    """Insertion sort step: put ``seq`` into ``order[:length]``. Batches come nearly in order."""
    at = length
    while at > 0 and before(pages, contexts, seq, order[at - 1], stride):
        order[at] = order[at - 1]
        at -= 1
    order[at] = seq


@jit
def whole_items(items: Any, index: int, first: int, count: int, seq: int, per_item: int) -> int:
    """Items for a sequence that attends over its whole context; the next index."""
    for at in range(0, count, per_item):
        index = put_item(items, index, first + at, min(per_item, count - at), seq, WHOLE)
    return index


@jit
def split_run(
    order: Any, start: Any, num_split: int, i: int, segment: int, per_item: int, pages: Any, complete: Any, stride: int
) -> int:
    """End of the run of sequences from ``i`` on that share segment ``segment``'s pages with it.

    ``complete[seq]``: segments that lie wholly before the sequence's tokens of this step.
    """
    j = i + 1
    if complete[order[i]] <= segment:
        return j
    while j < num_split and complete[order[j]] > segment and start[j + 1] - start[i] <= per_item:
        if not same_pages(pages, order[i], order[j], segment * stride, stride):
            break
        j += 1
    return j


@jit
def plan_attention(model: Any, step: Any) -> None:
    """Fill the step's ``seq_of``, ``items``, ``counts`` and split lists (see ``layout.STEP``)."""
    num_seqs = step.num_seqs
    starts = carray(i32_pointer(step.query_start), (num_seqs + 1,))
    contexts = carray(i32_pointer(step.context_lens), (num_seqs,))
    pages = carray(i32_pointer(step.page_table), (num_seqs, step.table_width))
    items = carray(i32_pointer(step.items), (step.num_tokens + step.partial_rows, ITEM_FIELDS))
    counts = carray(i32_pointer(step.counts), (2,))
    order = carray(i32_pointer(step.split_order), (num_seqs,))
    start = carray(i32_pointer(step.split_start), (2 * num_seqs + 1,))
    complete = start[num_seqs + 1 :]
    tokens = carray(i32_pointer(step.split_tokens), (step.num_tokens,))
    base = carray(i32_pointer(step.split_base), (step.num_tokens,))
    seq_of = carray(i32_pointer(step.seq_of), (step.num_tokens,))
    per_item = tokens_per_item(model)
    stride = SEGMENT_TOKENS // model.page_size

    index, num_split, slots = 0, 0, 0
    for seq in range(num_seqs):
        count = starts[seq + 1] - starts[seq]
        for token in range(starts[seq], starts[seq + 1]):
            seq_of[token] = seq
        needed = count * num_segments(contexts[seq])
        complete_segments = (contexts[seq] - count) // SEGMENT_TOKENS
        if count <= per_item and slots + needed <= step.partial_rows:
            complete[seq] = complete_segments
            insert_ordered(order, num_split, seq, pages, contexts, stride)
            num_split += 1
            slots += needed
        else:
            index = whole_items(items, index, starts[seq], count, seq, per_item)

    start[0] = 0
    slots, most = 0, 0
    for i in range(num_split):
        seq = order[i]
        start[i + 1] = start[i] + starts[seq + 1] - starts[seq]
        segments = num_segments(contexts[seq])
        most = max(most, segments)
        for k in range(starts[seq + 1] - starts[seq]):
            tokens[start[i] + k] = starts[seq] + k
            base[start[i] + k] = slots
            slots += segments
    for segment in range(most):
        i = 0
        while i < num_split:
            if num_segments(contexts[order[i]]) <= segment:
                i += 1
                continue
            j = split_run(order, start, num_split, i, segment, per_item, pages, complete, stride)
            index = put_item(items, index, start[i], start[j] - start[i], order[i], segment)
            i = j
    counts[NUM_ITEMS] = index
    counts[NUM_SPLIT_TOKENS] = start[num_split]

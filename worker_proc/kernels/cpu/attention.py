"""Paged attention: ragged prefill, chunks on a cached prefix, and decoding, in one set of loops.

The rows of an item are its tokens times the G query heads of one kv head (grouped-query attention:
they share K and V). The context is taken in segments of 128 tokens **by absolute position**:

    scores = q @ K        tiles over column blocks of 16 tokens
    p      = softmax      activations, with the segment's own maximum and sum
    o      = p @ V        tiles over blocks of 16 tokens
    join the segment's (maximum, sum, o) to the row's running one, in position order

A row's bits depend on its own tokens alone: tiles compute rows independently, masked columns add
exact zeros, and segments never depend on where a chunk began or who else is in the item.

Limits: decoding reads ``2 * head_pad * 2`` bytes per token and kv head once (G rows share it, and
sequences with the same pages too); prefill does 4 * head_pad multiply-adds per row and token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from worker_proc.kernels.cpu.attention_pages import (
    AHEAD,
    find_blocks,
    first_visible,
    segment_ahead,
    work_ahead,
)
from worker_proc.kernels.cpu.attention_plan import num_segments
from worker_proc.kernels.cpu.epilogue import MASKED
from worker_proc.kernels.cpu.kernels import KernelSet, jit
from worker_proc.kernels.cpu.layout import (
    BLOCK_LISTS,
    BLOCK_TOKENS,
    ITEM_COUNT,
    ITEM_FIELDS,
    ITEM_FIRST,
    ITEM_ROWS,
    ITEM_SEGMENT,
    ITEM_SEQ,
    NUM_ITEMS,
    NUM_SPLIT_TOKENS,
    SEGMENT_BLOCKS,
    SEGMENT_TOKENS,
    STATE_FLOATS,
    WHOLE,
)
from worker_proc.kernels.cpu.scalar import f32_pointer, i32_pointer, i64_pointer
from worker_proc.kernels.cpu.team import next_item
from worker_proc.kernels.cpu.tiles import PAIR_BYTES, STEP_BYTES, V_COLUMN_BYTES

SCORE_ROW = SEGMENT_TOKENS * 4


@jit
def copy_rows(source: int, target: int, count: int) -> None:
    """Copy ``count`` 64-byte lines."""
    a, b = carray(i64_pointer(source), (count * 8,)), carray(i64_pointer(target), (count * 8,))
    for i in range(count * 8):
        b[i] = a[i]


@jit
def gather_queries(tokens: Any, count: int, head: int, group: int, model: Any, step: Any, q: int) -> None:
    """Queries of the item's tokens for one kv head, rows next to each other."""
    width = group * model.head_pad * model.activation_bytes
    for t in range(count):
        copy_rows(step.q + tokens[t] * step.q_stride + head * width, q + t * width, width // 64)


@jit
def reset_running(state: int, o: int, rows: int, head_pad: int) -> None:
    """Empty running rows."""
    states = carray(f32_pointer(state), (rows, 2))
    outputs = carray(f32_pointer(o), (rows * head_pad,))
    for r in range(rows):
        states[r, 0] = np.float32(MASKED)
        states[r, 1] = np.float32(0)
    for i in range(rows * head_pad):
        outputs[i] = np.float32(0)


def make_segment(kernels: KernelSet) -> Any:
    """``segment(...)``: one segment for an item's rows; leaves (state, o) in scratch.

    Scattered pages defeat the hardware's prefetching, so while it computes it asks for this segment's V, and for the
    K of the segment that the thread attends to next: ``num_ahead`` blocks, addresses in ``blocks[AHEAD]``. With
    ``Isa.asks_for_pages`` the tiles do it as they multiply: V's lines with the scores, those of the next K with the
    sums over V. Else it is asked for in bursts, into L2; then ``fresh`` is false where V is there already.
    """
    qk_rows, weigh_rows, prefetch_lines = kernels.qk_rows, kernels.weigh_rows, kernels.prefetch_lines
    score_peak, score_powers = kernels.score_peak, kernels.score_powers
    activation_bytes, streams = kernels.isa.activation_bytes, kernels.isa.asks_for_pages
    p_row = SEGMENT_TOKENS * activation_bytes

    @kernels.jit
    def score(
        rows: int, count: int, head_pad: int, q: int, blocks: Any, scores: int, fresh: bool,
        num_ahead: int,
    ) -> None:  # fmt: skip
        ahead = blocks[AHEAD]
        ldq = head_pad * activation_bytes
        lines = head_pad // 2
        for b in range(count, num_ahead):
            prefetch_lines(ahead[b], lines, PAIR_BYTES)
        for b in range(num_ahead, count):
            ahead[b] = blocks[1, b]
        for b in range(0, count, 2):
            k0 = blocks[0, b]
            k1 = blocks[0, b + 1] if b + 1 < count else k0  # an odd last block fills a masked column
            v0, v1 = blocks[1, b], blocks[1, min(b + 1, count - 1)]
            if not streams:
                for at in range(b, min(b + 2, num_ahead)):
                    prefetch_lines(ahead[at], lines, PAIR_BYTES)
                if fresh:
                    prefetch_lines(v0, lines, PAIR_BYTES)
                    prefetch_lines(v1, lines, PAIR_BYTES)
            r = 0
            while r < rows:
                out = scores + r * SCORE_ROW + b * 64
                at = q + r * ldq
                if streams:
                    r += qk_rows(rows - r, at, ldq, k0, k1, head_pad // 32, STEP_BYTES, out, SCORE_ROW, v0, v1)
                else:
                    r += qk_rows(rows - r, at, ldq, k0, k1, head_pad // 32, STEP_BYTES, out, SCORE_ROW, k0, 0)

    @kernels.jit
    def weigh(rows: int, count: int, head_pad: int, p: int, blocks: Any, o: int) -> None:
        addresses = blocks[1].ctypes.data
        for pair in range(head_pad // 32):
            r = 0
            while r < rows:
                out = o + r * head_pad * 4 + pair * 128
                offset = pair * 2 * V_COLUMN_BYTES
                r += weigh_rows(rows - r, p + r * p_row, p_row, addresses, count, offset, out, head_pad * 4)

    @kernels.jit
    def segment(
        tokens: Any, count: int, seq: int, number: int, head: int, fresh: bool, num_ahead: int, model: Any,
        layer: Any, step: Any, own: Any,
    ) -> None:  # fmt: skip
        positions = carray(i32_pointer(step.positions), (step.num_tokens,))
        group = model.num_heads // model.num_kv_heads
        start = number * SEGMENT_TOKENS
        reach = 0
        for t in range(count):
            reach = max(reach, min(SEGMENT_TOKENS, positions[tokens[t]] + 1 - start))
        num_blocks = (reach + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        blocks = carray(i64_pointer(own.blocks), (BLOCK_LISTS, SEGMENT_BLOCKS))
        find_blocks(seq, number, num_blocks, head, model, layer, step, blocks)
        score(
            count * group, num_blocks, model.head_pad, own.q, blocks, own.scores, fresh, num_ahead,
        )  # fmt: skip
        for t in range(count):
            position = positions[tokens[t]]
            lo = max(0, first_visible(position, layer.window) - start)
            hi = max(0, min(SEGMENT_TOKENS, position + 1 - start))
            for r in range(t * group, (t + 1) * group):
                score_peak(own.scores + r * SCORE_ROW, num_blocks, lo, hi, own.state + r * 8)
        for r in range(count * group):
            score_powers(
                own.scores + r * SCORE_ROW, num_blocks, model.score_scale, own.p + r * p_row, own.state + r * 8
            )
        weigh(count * group, num_blocks, model.head_pad, own.p, blocks, own.o)

    return segment


@jit
def partial_address(slot: int, head: int, g: int, model: Any, step: Any) -> Any:
    """Where a query row keeps its (maximum, sum) and output of one segment."""
    group = model.num_heads // model.num_kv_heads
    row = (slot * model.num_kv_heads + head) * group + g
    return step.partials + row * (STATE_FLOATS + model.head_pad) * 4


def _make_whole(kernels: KernelSet, segment: Any) -> Any:
    """An item that walks over its rows' whole context."""
    merge_row, finish_row = kernels.merge_row, kernels.finish_row

    @kernels.jit
    def whole(
        tokens: Any, count: int, seq: int, work: int, fresh: bool, model: Any, layer: Any, step: Any, own: Any
    ) -> None:
        head = work % model.num_kv_heads
        positions = carray(i32_pointer(step.positions), (step.num_tokens,))
        group = model.num_heads // model.num_kv_heads
        vectors = model.head_pad // 16
        reset_running(own.state_run, own.o_run, count * group, model.head_pad)
        first = first_visible(positions[tokens[0]], layer.window) // SEGMENT_TOKENS
        last = positions[tokens[count - 1]]
        end = num_segments(last + 1)
        for number in range(first, end):
            num_ahead = 0
            if number + 1 == end:
                num_ahead = work_ahead(work + 1, model, layer, step, own)
            elif fresh:
                num_ahead = segment_ahead(seq, number + 1, last, head, model, layer, step, own)
            segment(tokens, count, seq, number, head, fresh, num_ahead, model, layer, step, own)
            for r in range(count * group):
                o = r * model.head_pad * 4
                merge_row(own.state_run + r * 8, own.o_run + o, own.state + r * 8, own.o + o, vectors)
        for t in range(count):
            for g in range(group):
                r = t * group + g
                out = (
                    step.att + tokens[t] * step.q_stride + (head * group + g) * model.head_pad * model.activation_bytes
                )
                finish_row(own.state_run + r * 8, own.o_run + r * model.head_pad * 4, vectors, out)

    return whole


def _make_split(kernels: KernelSet, segment: Any) -> Any:
    """An item that attends to one segment and stores partial results."""

    @kernels.jit
    def split(
        first: int, count: int, seq: int, number: int, work: int, model: Any, layer: Any, step: Any, own: Any
    ) -> None:
        tokens = carray(i32_pointer(step.split_tokens), (step.num_tokens,))[first:]
        base = carray(i32_pointer(step.split_base), (step.num_tokens,))[first:]
        positions = carray(i32_pointer(step.positions), (step.num_tokens,))
        reach = 0
        for t in range(count):
            start = first_visible(positions[tokens[t]], layer.window)
            reach = max(reach, (number + 1) * SEGMENT_TOKENS - start)
        if reach <= 0:
            return  # outside of every row's window; ``join`` begins after it
        group = model.num_heads // model.num_kv_heads
        head = work % model.num_kv_heads
        gather_queries(tokens, count, head, group, model, step, own.q)
        num_ahead = work_ahead(work + 1, model, layer, step, own)
        segment(tokens, count, seq, number, head, True, num_ahead, model, layer, step, own)
        states = carray(f32_pointer(own.state), (ITEM_ROWS, 2))
        for t in range(count):
            for g in range(group):
                r = t * group + g
                out = partial_address(base[t] + number, head, g, model, step)
                saved = carray(f32_pointer(out), (2,))
                saved[0], saved[1] = states[r, 0], states[r, 1]
                copy_rows(own.o + r * model.head_pad * 4, out + STATE_FLOATS * 4, model.head_pad // 16)

    return split


def _make_join(kernels: KernelSet) -> Any:
    """The phase that joins the segments of split rows, in position order."""
    merge_row, finish_row = kernels.merge_row, kernels.finish_row

    @kernels.jit
    def join_row(token: int, base: int, head: int, g: int, model: Any, layer: Any, step: Any, own: Any) -> None:
        position = carray(i32_pointer(step.positions), (step.num_tokens,))[token]
        group = model.num_heads // model.num_kv_heads
        vectors = model.head_pad // 16
        reset_running(own.state_run, own.o_run, 1, model.head_pad)
        first = first_visible(position, layer.window) // SEGMENT_TOKENS
        for number in range(first, num_segments(position + 1)):
            part = partial_address(base + number, head, g, model, step)
            merge_row(own.state_run, own.o_run, part, part + STATE_FLOATS * 4, vectors)
        out = step.att + token * step.q_stride + (head * group + g) * model.head_pad * model.activation_bytes
        finish_row(own.state_run, own.o_run, vectors, out)

    @kernels.jit
    def join(tid: int, nt: int, counters: int, model: Any, layer: Any, step: Any, own: Any) -> None:
        tokens = carray(i32_pointer(step.split_tokens), (step.num_tokens,))
        base = carray(i32_pointer(step.split_base), (step.num_tokens,))
        num_split = carray(i32_pointer(step.counts), (2,))[NUM_SPLIT_TOKENS]
        group = model.num_heads // model.num_kv_heads
        victim = 0
        while True:
            work, victim = next_item(counters, tid, nt, num_split * model.num_kv_heads, victim)
            if work < 0:
                break
            k, head = work // model.num_kv_heads, work % model.num_kv_heads
            for g in range(group):
                join_row(tokens[k], base[k], head, g, model, layer, step, own)

    return join


def make_attention(kernels: KernelSet) -> tuple[Any, Any]:
    """(attend, join): the phase over items, and the one that joins split rows' segments."""
    segment = make_segment(kernels)
    whole, split = _make_whole(kernels, segment), _make_split(kernels, segment)

    @kernels.jit
    def attend(tid: int, nt: int, counters: int, model: Any, layer: Any, step: Any, own: Any) -> None:
        counts = carray(i32_pointer(step.counts), (2,))
        items = carray(i32_pointer(step.items), (step.num_tokens + step.partial_rows, ITEM_FIELDS))
        tokens = carray(i32_pointer(own.tokens), (ITEM_ROWS,))
        group = model.num_heads // model.num_kv_heads
        victim, seq, visits = 0, -1, 0
        while True:
            work, victim = next_item(counters, tid, nt, counts[NUM_ITEMS] * model.num_kv_heads, victim)
            if work < 0:
                break
            item = items[work // model.num_kv_heads]
            if item[ITEM_SEGMENT] == WHOLE:
                for t in range(item[ITEM_COUNT]):
                    tokens[t] = item[ITEM_FIRST] + t
                # A sequence's later items find its K and V in the second-level cache.
                visits = visits + 1 if item[ITEM_SEQ] == seq else 0
                seq = item[ITEM_SEQ]
                gather_queries(tokens, item[ITEM_COUNT], work % model.num_kv_heads, group, model, step, own.q)
                fresh = visits < model.num_kv_heads
                whole(tokens, item[ITEM_COUNT], seq, work, fresh, model, layer, step, own)
            else:
                split(
                    item[ITEM_FIRST], item[ITEM_COUNT], item[ITEM_SEQ], item[ITEM_SEGMENT], work, model, layer, step,
                    own,
                )  # fmt: skip

    return attend, _make_join(kernels)

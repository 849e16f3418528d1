"""What is done row by row: embedding, RMS norms, rotary embedding, writing K and V to their pages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from worker_proc.kernels.cpu.coding import CODED
from worker_proc.kernels.cpu.kernels import KernelSet, jit
from worker_proc.kernels.cpu.layout import BLOCK_TOKENS
from worker_proc.kernels.cpu.scalar import bf16_to_f32, f32_pointer, i32_pointer, i64_pointer, u8_pointer, u16_pointer
from worker_proc.kernels.cpu.team import next_item
from worker_proc.kernels.cpu.tiles import PAIR_BYTES, STEP_BYTES, V_COLUMN_BYTES

ROWS_PER_ITEM = 4
PANEL_COLUMNS = 32


@jit
def embed_row(table: int, token: int, hidden: int, hidden_pad: int, scale: Any, out: int) -> None:
    """out[:hidden] = float32(embedding[token]) * scale; padding 0."""
    row = carray(u16_pointer(table + token * hidden * 2), (hidden,))
    x = carray(f32_pointer(out), (hidden_pad,))
    for i in range(hidden):
        x[i] = bf16_to_f32(row[i]) * scale
    for i in range(hidden, hidden_pad):
        x[i] = np.float32(0)


def make_embed_row_of_head(kernels: KernelSet) -> Any:
    """``embed_row_of_head(head, token, hidden_pad, scale, out)``: :func:`embed_row` from the packed head.

    There (``packing.py``) a row is a column of pairs, a cache line apart. So a token touches hidden / 2 lines
    instead of hidden / 32: a few microseconds, against memory for a second copy of the embedding.
    """
    apart = kernels.isa.blocks_apart
    block_step = STEP_BYTES if apart else 2 * STEP_BYTES

    @kernels.jit
    def embed_row_of_head(head: int, token: int, hidden_pad: int, scale: Any, out: int) -> None:
        steps = hidden_pad // 32
        panel = head + token // PANEL_COLUMNS * steps * 2 * STEP_BYTES
        second = steps * STEP_BYTES if apart else STEP_BYTES
        column = panel + token % PANEL_COLUMNS // 16 * second + token % 16 * 4
        x = carray(f32_pointer(out), (steps, 16, 2))
        for step in range(steps):
            block = column + step * block_step
            for pair in range(16):
                both = carray(u16_pointer(block + pair * PAIR_BYTES), (2,))
                x[step, pair, 0] = bf16_to_f32(both[0]) * scale
                x[step, pair, 1] = bf16_to_f32(both[1]) * scale

    return embed_row_of_head


def make_embed_row_of_coded_head(kernels: KernelSet) -> Any:
    """The same where weights are coded (``coding.py``): ``head`` is the list of the head's panels."""

    @kernels.jit
    def embed_row_of_head(head: int, token: int, hidden_pad: int, scale: Any, out: int) -> None:
        steps, column = hidden_pad // 32, token % PANEL_COLUMNS
        panel = carray(i64_pointer(head), (token // PANEL_COLUMNS + 1,))[token // PANEL_COLUMNS]
        x = carray(f32_pointer(out), (steps, 16, 2))
        block, place = column // 16, column % 16 // 4 * 8 + column % 4
        if panel & CODED == 0:
            plain = carray(u16_pointer(panel), (steps, 2, 16, 16, 2))
            for step in range(steps):
                for pair in range(16):
                    for half in range(2):
                        x[step, pair, half] = bf16_to_f32(plain[step, block, pair, column % 16, half]) * scale
            return
        panel -= CODED
        tables = carray(u8_pointer(panel), (steps, 2, 16))
        groups = carray(u16_pointer(panel + (32 * steps + 63) // 64 * 64), (steps, 2, 4, 3, 32))
        for step in range(steps):
            table = tables[step, block]
            for pair in range(16):
                at = place + pair % 2 * 4
                lowers = np.int64(groups[step, block, pair // 4, pair % 4 // 2, at])
                numbers = np.int64(groups[step, block, pair // 4, 2, at]) >> (pair % 4 // 2 * 4)
                first = np.int64(table[numbers & 15]) << 8 | (lowers & 255)
                other = np.int64(table[numbers >> 8 & 15]) << 8 | lowers >> 8
                x[step, pair, 0] = bf16_to_f32(np.uint16(first)) * scale
                x[step, pair, 1] = bf16_to_f32(np.uint16(other)) * scale

    return embed_row_of_head


def make_norms(kernels: KernelSet) -> tuple[Any, Any]:
    """(norm_row, add_normed_row)."""
    sum_squares, scale_row, scale_add = kernels.sum_squares, kernels.scale_row, kernels.scale_add

    @kernels.jit
    def rms_factor(x: int, width: int, pad: int, eps: Any) -> Any:
        mean = sum_squares(x, pad) / np.float32(width)
        return np.float32(1) / np.float32(math.sqrt(mean + eps))

    @kernels.jit
    def norm_row(x: int, w: int, width: int, pad: int, eps: Any, out: int) -> None:
        """out (activations) = x / rms(x) * w."""
        scale_row(x, rms_factor(x, width, pad, eps), w, pad, out)

    @kernels.jit
    def normed_row(x: int, w: int, width: int, pad: int, eps: Any, out: int, add: int) -> None:
        """out (float32) = add * out + x / rms(x) * w; out may be x."""
        scale_add(x, rms_factor(x, width, pad, eps), w, pad, out, add)

    return norm_row, normed_row


@jit
def write_key(k: int, block: int, slot: int, head_pad: int) -> None:
    """Put a head's key (bf16) into column ``slot`` of a K block."""
    pairs = carray(i32_pointer(k), (head_pad // 2,))
    out = carray(i32_pointer(block), (head_pad // 2, BLOCK_TOKENS))
    for i in range(head_pad // 2):
        out[i, slot] = pairs[i]


@jit
def clear_values(block: int, slot: int, head_pad: int) -> None:
    """Zero the tokens from ``slot`` on: whatever an earlier owner of the page left there (a NaN, say)
    must not reach a sum through a probability of 0."""
    out = carray(u16_pointer(block), (head_pad // 16, BLOCK_TOKENS // 2, 16, 2))
    for token in range(slot, BLOCK_TOKENS):
        for column in range(head_pad // 16):
            for lane in range(16):
                out[column, token // 2, lane, token % 2] = np.uint16(0)


@jit
def block_address(kv: int, page: int, offset: int, head: int, model: Any) -> Any:
    """Address of the K block of a kv head that holds token ``offset`` of a page."""
    blocks = model.page_size // BLOCK_TOKENS
    return kv + page * model.page_stride + (head * blocks + offset // BLOCK_TOKENS) * model.head_pad * 32


@jit
def token_block(token: int, model: Any, layer: Any, step: Any) -> Any:
    """Address of the first head's K block in which a packed token belongs."""
    position = carray(i32_pointer(step.positions), (step.num_tokens,))[token]
    seq = carray(i32_pointer(step.seq_of), (step.num_tokens,))[token]
    pages = carray(i32_pointer(step.page_table), (step.num_seqs, step.table_width))
    page = pages[seq, position // model.page_size]
    return block_address(layer.kv, page, position % model.page_size, 0, model)


def make_rope(kernels: KernelSet, normed_row: Any) -> Any:
    """``rope(tid, nt, counters, model, layer, step, own)``: q to activations, K and V to pages, for all tokens."""

    rotate_query, rotate_key = kernels.rotate_query, kernels.rotate_key
    store_value, prefetch_lines = kernels.store_value, kernels.prefetch_lines

    @kernels.jit
    def norm_head(x: int, norm: int, model: Any) -> None:
        if norm != 0:
            normed_row(x, norm, model.head_dim, model.head_pad, model.norm_eps, x, 0)

    @kernels.jit
    def prefetch_blocks(token: int, model: Any, layer: Any, step: Any) -> None:
        """A key touches every line of its block, a value one in each column block: fetch them early."""
        block = token_block(token, model, layer, step)
        slot = carray(i32_pointer(step.positions), (step.num_tokens,))[token] % BLOCK_TOKENS
        for head in range(model.num_kv_heads):
            at = block + head * (model.page_size // BLOCK_TOKENS) * model.head_pad * 32
            prefetch_lines(at, model.head_pad // 2, PAIR_BYTES)
            line = at + model.page_bytes // 2 + slot // 2 * PAIR_BYTES
            prefetch_lines(line, model.head_pad // 16, V_COLUMN_BYTES)

    @kernels.jit
    def keys_values(qkv: int, block: int, slot: int, clear: bool, table: int, model: Any, layer: Any, key: int) -> None:
        for head in range(model.num_kv_heads):
            x = qkv + (model.num_heads + head) * model.head_pad * 4
            at = block + head * (model.page_size // BLOCK_TOKENS) * model.head_pad * 32
            norm_head(x, layer.k_norm, model)
            rotate_key(x, table, model.head_pad // 2, key)
            write_key(key, at, slot, model.head_pad)
            v_block = at + model.page_bytes // 2
            value = x + model.num_kv_heads * model.head_pad * 4
            store_value(value, model.head_pad // 16, v_block + slot // 2 * PAIR_BYTES, slot % 2)
            if clear:
                clear_values(v_block, slot + 1, model.head_pad)

    @kernels.jit
    def one_token(token: int, model: Any, layer: Any, step: Any, own: Any) -> None:
        position = carray(i32_pointer(step.positions), (step.num_tokens,))[token]
        seq = carray(i32_pointer(step.seq_of), (step.num_tokens,))[token]
        starts = carray(i32_pointer(step.query_start), (step.num_seqs + 1,))
        slot = position % BLOCK_TOKENS
        block = token_block(token, model, layer, step)
        qkv, q = step.qkv + token * step.qkv_stride, step.q + token * step.q_stride
        table = layer.rope + position * model.head_pad * 4
        for head in range(model.num_heads):
            at = head * model.head_pad
            norm_head(qkv + at * 4, layer.q_norm, model)
            rotate_query(qkv + at * 4, table, model.head_pad // 2, q + at * model.activation_bytes)
        # The last token of a chunk clears the rest of a block that this step began.
        last = token + 1 == starts[seq + 1]
        clear = last and token - position % BLOCK_TOKENS >= starts[seq]
        keys_values(qkv, block, slot, clear, table, model, layer, own.q)

    @kernels.jit
    def rope(tid: int, nt: int, counters: int, model: Any, layer: Any, step: Any, own: Any) -> None:
        victim = 0
        items = (step.num_tokens + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
        while True:
            item, victim = next_item(counters, tid, nt, items, victim)
            if item < 0:
                break
            first, end = item * ROWS_PER_ITEM, min(step.num_tokens, (item + 1) * ROWS_PER_ITEM)
            for token in range(first, end):
                prefetch_blocks(token, model, layer, step)
            for token in range(first, end):
                one_token(token, model, layer, step, own)

    return rope


def make_row_phases(kernels: KernelSet, norm_row: Any, normed_row: Any) -> tuple[Any, Any, Any]:
    """(embed, next_norm, final_norm): phases over rows."""
    make_embed = make_embed_row_of_coded_head if kernels.isa.codes_weights else make_embed_row_of_head
    embed_row_of_head = make_embed(kernels)

    @kernels.jit
    def embed_and_norm(row: int, norm: int, model: Any, step: Any) -> None:
        token = carray(i32_pointer(step.ids), (step.num_tokens,))[row]
        x = step.x + row * step.x_stride
        if model.embedding == 0:
            embed_row_of_head(model.head_w, token, model.hidden_pad, model.embed_scale, x)
        else:
            embed_row(model.embedding, token, model.hidden, model.hidden_pad, model.embed_scale, x)
        norm_row(x, norm, model.hidden, model.hidden_pad, model.norm_eps, step.xn + row * step.xn_stride)

    @kernels.jit
    def embed(tid: int, nt: int, counters: int, norm: int, model: Any, step: Any) -> None:
        victim = 0
        while True:
            row, victim = next_item(counters, tid, nt, step.num_tokens, victim)
            if row < 0:
                break
            embed_and_norm(row, norm, model, step)

    @kernels.jit
    def next_norm(tid: int, nt: int, counters: int, post: int, norm: int, model: Any, step: Any) -> None:
        """x += rms_norm(y) * post where there is such a norm; xn = rms_norm(x) * norm unless norm is 0."""
        victim = 0
        while True:
            row, victim = next_item(counters, tid, nt, step.num_tokens, victim)
            if row < 0:
                break
            x = step.x + row * step.x_stride
            if post != 0:
                y = step.y + row * step.x_stride
                normed_row(y, post, model.hidden, model.hidden_pad, model.norm_eps, x, 1)
            if norm != 0:
                norm_row(x, norm, model.hidden, model.hidden_pad, model.norm_eps, step.xn + row * step.xn_stride)

    @kernels.jit
    def final_norm(tid: int, nt: int, counters: int, model: Any, step: Any) -> None:
        """xn[i] = rms_norm(x[logit_rows[i]]) * final_norm."""
        rows = carray(i32_pointer(step.logit_rows), (step.num_logits,))
        victim = 0
        while True:
            i, victim = next_item(counters, tid, nt, step.num_logits, victim)
            if i < 0:
                break
            x = step.x + rows[i] * step.x_stride
            norm_row(x, model.final_norm, model.hidden, model.hidden_pad, model.head_eps, step.xn + i * step.xn_stride)

    return embed, next_norm, final_norm

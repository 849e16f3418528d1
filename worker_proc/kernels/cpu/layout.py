"""Shapes, strides and the records through which Python tells the compiled forward about them.

Padding: every width is rounded up to 32 (a tile's depth, and a panel's width) and the padding is
zero in weights and norms, so it stays zero in activations and no kernel has a tail. A head is
padded on its own, so that heads stay separate columns; in q and k, each of its halves (to 16), which
are the partners of the rotary embedding.

KV pool: ``[page][layer][K heads | V heads][page_size / 16]`` blocks of 16 tokens, each
``head_pad * 32`` bytes, in the form the tiles multiply (``tiles.py``). A page is one piece of memory over all
layers, so the memory in use is one piece from the beginning on, which can be made real ahead (``pool.py``):

    K block: one column block whose columns are tokens:   [head_pad / 2][16 tokens][2]
    V block: head_pad / 16 column blocks of 8 pairs:      [head_pad / 16][8 pairs of tokens][16][2]

The compiled code sees addresses: records of int64, one for the model, one per layer, one for the
step. Whoever fills them keeps the arrays alive.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16
"""Tokens of a KV block; page sizes are multiples of it."""
SEGMENT_TOKENS = 128
"""Context is attended in segments by absolute position; results join in position order."""
SEGMENT_BLOCKS = SEGMENT_TOKENS // BLOCK_TOKENS
BLOCK_LISTS = 3
"""Lists of block addresses in a thread's scratch (``attention_pages.py``)."""
ITEM_ROWS = 32
"""Query rows (tokens x heads of a group) that attention handles together."""
ROW_PADDING = 32
"""Rows beyond the last that tiles may read."""
STATE_FLOATS = 16
"""(maximum, sum) of a partial attention row, padded to a cache line."""


def pad32(n: int) -> int:
    """The next multiple of 32."""
    return -(-n // 32) * 32


def row_bytes(columns: int, element: int) -> int:
    """Stride of an activation row: an odd number of cache lines.

    With a stride of a multiple of 4 KiB the 16 rows of a tile would share one set of the first-level
    cache (12 ways), and each load would evict the next.
    """
    lines = -(-columns * element // 64)
    return (lines | 1) * 64


_I = np.int64
MODEL = np.dtype(
    [
        ("num_layers", _I),
        ("hidden", _I),
        ("hidden_pad", _I),
        ("num_heads", _I),
        ("num_kv_heads", _I),
        ("head_dim", _I),
        ("head_pad", _I),
        ("inner_pad", _I),
        ("vocab", _I),
        ("vocab_pad", _I),
        ("activation_bytes", _I),
        ("page_size", _I),
        ("page_bytes", _I),
        ("page_stride", _I),
        ("post_norms", _I),
        ("gelu", _I),
        ("embedding", _I),
        ("final_norm", _I),
        ("head_w", _I),
        ("head_b", _I),
        ("tiles_gemm", _I),
        ("tiles_attention", _I),
        ("embed_scale", np.float32),
        ("norm_eps", np.float32),
        ("head_eps", np.float32),
        ("score_scale", np.float32),
    ],
    align=True,
)
"""One record. ``embedding``: bf16 [vocab, hidden], or 0: the packed head is it; weights: packed panels;
``score_scale`` includes log2(e)."""

LAYER = np.dtype(
    [
        ("qkv_w", _I),
        ("qkv_b", _I),
        ("o_w", _I),
        ("o_b", _I),
        ("gate_up_w", _I),
        ("gate_up_b", _I),
        ("down_w", _I),
        ("down_b", _I),
        ("attn_norm", _I),
        ("attn_post_norm", _I),
        ("mlp_norm", _I),
        ("mlp_post_norm", _I),
        ("q_norm", _I),
        ("k_norm", _I),
        ("rope", _I),
        ("window", _I),
        ("kv", _I),
    ],
    align=True,
)
"""Addresses, 0 where a model has no such part. ``rope``: float32 [positions, 2, head_pad / 2], cosines
then sines; ``window``: how many positions a token sees, itself included, 0 for all; ``kv``: the
layer's pages."""

STEP = np.dtype(
    [
        ("num_tokens", _I),
        ("num_seqs", _I),
        ("num_logits", _I),
        ("table_width", _I),
        ("row_block", _I),
        ("inner_row_block", _I),
        ("partial_rows", _I),
        ("ids", _I),
        ("positions", _I),
        ("query_start", _I),
        ("context_lens", _I),
        ("page_table", _I),
        ("logit_rows", _I),
        ("seq_of", _I),
        ("x", _I),
        ("x_stride", _I),
        ("xn", _I),
        ("xn_stride", _I),
        ("y", _I),
        ("qkv", _I),
        ("qkv_stride", _I),
        ("q", _I),
        ("q_stride", _I),
        ("att", _I),
        ("mlp", _I),
        ("mlp_stride", _I),
        ("logits", _I),
        ("logits_stride", _I),
        ("partials", _I),
        ("items", _I),
        ("counts", _I),
        ("split_order", _I),
        ("split_start", _I),
        ("split_tokens", _I),
        ("split_base", _I),
        ("profile", _I),
    ],
    align=True,
)
"""One record; strides in bytes. Inputs are int32; x, y, qkv, logits float32; xn, q, att, mlp activations:
bf16 or float32 (``Isa.activation_bytes``). A row of logits is followed by the largest of each 32."""

NUM_ITEMS, NUM_SPLIT_TOKENS = 0, 1
"""Where the counts of an attention plan are."""
ITEM_FIELDS = 4
ITEM_FIRST, ITEM_COUNT, ITEM_SEQ, ITEM_SEGMENT = range(ITEM_FIELDS)
WHOLE = -1
"""ITEM_SEGMENT of an item that covers its rows' whole context."""


def _scratch_parts(head_pad: int, activation_bytes: int, panel_bytes: int) -> dict[str, int]:
    """Bytes of each part of a thread's scratch. ``panel_bytes``: of the largest decoded panel, 0 where none is."""
    return {
        "sums": ITEM_ROWS * 128,
        "q": ITEM_ROWS * head_pad * activation_bytes,
        "scores": ITEM_ROWS * SEGMENT_TOKENS * 4,
        "p": ITEM_ROWS * SEGMENT_TOKENS * activation_bytes,
        "o": ITEM_ROWS * head_pad * 4,
        "o_run": ITEM_ROWS * head_pad * 4,
        "state": ITEM_ROWS * 8,
        "state_run": ITEM_ROWS * 8,
        "blocks": BLOCK_LISTS * SEGMENT_BLOCKS * 8,
        "tokens": ITEM_ROWS * 4,
        "panel": panel_bytes,
    }


OWN = np.dtype([(name, _I) for name in _scratch_parts(32, 2, 0)], align=True)
"""One record per thread: addresses of its scratch, about 45 KiB at head size 64 with bf16 activations (it lives in
L1), 61 KiB with float32 ones; and a decoded panel."""


def scratch_bytes(head_pad: int, activation_bytes: int, panel_bytes: int) -> int:
    """Bytes of one thread's scratch, whole pages so that threads share no cache line."""
    parts = _scratch_parts(head_pad, activation_bytes, panel_bytes).values()
    return -(-sum(-(-size // 64) * 64 for size in parts) // 4096) * 4096


def scratch_records(
    address: int, num_threads: int, head_pad: int, activation_bytes: int, panel_bytes: int
) -> NDArray[np.void]:
    """[num_threads] records of :data:`OWN` over a buffer of ``num_threads * scratch_bytes(...)`` bytes."""
    records = np.zeros(num_threads, OWN)
    for tid in range(num_threads):
        at = address + tid * scratch_bytes(head_pad, activation_bytes, panel_bytes)
        for name, size in _scratch_parts(head_pad, activation_bytes, panel_bytes).items():
            records[tid][name] = at
            at += -(-size // 64) * 64
    return records

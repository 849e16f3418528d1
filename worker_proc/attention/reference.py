"""Attention of one sequence over its pages, in plain torch: what every faster kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker_proc.attention.spec import AttentionArgs, LayerSpec


def visible(spec: LayerSpec, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """bool [N, L]: which keys each query sees (causal, window, chunk)."""
    query, key = query_positions[:, None], key_positions[None, :]
    mask = key <= query
    if spec.window:
        mask = mask & (key > query - spec.window)
    if spec.chunk:
        mask = mask & (key // spec.chunk == query // spec.chunk)
    return mask


def attend_plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, args: AttentionArgs) -> Tensor:
    """Softmax attention spelled out; scores and softmax in float32.

    Shapes: query [N, H, D], key [L, Hkv, D], value [L, Hkv, Dv], mask bool [N, L]. Returns
    [N, H, Dv] in the query's dtype. Every query must see at least one key.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    grouped = query.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped.float(), key.permute(1, 2, 0).float()[:, None]) * args.scaling
    if args.softcap:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if args.sinks is not None:
        sinks = args.sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights, value.permute(1, 0, 2).float()[:, None])
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)


def attend_sequence(
    query: Tensor, key: Tensor, value: Tensor, start: int, spec: LayerSpec, args: AttentionArgs
) -> Tensor:
    """Attention of the last N positions of one sequence over all its positions.

    Shapes as in :func:`attend_plain`, with key and value at positions [first, first + L) where
    ``first = start + N - L``, and the queries at [start, start + N). Uses torch's fused attention
    where the layer has neither softcap nor sinks.
    """
    num_queries, length = query.shape[0], key.shape[0]
    first = start + num_queries - length
    positions = torch.arange(first, first + length, device=query.device)
    whole = num_queries == length and first == 0 and not spec.chunk and (not spec.window or spec.window >= length)
    if args.softcap or args.sinks is not None:
        return attend_plain(query, key, value, visible(spec, positions[-num_queries:], positions), args)
    mask = None if whole else visible(spec, positions[-num_queries:], positions)
    groups = query.shape[1] // key.shape[1]
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        _per_query_head(key, groups),
        _per_query_head(value, groups),
        attn_mask=mask,
        is_causal=mask is None,
        scale=args.scaling,
    )
    return out[0].transpose(0, 1)


def _per_query_head(kv: Tensor, groups: int) -> Tensor:
    """[L, Hkv, D] -> [1, Hkv * groups, L, D]."""
    heads_first = kv.transpose(0, 1)
    if groups > 1:
        heads_first = heads_first.repeat_interleave(groups, dim=0)
    return heads_first[None]

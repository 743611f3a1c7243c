"""Attention of a chunk: consecutive tokens of one row, in plain torch."""

from __future__ import annotations

import torch

from fminfer.compute.attention.weighed_values import weigh_values
from fminfer.compute.soft_cap import soft_cap

MAX_SCORES = 1 << 24  # elements of one product's scores (64 MB in float32)


def chunk_attention(
    query: torch.Tensor,  # (heads, queries, head_dim)
    keys: torch.Tensor,  # (kv_heads, keys, head_dim); the last one is the last query's own
    values: torch.Tensor,
    position: int,
    scaling: float,
    sliding_window: int | None,
    alibi_slopes: torch.Tensor | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # (heads,) float32
) -> torch.Tensor:  # (queries, heads, head_dim)
    """Attend from consecutive tokens of one row, the first at `position`, to all before them."""
    heads, queries, head_dim = query.shape
    kv_heads, num_keys, _ = keys.shape
    tile = max(1, MAX_SCORES // (heads * num_keys))
    if queries > tile:  # a very long context: fewer queries at a time
        halves = [slice(0, tile), slice(tile, queries)]
        parts = [
            chunk_attention(
                query[:, half],
                keys[:, : position + min(half.stop, queries)],
                values[:, : position + min(half.stop, queries)],
                position + half.start,
                scaling,
                sliding_window,
                alibi_slopes,
                softcap,
                sinks,
            )
            for half in halves
        ]
        return torch.cat(parts)
    grouped = (query * scaling).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(1, 2)).view(heads, queries, num_keys)
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    distance = _distance(position, queries, num_keys, query.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance
    is_hidden = distance < 0
    if sliding_window is not None:
        is_hidden |= distance >= sliding_window
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, queries, 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., :num_keys].to(values.dtype)
    weights = weights.reshape(kv_heads, -1, num_keys)
    out = weigh_values(weights, values, is_hidden.repeat(heads // kv_heads, 1))
    return out.view(heads, queries, head_dim).transpose(0, 1)


def _distance(
    position: int, queries: int, num_keys: int, device: torch.device
) -> torch.Tensor:  # (queries, keys) int64
    query_positions = torch.arange(position, position + queries, device=device)
    return query_positions[:, None] - torch.arange(num_keys, device=device)

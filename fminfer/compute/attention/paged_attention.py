"""Attention over the paged KV cache, for packed rows of any lengths.

Linear layers see all tokens of a step in one line, [1, tokens, hidden]; attention alone sees rows.
Chunks of prompts (several tokens of one row) are matrix products row by row; decode rows (one token
each) run together, over the flat list of their blocks, so that no row is padded to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from fminfer.compute.attention.attention_plan import AttentionPlan, ChunkRow, plan_attention
from fminfer.compute.attention.decode_attention import decode_attention
from fminfer.compute.attention.scoring import AttentionCall, Scoring, weigh_values
from fminfer.compute.soft_cap import soft_cap
from fminfer.compute.step import Rows

MAX_SCORES = 1 << 24  # elements of one product's scores (64 MB in float32)


def chunk_attention(
    query: torch.Tensor,  # (heads, queries, head_dim)
    keys: torch.Tensor,  # (kv_heads, keys, head_dim); the last one is the last query's own
    values: torch.Tensor,
    position: int,
    how: Scoring,
) -> torch.Tensor:  # (queries, heads, head_dim)
    """Attend from consecutive tokens of one row, the first at `position`, to all before them."""
    heads, queries, head_dim = query.shape
    kv_heads, num_keys, _ = keys.shape
    tile = max(1, MAX_SCORES // (heads * num_keys))
    if queries > tile:  # a very long context: fewer queries at a time
        parts, first = [], 0
        for part in torch.split(query, tile, 1):
            seen = position + first + part.shape[1]
            given = part, keys[:, :seen], values[:, :seen], position + first
            parts.append(chunk_attention(*given, how))
            first += part.shape[1]
        return torch.cat(parts)
    grouped = (query * how.scaling).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(1, 2)).view(heads, queries, num_keys)
    if how.softcap is not None:
        scores = soft_cap(scores, how.softcap)
    distance = _distance(position, queries, num_keys, query.device)
    if how.slopes is not None:
        scores = scores - how.slopes[:, None, None] * distance
    is_hidden = how.hides(distance)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if how.sinks is not None:
        scores = torch.cat([scores, how.sinks.to(scores)[:, None, None].expand(-1, queries, 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., :num_keys].to(values.dtype)
    weights = weights.reshape(kv_heads, -1, num_keys)
    out = weigh_values(weights, values, is_hidden.repeat(heads // kv_heads, 1))
    return out.view(heads, queries, head_dim).transpose(0, 1)


def _distance(
    position: int, queries: int, num_keys: int, device: torch.device
) -> torch.Tensor:  # (queries, keys) int64
    query_positions = torch.arange(position, position + queries, device=device)
    return query_positions[:, None] - torch.arange(num_keys, device=device)


QUERY_TILE = 128  # query tokens of one product; bounds the memory of the scores


class AttentionBody(Protocol):
    """What attends over a layer's cache: plain torch, kernel_attention or triton_attention."""

    def plan(self, rows: Rows, block_size: int) -> Any:
        """Lay out a step's rows, in packed order, as the body reads them."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Put the new keys and values into the cache, then attend; each row sees only itself.

        They are rounded to the cache's type, and attended to as they are kept.

        Returns:
            (1, tokens, heads, head_dim), of the tokens that are kept.

        Raises:
            MemoryError: there was none for the threads' working space.
        """


class PlainAttention:
    """Attention in plain tensor operations, on any device: the reference.

    Args:
        kv_heads: of the cache.
        device: where all tensors are.
    """

    def __init__(self, kv_heads: int, device: torch.device) -> None:
        self._kv_heads, self._device = kv_heads, device

    def plan(self, rows: Rows, block_size: int) -> AttentionPlan:
        return plan_attention(rows, block_size, self._kv_heads, self._device)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        query, how = call.query, call.how
        rows: AttentionPlan = call.rows
        new, caches = (call.new_keys[0], call.new_values[0]), (call.keys, call.values)
        for cache, each in zip(caches, new, strict=True):
            stored = each.transpose(0, 1).reshape(-1, each.shape[-1]).to(cache.dtype)
            cache.view(-1, each.shape[-1]).index_copy_(0, rows.slots, stored)
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for chunk in rows.chunks:
            all_keys, all_values = map(partial(_gather, chunk), new, caches)
            _attend_chunk(chunk, query[0], all_keys, all_values, out[0], how)
        if rows.decode is not None:
            first = rows.decode.first
            asked = query[0, :, first:].transpose(0, 1)
            out[0, first:] = decode_attention(asked, *caches, rows.decode, how)
        return out if rows.kept is None else out[:, rows.kept]


def _gather(chunk: ChunkRow, new: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return a row's keys or values up to the chunk's end, (kv_heads, keys, head_dim).

    They are of the type of new ones, and rounded as they are kept.
    """
    if chunk.position == 0:  # they are all at hand
        return new[:, chunk.first : chunk.last].to(cache.dtype).to(new.dtype)
    num_keys = chunk.position + chunk.last - chunk.first
    kept = cache.index_select(0, chunk.blocks).transpose(0, 1).flatten(1, 2)[:, :num_keys]
    return kept.to(new.dtype)


def _attend_chunk(
    chunk: ChunkRow,
    query: torch.Tensor,  # (heads, tokens, head_dim), of the step
    keys: torch.Tensor,  # (kv_heads, keys, head_dim), of the row
    values: torch.Tensor,
    out: torch.Tensor,  # (tokens, heads, head_dim), of the step
    how: Scoring,
) -> None:
    """Attend from a chunk's tokens, some at a time."""
    for start in range(chunk.first, chunk.last, QUERY_TILE):
        end = min(start + QUERY_TILE, chunk.last)
        position = chunk.position + start - chunk.first
        seen = position + end - start
        out[start:end] = chunk_attention(
            query[:, start:end], keys[:, :seen], values[:, :seen], position, how
        )


@dataclass(slots=True)
class PagedAttention:
    """One layer's keys and values in blocks, and attention over them.

    New keys and values are rounded to the cache's type, and read as their own type.
    """

    keys: torch.Tensor  # (blocks, kv_heads, block_size, head_dim)
    values: torch.Tensor  # the same; or the very keys, where one of both is kept
    body: AttentionBody

    def __call__(
        self, plan: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, then attend, as `AttentionBody`, by a plan of it."""
        return self.body(AttentionCall(query, key, value, self.keys, self.values, plan, how))

"""Attention over the paged KV cache, for packed rows of any lengths.

Linear layers see all tokens of a step in one line, [1, tokens, hidden]; attention alone sees rows.
Chunks of prompts (several tokens of one row) are matrix products row by row; decode rows (one token
each) run together, over the flat list of their blocks, so that no row is padded to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fminfer.compute.attention.attention_plan import AttentionPlan, ChunkRow
from fminfer.compute.attention.decode_attention import decode_attention
from fminfer.compute.attention.weighed_values import weigh_values
from fminfer.compute.soft_cap import soft_cap
from fminfer.core.messages import StepRow
from fminfer.machine.host_memory import use_small_pages

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


QUERY_TILE = 128  # query tokens of one product; bounds the memory of the scores


class AttentionKernel(Protocol):
    """A compiled body of attention: the CPU's kernel_attention or the GPU's triton_attention."""

    def plan(self, rows: Sequence[StepRow], block_size: int) -> Any:
        """Lay out a step's rows, in packed order, as the kernel reads them."""

    def __call__(
        self,
        query: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Any,
        *,
        scaling: float,
        sliding_window: int | None,
        alibi_slopes: torch.Tensor | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Put the new keys and values into the cache, then attend: as PagedAttention."""


class _Scoring(NamedTuple):
    """What PagedAttention is told of scores, as chunk_attention and decode_attention take it."""

    scaling: float
    sliding_window: int | None
    alibi_slopes: torch.Tensor | None
    softcap: float | None
    sinks: torch.Tensor | None


class PagedAttention:
    """One layer's keys and values in blocks, and the product over them.

    Args:
        num_blocks, block_size, num_kv_heads, head_dim: the shape of the cache.
        dtype: of the cache. New keys and values are rounded to it, and read as their own type.
        kernel: the compiled kernel; None: plain tensor operations.
        kept_in: (2, …) where keys and values are kept, or (1, …), where values are the keys; None:
            in memory of its own.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernel: AttentionKernel | None = None,
        kept_in: torch.Tensor | None = None,
    ) -> None:
        shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
        if kept_in is None:
            # Not zeroed, so that the system gives memory only as blocks come into use, page by
            # page.
            kept_in = torch.empty(shape, dtype=dtype, device=device)
            if device.type == "cpu":
                use_small_pages(kept_in.data_ptr(), kept_in.nbytes)
        assert kept_in.shape[1:] == shape[1:], "a cache"
        self.keys, self.values = kept_in[0], kept_in[-1]  # one of both: values are the keys
        # The stage sets it before each step: what the kernel's `plan` gave if it is to attend.
        self.plan: Any = None
        self._kernel = kernel

    def __call__(
        self,
        query: torch.Tensor,  # (1, heads, tokens, head_dim)
        key: torch.Tensor,  # (1, kv_heads, tokens, head_dim)
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        alibi_slopes: torch.Tensor | None = None,  # (heads,) float32
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # (heads,) float32
    ) -> torch.Tensor:  # (1, tokens, heads, head_dim)
        """Store the new keys and values, then attend; each row sees only itself, causally.

        Of KernelRows that keep some tokens, only theirs are returned.

        A key is seen if 0 <= query position - key position < sliding_window (None: no limit).
        Scores are bent into (-softcap, softcap) before ALiBi and mask (None: left as they are).
        A sink is the score of one key more, which has no value (Xiao et al. 2024; gpt-oss).
        """
        plan = self.plan
        assert plan is not None, "no step is planned"
        if not isinstance(plan, AttentionPlan):
            assert self._kernel is not None, "the step was planned for the kernel"
            return self._kernel(
                query,
                key,
                value,
                self.keys,
                self.values,
                plan,
                scaling=scaling,
                sliding_window=sliding_window,
                alibi_slopes=alibi_slopes,
                softcap=softcap,
                sinks=sinks,
            )
        how = _Scoring(scaling, sliding_window, alibi_slopes, softcap, sinks)
        self._store(plan, key, value)
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for chunk in plan.chunks:
            keys, values = self._gather(chunk, key, value)
            _attend_chunk(chunk, query[0], keys, values, out[0], how)
        if plan.decode is not None:
            first = plan.decode.first
            rows = query[0, :, first:].transpose(0, 1)
            out[0, first:] = decode_attention(rows, self.keys, self.values, plan.decode, *how)
        return out

    def _store(self, plan: AttentionPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the step's keys and values into the cache."""
        for cache, new in ((self.keys, key), (self.values, value)):
            rows = new[0].transpose(0, 1).reshape(-1, new.shape[-1]).to(cache.dtype)
            cache.view(-1, new.shape[-1]).index_copy_(0, plan.slots, rows)

    def _gather(
        self, chunk: ChunkRow, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's keys and values up to the chunk's end, (kv_heads, keys, head_dim).

        They are of the type of new ones, and rounded as they are kept.
        """
        if chunk.position == 0:  # they are all at hand
            kind = self.keys.dtype
            new = (each[0, :, chunk.first : chunk.last] for each in (key, value))
            keys, values = (each.to(kind).to(key.dtype) for each in new)
            return keys, values
        num_keys = chunk.position + chunk.last - chunk.first
        keys, values = (
            cache.index_select(0, chunk.blocks)
            .transpose(0, 1)
            .flatten(1, 2)[:, :num_keys]
            .to(key.dtype)
            for cache in (self.keys, self.values)
        )
        return keys, values


def _attend_chunk(
    chunk: ChunkRow,
    query: torch.Tensor,  # (heads, tokens, head_dim), of the step
    keys: torch.Tensor,  # (kv_heads, keys, head_dim), of the row
    values: torch.Tensor,
    out: torch.Tensor,  # (tokens, heads, head_dim), of the step
    how: _Scoring,
) -> None:
    """Attend from a chunk's tokens, some at a time."""
    for start in range(chunk.first, chunk.last, QUERY_TILE):
        end = min(start + QUERY_TILE, chunk.last)
        position = chunk.position + start - chunk.first
        seen = position + end - start
        out[start:end] = chunk_attention(
            query[:, start:end], keys[:, :seen], values[:, :seen], position, *how
        )

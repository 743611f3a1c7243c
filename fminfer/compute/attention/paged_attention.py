"""Attention over the paged KV cache, for packed rows of any lengths.

Linear layers see all tokens of a step in one line, [1, tokens, hidden]; only this module knows
rows. Chunks of prompts (several tokens of one row) are matrix products row by row; decode rows (one
token each) run together, over the flat list of their blocks, so that no row is padded to another.
It knows nothing of models, requests or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from fminfer.compute.attention.decode_attention import DecodeRows, SharedBlocks, decode_attention
from fminfer.compute.attention.kernel_attention import token_slots
from fminfer.compute.attention.shared_runs import SharedRun, find_shared_runs
from fminfer.compute.attention.weighed_values import weigh_values
from fminfer.compute.soft_cap import soft_cap
from fminfer.core.messages import StepRow
from fminfer.machine.host_memory import use_small_pages

QUERY_TILE = 128  # query tokens of one product; bounds the memory of the scores
SHARED_KEYS = 512  # keys that decode rows share, of one product
MAX_SCORES = 1 << 24  # elements of one product's scores (64 MB in float32)


@dataclass(slots=True, frozen=True)
class ChunkRow:
    """One prompt chunk: packed tokens [first, last), at `position` of its sequence."""

    first: int
    last: int
    position: int
    blocks: torch.Tensor  # (blocks that hold keys,) int64


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """Everything attention needs to know of a step, made once and used by every layer."""

    slots: torch.Tensor  # (tokens * kv_heads,) int64: where new keys go, in rows of head_dim
    chunks: list[ChunkRow]
    decode: DecodeRows | None


def plan_attention(
    rows: Sequence[StepRow], block_size: int, kv_heads: int, device: torch.device
) -> AttentionPlan:
    """Lay out a step. Rows of one token are computed together if they come last.

    Args:
        rows: the step's rows in packed order.
        block_size: tokens a block.
        kv_heads: heads of keys, on which a token's place in the cache depends.
    """
    chunks: list[ChunkRow] = []
    decode: list[StepRow] = []
    first = 0
    num_chunks = max((i for i, row in enumerate(rows, 1) if len(row.token_ids) > 1), default=0)
    for index, row in enumerate(rows):
        last = first + len(row.token_ids)
        if index >= num_chunks:
            decode.append(row)
        else:  # also the one token that is left of a chunk, when a step is cut into parts
            blocks = torch.tensor(_used_blocks(row, block_size), device=device)
            chunks.append(ChunkRow(first, last, row.position, blocks))
        first = last
    return AttentionPlan(
        _slots(rows, block_size, kv_heads).to(device),
        chunks,
        _plan_decode(decode, first - len(decode), block_size, device) if decode else None,
    )


def _slots(rows: Sequence[StepRow], block_size: int, kv_heads: int) -> torch.Tensor:
    """Return where each token's keys go, (tokens * kv_heads,)."""
    slots = torch.tensor(token_slots(rows, block_size))
    of_head_0 = slots + slots // block_size * (kv_heads - 1) * block_size
    return (of_head_0[:, None] + torch.arange(kv_heads) * block_size).flatten()


def _used_blocks(row: StepRow, block_size: int) -> list[int]:
    num_keys = row.position + len(row.token_ids)
    return row.block_table[: -(-num_keys // block_size)]


def _plan_decode(
    rows: list[StepRow], first: int, block_size: int, device: torch.device
) -> DecodeRows:
    tables = [_used_blocks(row, block_size) for row in rows]
    runs = find_shared_runs(tables)
    num_shared = [0] * len(rows)  # blocks of each row that are in runs
    for run in runs:
        for place in run.rows:
            num_shared[place] = max(num_shared[place], run.end)
    own = [table[count:] for table, count in zip(tables, num_shared, strict=True)]
    counts = torch.tensor([len(table) for table in own])
    row_of_block = torch.repeat_interleave(torch.arange(len(rows)), counts)
    start_of_row = counts.cumsum(0) - counts
    index_in_row = torch.arange(len(row_of_block)) - start_of_row[row_of_block]
    index_in_row += torch.tensor(num_shared)[row_of_block]
    return DecodeRows(
        first,
        torch.tensor([row.position for row in rows], device=device),
        torch.tensor(list(chain.from_iterable(own)), device=device),
        row_of_block.to(device),
        (index_in_row * block_size).to(device),
        list(_shared_blocks(runs, tables, block_size, device)),
    )


def _shared_blocks(
    runs: list[SharedRun], tables: list[list[int]], block_size: int, device: torch.device
) -> Iterator[SharedBlocks]:
    """Cut runs into pieces that bound the memory of their scores."""
    size = max(1, SHARED_KEYS // block_size)
    for run in runs:
        table = tables[run.rows[0]]
        for start in range(run.start, run.end, size):
            blocks = table[start : min(start + size, run.end)]
            yield SharedBlocks(
                torch.tensor(run.rows, device=device),
                torch.tensor(blocks, device=device),
                start * block_size,
            )


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
        for cache, new in ((self.keys, key), (self.values, value)):
            rows = new[0].transpose(0, 1).reshape(-1, new.shape[-1]).to(cache.dtype)
            cache.view(-1, new.shape[-1]).index_copy_(0, plan.slots, rows)
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for chunk in plan.chunks:
            keys, values = self._gather(chunk, key, value)
            for start in range(chunk.first, chunk.last, QUERY_TILE):
                end = min(start + QUERY_TILE, chunk.last)
                position = chunk.position + start - chunk.first
                out[0, start:end] = chunk_attention(
                    query[0, :, start:end],
                    keys[:, : position + end - start],
                    values[:, : position + end - start],
                    position,
                    scaling,
                    sliding_window,
                    alibi_slopes,
                    softcap,
                    sinks,
                )
        if plan.decode is not None:
            first = plan.decode.first
            out[0, first:] = decode_attention(
                query[0, :, first:].transpose(0, 1),
                self.keys,
                self.values,
                plan.decode,
                scaling,
                sliding_window,
                alibi_slopes,
                softcap,
                sinks,
            )
        return out

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

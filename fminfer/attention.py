"""Attention over the paged KV cache, for packed rows of any lengths.

Linear layers see all tokens of a step in one line, [1, tokens, hidden]; only this module knows
rows. Chunks of prompts (several tokens of one row) are matrix products row by row; decode rows (one
token each) run together, over the flat list of their blocks, so that no row is padded to another.
It knows nothing of models, requests or scheduling.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fminfer.config import AttentionBody
from fminfer.errors import UsageError
from fminfer.messages import StepRow

QUERY_TILE = 128  # query tokens of one product; bounds the memory of the scores
MAX_SCORES = 1 << 24  # elements of one product's scores (64 MB in float32)
LOWEST = torch.finfo(torch.float32).min
COMPILE_AFTER = 7_000_000_000  # elements of the cache read by decode rows, about 10 s of a core
MIN_COMPILED_ROWS = 4

PartialBody = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(slots=True, frozen=True)
class ChunkRow:
    """One prompt chunk: packed tokens [first, last), at `position` of its sequence."""

    first: int
    last: int
    position: int
    blocks: torch.Tensor  # (blocks that hold keys,) int64


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """All decode rows of a step; their blocks stand one after another."""

    first: int  # packed token of the first row; the rows follow it
    positions: torch.Tensor  # (rows,) int64, of the new token
    blocks: torch.Tensor  # (blocks,) int64: ids in the pool
    row_of_block: torch.Tensor  # (blocks,) int64
    block_start: torch.Tensor  # (blocks,) int64: position of each block's first key


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """Everything attention needs to know of a step, made once and used by every layer."""

    slots: torch.Tensor  # (tokens * kv_heads,) int64: where new keys go, in rows of head_dim
    chunks: list[ChunkRow]
    decode: DecodeRows | None


def plan_attention(
    rows: Sequence[StepRow], block_size: int, kv_heads: int, device: torch.device
) -> AttentionPlan:
    """Lay out a step. Rows of one token must come last.

    Args:
        rows: the step's rows in packed order.
        block_size: tokens a block.
        kv_heads: heads of keys, on which a token's place in the cache depends.
    """
    first_slots: list[int] = []  # of each token, for head 0
    chunks: list[ChunkRow] = []
    decode: list[StepRow] = []
    first = 0
    for row in rows:
        last = first + len(row.token_ids)
        for position in range(row.position, row.position + len(row.token_ids)):
            block = row.block_table[position // block_size]
            first_slots.append(block * kv_heads * block_size + position % block_size)
        if len(row.token_ids) == 1:
            decode.append(row)
        else:
            assert not decode, "rows of one token must come after all chunks"
            blocks = torch.tensor(_used_blocks(row, block_size), device=device)
            chunks.append(ChunkRow(first, last, row.position, blocks))
        first = last
    slots = torch.tensor(first_slots)[:, None] + torch.arange(kv_heads) * block_size
    return AttentionPlan(
        slots.flatten().to(device),
        chunks,
        _plan_decode(decode, first - len(decode), block_size, device) if decode else None,
    )


def _used_blocks(row: StepRow, block_size: int) -> list[int]:
    num_keys = row.position + len(row.token_ids)
    return row.block_table[: -(-num_keys // block_size)]


def _plan_decode(
    rows: list[StepRow], first: int, block_size: int, device: torch.device
) -> DecodeRows:
    tables = [_used_blocks(row, block_size) for row in rows]
    counts = torch.tensor([len(table) for table in tables])
    row_of_block = torch.repeat_interleave(torch.arange(len(rows)), counts)
    start_of_row = counts.cumsum(0) - counts
    index_in_row = torch.arange(len(row_of_block)) - start_of_row[row_of_block]
    return DecodeRows(
        first,
        torch.tensor([row.position for row in rows], device=device),
        torch.tensor(list(chain.from_iterable(tables)), device=device),
        row_of_block.to(device),
        (index_in_row * block_size).to(device),
    )


class PagedAttention:
    """One layer's keys and values in blocks, and the product over them.

    Args:
        num_blocks, block_size, num_kv_heads, head_dim: the shape of the cache.
        partial: the body of the decode rows' partial results.
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
        partial: PartialBody,
    ) -> None:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        # Not zeroed, so that the system gives memory only as blocks come into use.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.plan: AttentionPlan | None = None  # the stage sets it before each step
        self._partial = partial

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks, for a sequence that splits from another."""
        self.keys[targets] = self.keys[sources]
        self.values[targets] = self.values[sources]

    def __call__(
        self,
        query: torch.Tensor,  # (1, heads, tokens, head_dim)
        key: torch.Tensor,  # (1, kv_heads, tokens, head_dim)
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        alibi_slopes: torch.Tensor | None = None,  # (heads,) float32
    ) -> torch.Tensor:  # (1, tokens, heads, head_dim)
        """Store the new keys and values, then attend; each row sees only itself, causally.

        A key is seen if 0 <= query position - key position < sliding_window (None: no limit).
        """
        plan = self.plan
        assert plan is not None, "no step is planned"
        for cache, new in ((self.keys, key), (self.values, value)):
            rows = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
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
                self._partial,
            )
        return out

    def _gather(
        self, chunk: ChunkRow, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's keys and values up to the chunk's end, (kv_heads, keys, head_dim)."""
        if chunk.position == 0:  # they are all at hand
            return key[0, :, chunk.first : chunk.last], value[0, :, chunk.first : chunk.last]
        num_keys = chunk.position + chunk.last - chunk.first
        keys, values = (
            cache.index_select(0, chunk.blocks).transpose(0, 1).flatten(1, 2)[:, :num_keys]
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
            )
            for half in halves
        ]
        return torch.cat(parts)
    grouped = (query * scaling).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(1, 2)).view(heads, queries, num_keys)
    distance = _distance(position, queries, num_keys, query.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance
    is_hidden = distance < 0
    if sliding_window is not None:
        is_hidden |= distance >= sliding_window
    scores = scores.masked_fill(is_hidden, float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
    out = weights.view(kv_heads, -1, num_keys) @ values
    return out.view(heads, queries, head_dim).transpose(0, 1)


def _distance(
    position: int, queries: int, num_keys: int, device: torch.device
) -> torch.Tensor:  # (queries, keys) int64
    query_positions = torch.arange(position, position + queries, device=device)
    return query_positions[:, None] - torch.arange(num_keys, device=device)


def decode_attention(
    query: torch.Tensor,  # (rows, heads, head_dim)
    key_blocks: torch.Tensor,  # (pool, kv_heads, block_size, head_dim)
    value_blocks: torch.Tensor,
    rows: DecodeRows,
    scaling: float,
    sliding_window: int | None,
    alibi_slopes: torch.Tensor | None,
    partial: PartialBody,
) -> torch.Tensor:  # (rows, heads, head_dim)
    """Attend from one token a row, over the flat list of all rows' blocks.

    Each block gives a partial result; those of a row are joined by their largest score and their
    sums of exponentials (Milakov and Gimelshein 2018, the "online softmax").
    """
    num_rows, heads, head_dim = query.shape
    kv_heads = key_blocks.shape[1]
    grouped = (query.float() * scaling).view(num_rows, kv_heads, -1, head_dim)
    slopes = None if alibi_slopes is None else alibi_slopes.view(kv_heads, -1, 1)
    largest, total, out = partial(
        grouped,
        key_blocks,
        value_blocks,
        rows.positions,
        rows.blocks,
        rows.row_of_block,
        rows.block_start,
        sliding_window,
        slopes,
    )
    row_of_block = rows.row_of_block
    shape = (num_rows, *largest.shape[1:])
    index = row_of_block[:, None, None].expand_as(largest)
    row_largest = largest.new_full(shape, float("-inf")).scatter_reduce(0, index, largest, "amax")
    factor = torch.exp(largest - row_largest[row_of_block])
    row_total = total.new_zeros(shape).index_add(0, row_of_block, total * factor)
    row_out = out.new_zeros((*shape, head_dim)).index_add(0, row_of_block, out * factor[..., None])
    return (row_out / row_total[..., None]).view(num_rows, heads, head_dim).to(query.dtype)


def block_scores(
    scores: torch.Tensor,  # (blocks, kv_heads, group, block_size)
    distance: torch.Tensor,  # (blocks, block_size)
    sliding_window: int | None,
    slopes: torch.Tensor | None,  # (kv_heads, group, 1)
) -> torch.Tensor:
    """Add ALiBi and hide what a query must not see: a finite lowest value, never nan."""
    if slopes is not None:
        scores = scores - slopes * distance[:, None, None]
    is_hidden = distance < 0
    if sliding_window is not None:
        is_hidden = is_hidden | (distance >= sliding_window)
    return torch.where(is_hidden[:, None, None], LOWEST, scores)


def eager_partial(
    grouped: torch.Tensor,  # (rows, kv_heads, group, head_dim) float32, scaled
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    row_of_block: torch.Tensor,
    block_start: torch.Tensor,
    sliding_window: int | None,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each block's largest score, sum of exponentials and weighted values, by products.

    Shapes: (blocks, kv_heads, group), the same, (blocks, kv_heads, group, head_dim); float32.
    """
    offsets = torch.arange(key_blocks.shape[2], device=grouped.device)
    distance = (positions[row_of_block] - block_start)[:, None] - offsets
    scores = grouped[row_of_block] @ key_blocks.index_select(0, blocks).float().transpose(2, 3)
    scores = block_scores(scores, distance, sliding_window, slopes)
    largest = scores.amax(-1)
    weights = torch.exp(scores - largest[..., None])
    values = value_blocks.index_select(0, blocks).float()
    # Past a row's end lies what another row left, or nothing: 0 times it might still be nan.
    ends = (distance[:, -1] < 0).nonzero()[:, 0]
    values[ends] = values[ends].masked_fill((distance[ends] < 0)[:, None, :, None], 0.0)
    return largest, weights.sum(-1), weights @ values


def fusable_partial(
    grouped: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    row_of_block: torch.Tensor,
    block_start: torch.Tensor,
    sliding_window: int | None,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same as `eager_partial` in sums that torch.compile fuses, blocks read in place."""
    offsets = torch.arange(key_blocks.shape[2], device=grouped.device)
    distance = (positions[row_of_block] - block_start)[:, None] - offsets
    keys = key_blocks[blocks].float()[:, :, None]
    scores = (grouped[row_of_block][..., None, :] * keys).sum(-1)
    scores = block_scores(scores, distance, sliding_window, slopes)
    largest = scores.amax(-1)
    weights = torch.exp(scores - largest[..., None])
    is_past = (distance < 0)[:, None, :, None]
    values = torch.where(is_past, 0.0, value_blocks[blocks].float())[:, :, None]
    return largest, weights.sum(-1), (weights[..., None] * values).sum(3)


class PartialAttention:
    """Chooses between the two bodies of the partial result: eager at first, compiled for big jobs.

    Compiling costs 5 to 40 seconds, once in a machine's life (torch caches it on disk), so `auto`
    waits until the eager body has read so much that compiling pays. It counts work, not seconds: a
    run repeated makes the same choices. Without a C++ compiler `auto` stays eager.
    """

    def __init__(self, body: AttentionBody, device: torch.device) -> None:
        can_compile = device.type == "cpu" and has_compiler()
        if body == "compiled" and not can_compile:
            raise UsageError(
                "attention compiled needs a C++ compiler (g++) and a CPU; install one or use auto"
            )
        limits = {"auto": COMPILE_AFTER if can_compile else None, "eager": None, "compiled": 0}
        self._compile_after = limits[body]
        self._num_read = 0  # elements of the cache
        self._compiled: PartialBody | None = None

    def __call__(self, grouped: torch.Tensor, key_blocks: torch.Tensor, *args: Any) -> Any:
        num_blocks = len(args[2])
        self._num_read += 2 * num_blocks * key_blocks[0].numel()
        if self._compile_after is None or self._num_read < self._compile_after:
            return eager_partial(grouped, key_blocks, *args)
        if len(grouped) < MIN_COMPILED_ROWS:  # sizes of 1 would be compiled once more
            return eager_partial(grouped, key_blocks, *args)
        if self._compiled is None:
            self._compiled = torch.compile(fusable_partial, dynamic=True)
        return self._compiled(grouped, key_blocks, *args)


def has_compiler() -> bool:
    """Tell whether torch.compile can build for the CPU here."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None

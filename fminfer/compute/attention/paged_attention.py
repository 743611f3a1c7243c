"""Attention over the paged KV cache, for packed rows of any lengths.

Chunks of prompts (several tokens of one row) are matrix products row by row; decode rows (one token
each) run together, over the flat list of their blocks, so that no row is padded to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from fminfer.compute.attention.scoring import AttentionCall, Scoring, weigh_values
from fminfer.compute.step import Column, Rows, ranges
from fminfer.machine.device import send

MIN_ROWS = 4  # fewer rows gain too little from one product
SHARED_KEYS = 512  # shared keys in one product of decode rows
MAX_SCORES = 1 << 24  # elements of one product's scores (64 MB in float32)
QUERY_TILE = 128  # query tokens of one product; bounds the memory of the scores
LOWEST = torch.finfo(torch.float32).min
MAX_GATHERED = 2 << 20  # elements of the cache that are copied at once (8 MB)


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Blocks [start, end) of the tables of `rows`, equal in all of them."""

    rows: Column  # int64, in order
    start: int
    end: int


def find_shared_runs(rows: Rows, block_size: int) -> list[SharedRun]:
    """List runs of equal blocks, from the tables' start on; behind each run, those of its rows.

    A table's last block is its own: it is still being written.
    """
    runs: list[SharedRun] = []
    tables, num_full = rows.tables, rows.num_blocks(block_size) - 1
    pending = [(np.arange(len(rows)), 0)]
    while pending:
        places, start = pending.pop()
        for group in _same_at(places[num_full[places] > start], rows, start):
            of, last = rows.table_of[group], int(num_full[group].min())
            differs = (tables[of, start:last] != tables[of[0], start:last]).any(0)
            end = start + int(differs.argmax()) if differs.any() else last
            runs.append(SharedRun(group, start, end))
            pending.append((group, end))
    return runs


def _same_at(places: Column, rows: Rows, start: int) -> list[Column]:
    """Group the rows that have the same block at a place; small groups are left out."""
    if len(places) < MIN_ROWS:
        return []
    blocks = rows.tables[rows.table_of[places], start]
    _, first, counts = np.unique(blocks, return_index=True, return_counts=True)
    return [places[blocks == blocks[each]] for each in np.sort(first[counts >= MIN_ROWS])]


@dataclass(slots=True, frozen=True)
class SharedBlocks:
    """Blocks that several rows see in full, such as a prefix they share."""

    rows: torch.Tensor  # (sharing rows,) int64
    blocks: torch.Tensor  # (blocks,) int64: ids in the pool
    start: int  # position of the first key


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """All decode rows of a step; the blocks that each has alone stand one after another."""

    first: int  # packed token of the first row; the rows follow it
    positions: torch.Tensor  # (rows,) int64, of the new token
    blocks: torch.Tensor  # (blocks,) int64: ids in the pool
    row_of_block: torch.Tensor  # (blocks,) int64
    block_start: torch.Tensor  # (blocks,) int64: position of each block's first key
    shared: list[SharedBlocks] = field(default_factory=list)

    def pieces(self, size: int) -> Iterator[DecodeRows]:
        """Cut them into rows with at most so many blocks of their own."""
        columns = (self.blocks, self.row_of_block, self.block_start)
        for piece in zip(*(torch.split(each, size) for each in columns), strict=True):
            yield DecodeRows(self.first, self.positions, *piece)


@dataclass(slots=True, frozen=True)
class ChunkRow:
    """One prompt chunk: packed tokens [first, last), at `position` of its sequence."""

    first: int
    last: int
    position: int
    blocks: torch.Tensor  # (blocks that hold keys,) int64


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """What plain attention needs to know of a step."""

    slots: torch.Tensor  # (tokens * kv_heads,) int64: where new keys go, in rows of head_dim
    chunks: list[ChunkRow]
    decode: DecodeRows | None
    kept: torch.Tensor | None = None  # int64: the tokens whose output is wanted; None: all

    def keep(self, tokens: torch.Tensor) -> AttentionPlan:
        """Return the plan that gives outputs of these tokens only."""
        return replace(self, kept=tokens)


def _slots(rows: Rows, block_size: int, kv_heads: int) -> torch.Tensor:
    """Return where each token's keys go, (tokens * kv_heads,)."""
    slots = torch.from_numpy(rows.slots(block_size))
    of_head_0 = slots + slots // block_size * (kv_heads - 1) * block_size
    return (of_head_0[:, None] + torch.arange(kv_heads) * block_size).flatten()


def _plan_decode(rows: Rows, first: int, block_size: int, device: torch.device) -> DecodeRows:
    runs, counts = find_shared_runs(rows, block_size), rows.num_blocks(block_size)
    num_shared = np.zeros(len(rows), np.int64)  # blocks of each row that are in runs
    for run in runs:
        num_shared[run.rows] = np.maximum(num_shared[run.rows], run.end)
    row_of_block, places = np.repeat(np.arange(len(rows)), counts), ranges(0 * counts, counts)
    is_own = places >= num_shared[row_of_block]
    columns = (rows.blocks(block_size), row_of_block, places * block_size)
    own = (column[is_own].astype(np.int64) for column in columns)
    positions, blocks, row_of, start = send([rows.positions, *own], device)
    shared = list(_shared_blocks(runs, rows, block_size, device))
    return DecodeRows(first, positions, blocks, row_of, start, shared)


def _shared_blocks(
    runs: list[SharedRun], rows: Rows, block_size: int, device: torch.device
) -> Iterator[SharedBlocks]:
    """Cut runs into pieces that bound the memory of their scores."""
    size = max(1, SHARED_KEYS // block_size)
    for run in runs:
        table = rows.tables[rows.table_of[run.rows[0]]]
        for start in range(run.start, run.end, size):
            blocks = table[start : min(start + size, run.end)].astype(np.int64)
            sharing, sent = send([run.rows, blocks], device)
            yield SharedBlocks(sharing, sent, start * block_size)


def chunk_attention(
    query: torch.Tensor,  # (heads, queries, head_dim)
    keys: torch.Tensor,  # (kv_heads, keys, head_dim), from position 0 up to what is seen
    values: torch.Tensor,
    position: int,
    how: Scoring,
) -> torch.Tensor:  # (queries, heads, head_dim)
    """Attend from consecutive tokens of one row, the first at `position`, to what they see."""
    heads, queries, head_dim = query.shape
    kv_heads, num_keys, _ = keys.shape
    tile = max(1, MAX_SCORES // (heads * num_keys))
    if queries > tile:  # a very long context: fewer queries at a time
        parts, first = [], 0
        for part in torch.split(query, tile, 1):
            seen = position + first + part.shape[1] + how.ahead
            given = part, keys[:, :seen], values[:, :seen], position + first
            parts.append(chunk_attention(*given, how))
            first += part.shape[1]
        return torch.cat(parts)
    grouped = (query * how.scaling).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(1, 2)).view(heads, queries, num_keys)
    places = torch.arange(max(num_keys, position + queries), device=query.device)
    distance = places[position : position + queries, None] - places[:num_keys]
    scores, is_hidden = how.bend(scores, distance)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if how.sinks is not None:
        scores = torch.cat([scores, how.sinks.to(scores)[:, None, None].expand(-1, queries, 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., :num_keys].to(values.dtype)
    weights = weights.reshape(kv_heads, -1, num_keys)
    out = weigh_values(weights, values, is_hidden.repeat(heads // kv_heads, 1))
    return out.view(heads, queries, head_dim).transpose(0, 1)


def decode_attention(
    query: torch.Tensor,  # (rows, heads, head_dim)
    key_blocks: torch.Tensor,  # (pool, kv_heads, block_size, head_dim)
    value_blocks: torch.Tensor,
    rows: DecodeRows,
    how: Scoring,
) -> torch.Tensor:  # (rows, heads, head_dim)
    """Attend from one token a row, over the flat list of all rows' blocks and what they share.

    Each block gives a partial result; those of a row are joined by their largest score and their
    sums of exponentials (Milakov and Gimelshein 2018, the "online softmax").
    """
    num_rows, heads, head_dim = query.shape
    kv_heads = key_blocks.shape[1]
    how = replace(how, ahead=0)  # behind a row's newest token is nothing of its own
    grouped = (query.float() * how.scaling).view(num_rows, kv_heads, -1, head_dim)
    # A bounded number of blocks at a time: memory that is used again costs no page faults.
    pieces = rows.pieces(max(1, MAX_GATHERED // key_blocks[0].numel()))
    parts = [_block_partial(grouped, key_blocks, value_blocks, each, how) for each in pieces]
    parts += [
        _shared_partial(grouped, key_blocks, value_blocks, rows.positions, shared, how)
        for shared in rows.shared
    ]
    largest, total, out = map(torch.cat, zip(*parts, strict=True))
    row_of_block = torch.cat([rows.row_of_block, *(shared.rows for shared in rows.shared)])
    shape = (num_rows, *largest.shape[1:])
    index = row_of_block[:, None, None].expand_as(largest)
    row_largest = largest.new_full(shape, float("-inf")).scatter_reduce(0, index, largest, "amax")
    factor = torch.exp(largest - row_largest[row_of_block])
    row_total = total.new_zeros(shape).index_add(0, row_of_block, total * factor)
    row_out = out.new_zeros((*shape, head_dim)).index_add(0, row_of_block, out * factor[..., None])
    if how.sinks is not None:  # a key more, which has no value
        of_sink = how.sinks.view(kv_heads, -1)
        most = torch.maximum(row_largest, of_sink)
        fade = torch.exp(row_largest - most)
        row_total = row_total * fade + torch.exp(of_sink - most)
        row_out = row_out * fade[..., None]
    return (row_out / row_total[..., None]).view(num_rows, heads, head_dim).to(query.dtype)


def _weigh(
    scores: torch.Tensor,  # (blocks, kv_heads, group, keys)
    distance: torch.Tensor,  # (blocks, keys): query position - key position
    how: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which keys are hidden, the largest scores, and the exponentials of the others.

    Hidden keys have a finite lowest score, so that nothing becomes nan.
    """
    bent, is_hidden = how.bend(scores.flatten(1, 2).transpose(0, 1), distance)
    scores = bent.masked_fill(is_hidden, LOWEST).transpose(0, 1).reshape(scores.shape)
    largest = scores.amax(-1)
    return is_hidden, largest, torch.exp(scores - largest[..., None])


Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _block_partial(
    grouped: torch.Tensor,  # (rows, kv_heads, group, head_dim) float32, scaled
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    rows: DecodeRows,
    how: Scoring,
) -> Partial:
    """Return each block's largest score, sum of exponentials and weighted values, by products.

    (blocks, kv_heads, group), the same, and (blocks, kv_heads, group, head_dim); float32.
    """
    offsets = torch.arange(key_blocks.shape[2], device=grouped.device)
    distance = (rows.positions[rows.row_of_block] - rows.block_start)[:, None] - offsets
    scores = grouped[rows.row_of_block] @ _floats(key_blocks, rows.blocks).transpose(2, 3)
    is_hidden, largest, weights = _weigh(scores, distance, how)
    values = _floats(value_blocks, rows.blocks)
    # Past a row's end lies what another row left, or nothing: 0 times it might still be nan.
    values.masked_fill_(is_hidden[:, None, :, None], 0.0)
    return largest, weights.sum(-1), weights @ values


def _floats(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return cache.index_select(0, blocks).float()


def _shared_partial(
    grouped: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    positions: torch.Tensor,
    shared: SharedBlocks,
    how: Scoring,
) -> Partial:
    """Return the same for blocks that rows share, one entry a row: all queries in one product."""
    _, kv_heads, group, head_dim = grouped.shape
    num_rows = len(shared.rows)
    keys, values = (
        _floats(cache, shared.blocks).transpose(0, 1).flatten(1, 2)
        for cache in (key_blocks, value_blocks)
    )  # (kv_heads, keys, head_dim)
    query = grouped[shared.rows].transpose(0, 1).reshape(kv_heads, num_rows * group, head_dim)
    scores = (query @ keys.transpose(1, 2)).view(kv_heads, num_rows, group, -1).transpose(0, 1)
    key_positions = torch.arange(shared.start, shared.start + keys.shape[1], device=grouped.device)
    is_hidden, largest, weights = _weigh(
        scores, positions[shared.rows][:, None] - key_positions, how
    )
    grouped = weights.transpose(0, 1).reshape(kv_heads, num_rows * group, -1)
    out = weigh_values(grouped, values, is_hidden.repeat_interleave(group, 0))
    out = out.view(kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return largest, weights.sum(-1), out


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
    """Attention in plain tensor operations, on any device: the reference."""

    def __init__(self, kv_heads: int, device: torch.device) -> None:
        self._kv_heads, self._device = kv_heads, device

    def plan(self, rows: Rows, block_size: int) -> AttentionPlan:
        """Lay out a step. Rows of one token are computed together if they come last."""
        device = self._device
        # A step that is cut may leave one token of a chunk; before chunks it is one, too.
        several = np.flatnonzero(rows.lengths > 1)
        num_chunks = int(several[-1]) + 1 if len(several) else 0
        tables = np.split(rows.blocks(block_size), rows.num_blocks(block_size).cumsum()[:-1])
        firsts, positions = rows.firsts.tolist(), rows.positions.tolist()
        lengths = rows.lengths.tolist()[:num_chunks]
        chunks = [
            ChunkRow(first, first + num, position, torch.from_numpy(table).to(device, torch.int64))
            for num, first, position, table in zip(lengths, firsts, positions, tables, strict=False)
        ]
        decode = rows.part(slice(num_chunks, None))
        return AttentionPlan(
            _slots(rows, block_size, self._kv_heads).to(device),
            chunks,
            _plan_decode(decode, firsts[num_chunks], block_size, device) if len(decode) else None,
        )

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
            for start in range(chunk.first, chunk.last, QUERY_TILE):
                end = min(start + QUERY_TILE, chunk.last)
                position = chunk.position + start - chunk.first
                seen = position + end - start + how.ahead
                out[0, start:end] = chunk_attention(
                    query[0, :, start:end], all_keys[:, :seen], all_values[:, :seen], position, how
                )
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

"""Attention over the paged KV cache, for packed rows of any lengths.

Chunks of prompts (several tokens of one row) are matrix products row by row. Decode
rows (one token each) run together, over the flat list of their blocks. No row is padded
to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from fminfer.compute.attention.scoring import AttentionCall, Scoring, weigh_values
from fminfer.compute.values.step import Column, Rows, join_ranges
from fminfer.machine.device import send_columns

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


def find_shared_runs(rows: Rows, block_size: int, unit: int = 1) -> list[SharedRun]:
    """List runs of equal blocks, from the tables' start on; behind each run, those of its rows.

    They begin and end at multiples of `unit` blocks. A table's last block is its own: it
    is still being written.
    """
    runs: list[SharedRun] = []
    tables = rows.tables
    num_full = rows.num_blocks(block_size) - 1
    pending = [(np.arange(len(rows)), 0)]
    while pending:
        places, start = pending.pop()
        behind = start + unit
        is_long = num_full[places] >= behind
        for group in _group_by_block(places[is_long], rows, behind - 1):
            table_of = rows.table_of[group]
            last = int(num_full[group].min()) // unit * unit
            differs = (
                tables[table_of, start:last] != tables[table_of[0], start:last]
            ).any(0)
            end = (
                start + int(differs.argmax()) // unit * unit if differs.any() else last
            )
            if end > start:
                runs.append(SharedRun(group, start, end))
                pending.append((group, end))
    return runs


def _group_by_block(places: Column, rows: Rows, start: int) -> list[Column]:
    """Group the rows that have the same block at a place; small groups are left out."""
    if len(places) < MIN_ROWS:
        return []
    blocks = rows.tables[rows.table_of[places], start]
    _, first, counts = np.unique(blocks, return_index=True, return_counts=True)
    return [
        places[blocks == blocks[each]] for each in np.sort(first[counts >= MIN_ROWS])
    ]


@dataclass(slots=True, frozen=True)
class SeenBlocks:
    """Blocks that decode rows see. An entry is one row and a block of its own, or rows
    that share.

    The blocks of an entry follow each other in the sequences of all its rows.
    """

    rows: torch.Tensor  # (entries, rows) int64
    blocks: torch.Tensor  # (entries, blocks) int64: ids in the pool
    starts: torch.Tensor  # (entries,) int64: position of the first key

    def split(self, size: int) -> Iterator[SeenBlocks]:
        """Give parts of at most so many entries."""
        columns = (self.rows, self.blocks, self.starts)
        return map(SeenBlocks, *(torch.split(each, size) for each in columns))


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """All decode rows of a step."""

    first: int  # packed token of the first row; the rows follow it
    positions: torch.Tensor  # (rows,) int64, of the new token
    seen: list[SeenBlocks]


@dataclass(slots=True, frozen=True)
class ChunkRow:
    """One prompt chunk: packed tokens [first, last), at `position` of its sequence."""

    first: int
    last: int
    position: int
    blocks: torch.Tensor  # (blocks that hold keys,) int64


@dataclass(slots=True, frozen=True)
class PlainLayout:
    """What plain attention needs to know of a step."""

    blocks: torch.Tensor  # (tokens,) int64: where new keys go
    places: torch.Tensor  # the same: and where in these blocks
    chunks: list[ChunkRow]
    decode: DecodeRows | None


def _lay_out_decode_rows(
    rows: Rows, first: int, block_size: int, device: torch.device
) -> DecodeRows:
    runs = find_shared_runs(rows, block_size)
    counts = rows.num_blocks(block_size)
    num_shared = np.zeros(len(rows), np.int64)  # blocks of each row that are in runs
    for run in runs:
        num_shared[run.rows] = np.maximum(num_shared[run.rows], run.end)
    row_of_block = np.repeat(np.arange(len(rows)), counts)
    places = join_ranges(0 * counts, counts)
    is_own = places >= num_shared[row_of_block]
    columns = (rows.blocks(block_size), row_of_block, places * block_size)
    own_columns = (column[is_own].astype(np.int64) for column in columns)
    positions, blocks, row_of_own, start = send_columns(
        [rows.positions, *own_columns], device
    )
    alone = SeenBlocks(row_of_own[:, None], blocks[:, None], start)
    return DecodeRows(
        first, positions, [alone, *_split_shared_runs(runs, rows, block_size, device)]
    )


def _split_shared_runs(
    runs: list[SharedRun], rows: Rows, block_size: int, device: torch.device
) -> Iterator[SeenBlocks]:
    """Cut runs into pieces that bound the memory of their scores."""
    size = max(1, SHARED_KEYS // block_size)
    for run in runs:
        table = rows.tables[rows.table_of[run.rows[0]]]
        for start in range(run.start, run.end, size):
            blocks = table[start : min(start + size, run.end)].astype(np.int64)
            columns = run.rows, blocks, np.array([start * block_size])
            sharing, sent, starts = send_columns(columns, device)
            yield SeenBlocks(sharing[None], sent[None], starts)


def attend_chunk(
    query: torch.Tensor,  # (heads, queries, head_dim)
    # (kv_heads, keys, head_dim), from position 0 up to what is seen
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    scoring: Scoring,
) -> torch.Tensor:  # (queries, heads, head_dim)
    """Attend from consecutive tokens of one row, the first at `position`, to what they see."""
    heads, queries, head_dim = query.shape
    kv_heads, num_keys, _ = keys.shape
    tile = max(1, MAX_SCORES // (heads * num_keys))
    if queries > tile:  # a very long context: fewer queries at a time
        parts = []
        first = 0
        for part in torch.split(query, tile, 1):
            seen = position + first + part.shape[1] + scoring.ahead
            parts.append(
                attend_chunk(
                    part, keys[:, :seen], values[:, :seen], position + first, scoring
                )
            )
            first += part.shape[1]
        return torch.cat(parts)
    grouped = (query * scoring.scaling).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(1, 2)).view(heads, queries, num_keys)
    places = torch.arange(max(num_keys, position + queries), device=query.device)
    distance = places[position : position + queries, None] - places[:num_keys]
    scores, is_hidden = scoring.bias_and_mask(scores, distance)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if scoring.sinks is not None:
        scores = torch.cat(
            [scores, scoring.sinks.to(scores)[:, None, None].expand(-1, queries, 1)], -1
        )
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., :num_keys].to(
        values.dtype
    )
    weights = weights.reshape(kv_heads, -1, num_keys)
    out = weigh_values(weights, values, is_hidden.repeat(heads // kv_heads, 1))
    return out.view(heads, queries, head_dim).transpose(0, 1)


def attend_decode_rows(
    query: torch.Tensor,  # (rows, heads, head_dim)
    key_blocks: torch.Tensor,  # (pool, kv_heads, block_size, head_dim)
    value_blocks: torch.Tensor,
    rows: DecodeRows,
    scoring: Scoring,
) -> torch.Tensor:  # (rows, heads, head_dim)
    """Attend from one token a row, over the flat list of all rows' blocks and what they share.

    Each entry gives partial results; those of a row are joined by their largest score and their
    sums of exponentials (Milakov and Gimelshein 2018, the "online softmax").
    """
    num_rows, heads, head_dim = query.shape
    kv_heads = key_blocks.shape[1]
    # Behind a row's newest token is nothing of its own.
    scoring = replace(scoring, ahead=0)
    grouped = (query.float() * scoring.scaling).view(num_rows, kv_heads, -1, head_dim)
    # A bounded number of blocks at a time: memory that is used again costs no page faults.
    size = max(1, MAX_GATHERED // key_blocks[0].numel())
    seen = [part for each in rows.seen for part in each.split(size)]
    caches = key_blocks, value_blocks
    parts = [
        _attend_entries(grouped, caches, rows.positions, each, scoring) for each in seen
    ]
    largest, total, out = map(torch.cat, zip(*parts, strict=True))
    row_of = torch.cat([each.rows.flatten() for each in seen])
    shape = (num_rows, *largest.shape[1:])
    index = row_of[:, None, None].expand_as(largest)
    row_largest = largest.new_full(shape, float("-inf")).scatter_reduce(
        0, index, largest, "amax"
    )
    factor = torch.exp(largest - row_largest[row_of])
    row_total = total.new_zeros(shape).index_add(0, row_of, total * factor)
    row_out = out.new_zeros((*shape, head_dim)).index_add(
        0, row_of, out * factor[..., None]
    )
    if scoring.sinks is not None:  # a key more, which has no value
        of_sink = scoring.sinks.view(kv_heads, -1)
        most = torch.maximum(row_largest, of_sink)
        fade = torch.exp(row_largest - most)
        row_total = row_total * fade + torch.exp(of_sink - most)
        row_out = row_out * fade[..., None]
    return (
        (row_out / row_total[..., None]).view(num_rows, heads, head_dim).to(query.dtype)
    )


def _attend_entries(
    grouped: torch.Tensor,  # (all rows, kv_heads, group, head_dim) float32, scaled
    caches: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,  # (all rows,)
    seen: SeenBlocks,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's largest score, sum of exponentials and weighted values, by products.

    (entries * rows, kv_heads, group), the same, and (…, head_dim); float32. All queries
    of an entry are in one product. Hidden keys have a finite lowest score, so that
    nothing becomes nan.
    """
    (entries, rows) = seen.rows.shape
    (_, kv_heads, group, head_dim) = grouped.shape
    keys, values = (
        cache.index_select(0, seen.blocks.flatten())
        .float()
        .view(entries, -1, *cache.shape[1:])
        .transpose(1, 2)
        .flatten(2, 3)
        for cache in caches
    )  # (entries, kv_heads, keys, head_dim)
    sizes = entries, kv_heads, rows, group, keys.shape[2]
    query = grouped[seen.rows].transpose(1, 2).flatten(2, 3)
    scores = (
        (query @ keys.transpose(2, 3)).view(sizes).permute(1, 3, 0, 2, 4).flatten(0, 1)
    )
    places = seen.starts[:, None] + torch.arange(keys.shape[2], device=grouped.device)
    scores, is_hidden = scoring.bias_and_mask(
        scores, positions[seen.rows][..., None] - places[:, None]
    )
    scores = scores.masked_fill(is_hidden, LOWEST)  # (heads, entries, rows, keys)
    largest = scores.amax(-1)
    weights = torch.exp(scores - largest[..., None])
    by_product = (
        weights.view(kv_heads, group, *is_hidden.shape)
        .permute(2, 0, 3, 1, 4)
        .flatten(2, 3)
    )
    if rows == 1:
        # Past a row's end lies what another row left, or nothing: 0 times it might still be nan.
        out = by_product @ values.masked_fill_(is_hidden[:, :, :, None], 0.0)
    else:
        out = weigh_values(
            by_product, values, is_hidden.repeat_interleave(group, 1)[:, None]
        )
    largest, total = (
        each.permute(1, 2, 0).flatten(0, 1) for each in (largest, weights.sum(-1))
    )
    out = (
        out.view(entries, kv_heads, rows, group, head_dim).transpose(1, 2).flatten(0, 1)
    )
    return largest.view(out.shape[:-1]), total.view(out.shape[:-1]), out


class AttentionKernel(Protocol):
    """What attends over a layer's cache: plain torch, kernel_attention or triton_attention."""

    def lay_out(self, rows: Rows, block_size: int) -> Any:
        """Lay out a step's rows, in packed order, as the body reads them."""

    def skip_tokens(self, layout: Any, kept: torch.Tensor) -> Any:
        """Return a plan that may leave out the outputs of all but some tokens, int64,
        in order."""
        return layout

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Put the new keys and values into the cache, then attend; each row sees only itself.

        They are rounded to the cache's type, and attended to as they are kept.

        Returns:
            (1, tokens, heads, head_dim).

        Raises:
            MemoryError: there was none for the threads' working space.
        """


class PlainAttention(AttentionKernel):
    """Attention in plain tensor operations, on any device: the reference."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lay_out(self, rows: Rows, block_size: int) -> PlainLayout:
        """Lay out a step. Rows of one token are computed together if they come last."""
        device = self._device
        # A step that is cut may leave one token of a chunk; before chunks it is one, too.
        several = np.flatnonzero(rows.lengths > 1)
        num_chunks = int(several[-1]) + 1 if len(several) else 0
        tables = np.split(
            rows.blocks(block_size), rows.num_blocks(block_size).cumsum()[:-1]
        )
        firsts = rows.first_tokens.tolist()
        positions = rows.positions.tolist()
        lengths = rows.lengths.tolist()[:num_chunks]
        chunks = [
            ChunkRow(
                first,
                first + num,
                position,
                torch.from_numpy(table).to(device, torch.int64),
            )
            for num, first, position, table in zip(
                lengths, firsts, positions, tables, strict=False
            )
        ]
        blocks, places = send_columns(
            np.divmod(rows.key_places(block_size), block_size), device
        )
        decode = None
        decode_rows = rows.select(slice(num_chunks, None))
        if len(decode_rows):
            decode = _lay_out_decode_rows(
                decode_rows, firsts[num_chunks], block_size, device
            )
        return PlainLayout(blocks, places, chunks, decode)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        query = call.query
        scoring = call.scoring
        layout: PlainLayout = call.layout
        new = (call.new_keys[0], call.new_values[0])
        caches = (call.keys, call.values)
        for cache, each in zip(caches, new, strict=True):
            cache[layout.blocks, :, layout.places] = each.transpose(0, 1).to(
                cache.dtype
            )
        out = torch.empty_like(
            query.transpose(1, 2), memory_format=torch.contiguous_format
        )
        for chunk in layout.chunks:
            all_keys, all_values = map(partial(_gather_chunk, chunk), new, caches)
            for start in range(chunk.first, chunk.last, QUERY_TILE):
                end = min(start + QUERY_TILE, chunk.last)
                position = chunk.position + start - chunk.first
                seen = position + end - start + scoring.ahead
                out[0, start:end] = attend_chunk(
                    query[0, :, start:end],
                    all_keys[:, :seen],
                    all_values[:, :seen],
                    position,
                    scoring,
                )
        if layout.decode is not None:
            first = layout.decode.first
            decode_query = query[0, :, first:].transpose(0, 1)
            out[0, first:] = attend_decode_rows(
                decode_query, *caches, layout.decode, scoring
            )
        return out


def _gather_chunk(
    chunk: ChunkRow, new: torch.Tensor, cache: torch.Tensor
) -> torch.Tensor:
    """Return a row's keys or values up to the chunk's end, (kv_heads, keys, head_dim).

    They are of the type of new ones, and rounded as they are kept.
    """
    if chunk.position == 0:  # they are all at hand
        return new[:, chunk.first : chunk.last].to(cache.dtype).to(new.dtype)
    num_keys = chunk.position + chunk.last - chunk.first
    kept = (
        cache.index_select(0, chunk.blocks).transpose(0, 1).flatten(1, 2)[:, :num_keys]
    )
    return kept.to(new.dtype)

"""Attention of decode rows, one token each, over all rows' KV blocks, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from fminfer.compute.attention.scoring import Scoring, soft_cap, weigh_values

LOWEST = torch.finfo(torch.float32).min
MAX_GATHERED = 2 << 20  # elements of the cache that are copied at once (8 MB)


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
    if how.softcap is not None:
        scores = soft_cap(scores, how.softcap)
    if how.slopes is not None:
        slopes = how.slopes.view(scores.shape[1], -1, 1)
        scores = scores - slopes * distance[:, None, None]
    if how.relative is not None:
        biases = how.biases(distance).view(*scores.shape[1:3], *distance.shape)
        scores = scores + biases.movedim(2, 0)
    is_hidden = how.hides(distance)
    scores = torch.where(is_hidden[:, None, None], LOWEST, scores)
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

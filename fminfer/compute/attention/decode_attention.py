"""Attention of decode rows, one token each, over the flat list of all rows' KV blocks.

In plain tensor operations, for any device; kernel_attention is faster where it can be built.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fminfer.compute.attention.weighed_values import weigh_values
from fminfer.compute.soft_cap import soft_cap

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


def decode_attention(
    query: torch.Tensor,  # (rows, heads, head_dim)
    key_blocks: torch.Tensor,  # (pool, kv_heads, block_size, head_dim)
    value_blocks: torch.Tensor,
    rows: DecodeRows,
    scaling: float,
    sliding_window: int | None,
    alibi_slopes: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,  # (heads,) float32
) -> torch.Tensor:  # (rows, heads, head_dim)
    """Attend from one token a row, over the flat list of all rows' blocks and what they share.

    Each block gives a partial result; those of a row are joined by their largest score and their
    sums of exponentials (Milakov and Gimelshein 2018, the "online softmax").
    """
    num_rows, heads, head_dim = query.shape
    kv_heads = key_blocks.shape[1]
    grouped = (query.float() * scaling).view(num_rows, kv_heads, -1, head_dim)
    slopes = None if alibi_slopes is None else alibi_slopes.view(kv_heads, -1, 1)
    how = (sliding_window, slopes, softcap)
    parts = [
        block_partial(
            grouped,
            key_blocks,
            value_blocks,
            rows.positions,
            rows.blocks,
            rows.row_of_block,
            rows.block_start,
            *how,
        )
    ]
    parts += [
        shared_partial(grouped, key_blocks, value_blocks, rows.positions, shared, *how)
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
    if sinks is not None:  # a key more, which has no value
        of_sink = sinks.view(kv_heads, -1)
        most = torch.maximum(row_largest, of_sink)
        fade = torch.exp(row_largest - most)
        row_total = row_total * fade + torch.exp(of_sink - most)
        row_out = row_out * fade[..., None]
    return (row_out / row_total[..., None]).view(num_rows, heads, head_dim).to(query.dtype)


def block_scores(
    scores: torch.Tensor,  # (blocks, kv_heads, group, block_size)
    distance: torch.Tensor,  # (blocks, block_size)
    is_hidden: torch.Tensor,  # (blocks, block_size)
    slopes: torch.Tensor | None,  # (kv_heads, group, 1)
    softcap: float | None,
) -> torch.Tensor:
    """Cap, add ALiBi and hide what a query must not see: a finite lowest value, never nan."""
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    if slopes is not None:
        scores = scores - slopes * distance[:, None, None]
    return torch.where(is_hidden[:, None, None], LOWEST, scores)


def _hides(distance: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    is_hidden = distance < 0
    return is_hidden if sliding_window is None else is_hidden | (distance >= sliding_window)


def block_partial(
    grouped: torch.Tensor,  # (rows, kv_heads, group, head_dim) float32, scaled
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    row_of_block: torch.Tensor,
    block_start: torch.Tensor,
    sliding_window: int | None,
    slopes: torch.Tensor | None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each block's largest score, sum of exponentials and weighted values, by products.

    Shapes: (blocks, kv_heads, group), the same, (blocks, kv_heads, group, head_dim); float32. A
    bounded number of blocks is gathered at a time: memory that is used again costs no page faults.
    """
    size = max(1, MAX_GATHERED // key_blocks[0].numel())
    if len(blocks) > size:
        parts = [
            block_partial(
                grouped,
                key_blocks,
                value_blocks,
                positions,
                blocks[start : start + size],
                row_of_block[start : start + size],
                block_start[start : start + size],
                sliding_window,
                slopes,
                softcap,
            )
            for start in range(0, len(blocks), size)
        ]
        largest, total, out = map(torch.cat, zip(*parts, strict=True))
        return largest, total, out
    offsets = torch.arange(key_blocks.shape[2], device=grouped.device)
    distance = (positions[row_of_block] - block_start)[:, None] - offsets
    scores = grouped[row_of_block] @ key_blocks.index_select(0, blocks).float().transpose(2, 3)
    is_hidden = _hides(distance, sliding_window)
    scores = block_scores(scores, distance, is_hidden, slopes, softcap)
    largest = scores.amax(-1)
    weights = torch.exp(scores - largest[..., None])
    values = value_blocks.index_select(0, blocks).float()
    # Past a row's end lies what another row left, or nothing: 0 times it might still be nan.
    cut = is_hidden.any(-1).nonzero()[:, 0]
    values[cut] = values[cut].masked_fill(is_hidden[cut][:, None, :, None], 0.0)
    return largest, weights.sum(-1), weights @ values


def shared_partial(
    grouped: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    positions: torch.Tensor,
    shared: SharedBlocks,
    sliding_window: int | None,
    slopes: torch.Tensor | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same for blocks that rows share, one entry a row: all queries in one product."""
    _, kv_heads, group, head_dim = grouped.shape
    num_rows = len(shared.rows)
    keys, values = (
        cache.index_select(0, shared.blocks).float().transpose(0, 1).flatten(1, 2)
        for cache in (key_blocks, value_blocks)
    )  # (kv_heads, keys, head_dim)
    query = grouped[shared.rows].transpose(0, 1).reshape(kv_heads, num_rows * group, head_dim)
    scores = (query @ keys.transpose(1, 2)).view(kv_heads, num_rows, group, -1).transpose(0, 1)
    key_positions = torch.arange(shared.start, shared.start + keys.shape[1], device=grouped.device)
    distance = positions[shared.rows][:, None] - key_positions
    is_hidden = _hides(distance, sliding_window)
    scores = block_scores(scores, distance, is_hidden, slopes, softcap)
    largest = scores.amax(-1)
    weights = torch.exp(scores - largest[..., None])
    grouped = weights.transpose(0, 1).reshape(kv_heads, num_rows * group, -1)
    out = weigh_values(grouped, values, is_hidden.repeat_interleave(group, 0))
    out = out.view(kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return largest, weights.sum(-1), out

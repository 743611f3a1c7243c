"""Attention of decode rows, one token each, over the flat list of all rows' KV blocks.

Two bodies give the same partial results: an eager one, and one that torch.compile fuses. It knows
nothing of steps or of how blocks come to be where they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fminfer.config import AttentionBody
from fminfer.errors import UsageError
from fminfer.soft_cap import soft_cap

LOWEST = torch.finfo(torch.float32).min
COMPILE_AFTER = 7_000_000_000  # elements of the cache read by decode rows, about 10 s of a core
MIN_COMPILED_ROWS = 4
MAX_GATHERED = 2 << 20  # elements of the cache that the eager body copies at once (8 MB)

PartialBody = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


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
    partial: PartialBody,
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
        partial(
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
    return (row_out / row_total[..., None]).view(num_rows, heads, head_dim).to(query.dtype)


def block_scores(
    scores: torch.Tensor,  # (blocks, kv_heads, group, block_size)
    distance: torch.Tensor,  # (blocks, block_size)
    sliding_window: int | None,
    slopes: torch.Tensor | None,  # (kv_heads, group, 1)
    softcap: float | None,
) -> torch.Tensor:
    """Cap, add ALiBi and hide what a query must not see: a finite lowest value, never nan."""
    if softcap is not None:
        scores = soft_cap(scores, softcap)
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
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each block's largest score, sum of exponentials and weighted values, by products.

    Shapes: (blocks, kv_heads, group), the same, (blocks, kv_heads, group, head_dim); float32. A
    bounded number of blocks is gathered at a time: memory that is used again costs no page faults.
    """
    size = max(1, MAX_GATHERED // key_blocks[0].numel())
    if len(blocks) > size:
        parts = [
            eager_partial(
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
    scores = block_scores(scores, distance, sliding_window, slopes, softcap)
    largest = scores.amax(-1)
    weights = torch.exp(scores - largest[..., None])
    values = value_blocks.index_select(0, blocks).float()
    # Past a row's end lies what another row left, or nothing: 0 times it might still be nan.
    ends = (distance[:, -1] < 0).nonzero()[:, 0]
    values[ends] = values[ends].masked_fill((distance[ends] < 0)[:, None, :, None], 0.0)
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
    scores = block_scores(scores, distance, sliding_window, slopes, softcap)
    largest = scores.amax(-1)
    weights = torch.exp(scores - largest[..., None])
    out = weights.transpose(0, 1).reshape(kv_heads, num_rows * group, -1) @ values
    out = out.view(kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return largest, weights.sum(-1), out


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
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same as `eager_partial` in sums that torch.compile fuses, blocks read in place."""
    offsets = torch.arange(key_blocks.shape[2], device=grouped.device)
    distance = (positions[row_of_block] - block_start)[:, None] - offsets
    keys = key_blocks[blocks].float()[:, :, None]
    scores = (grouped[row_of_block][..., None, :] * keys).sum(-1)
    scores = block_scores(scores, distance, sliding_window, slopes, softcap)
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

"""Lays out a step for attention in plain torch: chunks of prompts, and rows of one token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from fminfer.compute.attention.decode_attention import DecodeRows, SharedBlocks
from fminfer.compute.attention.shared_runs import SharedRun, find_shared_runs, token_slots
from fminfer.core.messages import StepRow

SHARED_KEYS = 512  # keys that decode rows share, of one product


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
    kept: torch.Tensor | None = None  # int64: the tokens whose output is wanted; None: all

    def keep(self, tokens: torch.Tensor) -> AttentionPlan:
        """Return a plan of which only some tokens' outputs are returned."""
        return replace(self, kept=tokens)


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

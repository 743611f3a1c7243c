"""Lays out a step for attention in plain torch: chunks of prompts, and rows of one token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fminfer.compute.attention.decode_attention import DecodeRows, SharedBlocks
from fminfer.compute.attention.shared_runs import SharedRun, find_shared_runs
from fminfer.compute.step import Rows, ranges
from fminfer.machine.device import send

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
    rows: Rows, block_size: int, kv_heads: int, device: torch.device
) -> AttentionPlan:
    """Lay out a step. Rows of one token are computed together if they come last.

    Args:
        rows: the step's rows in packed order.
        block_size: tokens a block.
        kv_heads: heads of keys, on which a token's place in the cache depends.
    """
    # Also the one token that is left of a chunk, when a step is cut into parts, is a chunk.
    several = np.flatnonzero(rows.lengths > 1)
    num_chunks = int(several[-1]) + 1 if len(several) else 0
    tables = np.split(rows.blocks(block_size), rows.num_blocks(block_size).cumsum()[:-1])
    firsts, positions = rows.firsts.tolist(), rows.positions.tolist()
    chunks = [
        ChunkRow(first, first + num, position, torch.from_numpy(table).to(device, torch.int64))
        for first, num, position, table in zip(
            firsts[:num_chunks], rows.lengths.tolist()[:num_chunks], positions, tables, strict=False
        )
    ]
    decode = rows.part(slice(num_chunks, None))
    return AttentionPlan(
        _slots(rows, block_size, kv_heads).to(device),
        chunks,
        _plan_decode(decode, firsts[num_chunks], block_size, device) if len(decode) else None,
    )


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

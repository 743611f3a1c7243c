"""Bookkeeping on block tables, without tensors: where keys go, and which blocks rows share.

Attention reads runs of blocks that several rows have in common once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fminfer.core.messages import StepRow

MIN_ROWS = 4  # fewer rows gain too little from one product


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Blocks [start, end) of the tables of `rows`, equal in all of them."""

    rows: list[int]
    start: int
    end: int


def find_shared_runs(tables: Sequence[list[int]]) -> list[SharedRun]:
    """List runs of equal blocks from the tables' start on, and behind each run those of its rows.

    A table's last block is its own: it is still being written.
    """
    runs: list[SharedRun] = []
    pending = [(list(range(len(tables))), 0)]
    while pending:
        rows, start = pending.pop()
        for group in _same_at(tables, rows, start):
            end = _common_end(tables, group, start)
            runs.append(SharedRun(group, start, end))
            pending.append((group, end))
    return runs


def _same_at(tables: Sequence[list[int]], rows: list[int], place: int) -> list[list[int]]:
    """Group the rows that have the same block at a place; small groups are left out."""
    groups = defaultdict(list)
    for row in rows:
        if place < len(tables[row]) - 1:
            groups[tables[row][place]].append(row)
    return [group for group in groups.values() if len(group) >= MIN_ROWS]


def _common_end(tables: Sequence[list[int]], rows: list[int], start: int) -> int:
    first = tables[rows[0]]
    end = min(len(tables[row]) for row in rows) - 1
    for row in rows[1:]:
        if tables[row][start:end] != first[start:end]:
            end = next(i for i in range(start, end) if tables[row][i] != first[i])
    return end


def token_slots(rows: Sequence[StepRow], block_size: int) -> list[int]:
    """Return where each token's key goes: block * block_size + place."""
    return [
        row.block_table[position // block_size] * block_size + position % block_size
        for row in rows
        for position in range(row.position, row.position + len(row.token_ids))
    ]

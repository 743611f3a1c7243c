"""Bookkeeping on block tables, without tensors: which blocks rows share.

Attention reads runs of blocks that several rows have in common once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_ROWS = 4  # fewer rows gain too little from one product


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Blocks [start, end) of the tables of `rows`, equal in all of them."""

    rows: np.ndarray  # int64, in order
    start: int
    end: int


def find_shared_runs(tables: np.ndarray, num_used: np.ndarray) -> list[SharedRun]:
    """List runs of equal blocks from the tables' start on, and behind each run those of its rows.

    A table's last block is its own: it is still being written.

    Args:
        tables: (rows, blocks).
        num_used: (rows,), how many blocks of each count.
    """
    runs: list[SharedRun] = []
    pending = [(np.arange(len(tables)), 0)]
    while pending:
        rows, start = pending.pop()
        for group in _same_at(tables, rows[num_used[rows] - 1 > start], start):
            end = _common_end(tables, group, start, int(num_used[group].min()) - 1)
            runs.append(SharedRun(group, start, end))
            pending.append((group, end))
    return runs


def _same_at(tables: np.ndarray, rows: np.ndarray, place: int) -> list[np.ndarray]:
    """Group the rows that have the same block at a place; small groups are left out."""
    if len(rows) < MIN_ROWS:
        return []
    blocks = tables[rows, place]
    _, first, counts = np.unique(blocks, return_index=True, return_counts=True)
    return [rows[blocks == blocks[place]] for place in np.sort(first[counts >= MIN_ROWS])]


def _common_end(tables: np.ndarray, rows: np.ndarray, start: int, end: int) -> int:
    """Return where the tables of rows, equal at `start`, begin to differ; `end` at the latest."""
    differs = (tables[rows, start:end] != tables[rows[0], start:end]).any(0)
    return start + int(differs.argmax()) if differs.any() else end

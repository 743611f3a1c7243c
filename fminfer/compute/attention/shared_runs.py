"""Bookkeeping on block tables, without tensors: which blocks rows share.

Attention reads runs of blocks that several rows have in common once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fminfer.compute.step import Column, Rows

MIN_ROWS = 4  # fewer rows gain too little from one product


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

"""Tells tables that a run wrote, and may replace, from those of others, by their content."""

from __future__ import annotations

import csv
from pathlib import Path

from fminfer.files.tables.result_columns import FIXED_NAMES
from fminfer.files.tables.table_writer import MARK

MAX_HEADER_BYTES = 1 << 20  # of a CSV
MAX_FOOTER_BYTES = 64 << 20  # of a Parquet table; it tells of every row group


def is_own_table(path: Path) -> bool:
    """Tell whether a run wrote a table: Parquet has a mark, CSV the names of our columns."""
    with path.open("rb") as file:
        head = file.read(MAX_HEADER_BYTES)
        if not head.startswith(b"PAR1"):
            return _has_own_header(head)
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        footer = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - min(footer, MAX_FOOTER_BYTES)))
        return MARK in file.read()


def _has_own_header(head: bytes) -> bool:
    """Tell whether a CSV's header has the columns that every run adds, with one prefix."""
    lines = head.decode("utf-8", "replace").splitlines(keepends=True)
    try:
        names = next(csv.reader(lines), [])
    except csv.Error:
        return False
    first, *others = FIXED_NAMES
    for place, name in enumerate(names):
        prefix = name.removesuffix(first)
        following = names[place + 1 : place + 1 + len(others)]
        if name.endswith(first) and following == [prefix + other for other in others]:
            return True
    return False

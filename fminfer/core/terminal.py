"""Fits texts and tables to the width of a terminal."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

# what a line begins with: a name, or spaces
NAME = re.compile(r"\S+(?: \S+)? {2,}|elsewhere | +")


def find_width(stream: TextIO) -> int:
    """Return COLUMNS, or else the terminal's width; 0: the stream is no terminal."""
    with suppress(OSError, ValueError):
        if stream.isatty():
            return (
                int(os.environ.get("COLUMNS", "0"))
                or os.get_terminal_size(stream.fileno())[0]
            )
    return 0


def wrap_lines(text: str, columns: int) -> str:
    """Wrap lines that are wider than `columns`, indented by the line's name; 0: no limit."""
    lines = text.split("\n")
    for place, line in enumerate(lines):
        if 0 < columns < len(line):
            name = NAME.match(line)
            indent = " " * (len(name[0]) if name else 2)
            wrapped = textwrap.wrap(
                line,
                columns,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines[place] = "\n".join(wrapped)
    return "\n".join(lines)


def make_table_lines(rows: Sequence[Sequence[str]], columns: int = 0) -> list[str]:
    """Return a right-aligned table's lines; if it is too wide, a sentence for each row.

    The first row has the names of the columns.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    if not 0 < columns < len(lines[0]):
        return lines
    pairs = (zip(rows[0], row, strict=True) for row in rows[1:])
    return [", ".join(f"{name} {cell}" for name, cell in pair) for pair in pairs]

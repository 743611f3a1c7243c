"""Writes tables as CSV: UTF-8, a header, commas, and quotes where a cell needs them."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from contextlib import suppress
from typing import Any, Protocol

from fminfer.files.tables.parquet_table import find_json_type
from fminfer.files.tables.table import import_pyarrow

# what must stand in quotes: readers also drop space around a cell
_NEEDS_QUOTES = re.compile(r'[",\r\n]|^\s|\s$')


class ByteFile(Protocol):
    """What a table is written to."""

    def write(self, data: bytes) -> object: ...


class CsvWriter:
    """A CSV file, written as pyarrow's writer of Parquet is used."""

    def __init__(self, file: ByteFile, schema: Any) -> None:
        self._file = file
        self._write_rows([schema.names])

    def write_table(self, table: Any) -> None:
        columns = [list_texts(column) for column in table.columns]
        self._write_rows(zip(*columns, strict=True))

    def close(self) -> None:
        """Do nothing: a CSV has no end."""

    def _write_rows(self, rows: Any) -> None:
        lines = (",".join(map(_quote_cell, row)) + "\n" for row in rows)
        self._file.write("".join(lines).encode())


def list_texts(column: Any) -> list[str]:
    """Return a column's cells as texts: lists and objects as JSON, bytes in base64.

    A null is an empty text.
    """
    pyarrow = import_pyarrow()
    kind = column.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
        column = column.cast(kind)
    if "binary" not in str(kind):
        with suppress(pyarrow.ArrowNotImplementedError):  # of nested ones
            return [text or "" for text in column.cast(pyarrow.string()).to_pylist()]
    # Python has no date of the year 10000
    column = column.cast(find_json_type(kind) or kind)
    return ["" if cell is None else _spell_cell(cell) for cell in column.to_pylist()]


def _spell_cell(cell: Any) -> str:
    if isinstance(cell, bytes):
        return _spell_value(cell)
    return json.dumps(cell, ensure_ascii=False, default=_spell_value)


def _spell_value(value: Any) -> str:
    """Return what JSON has no type for as a text."""
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _quote_cell(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"' if _NEEDS_QUOTES.search(text) else text

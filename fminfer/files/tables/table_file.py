"""Tables in files, read a piece at a time: as rows for templates, as batches for new tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.files.numbered_values import strip_compression
from fminfer.files.streams import is_stream
from fminfer.files.tables.delimited_table import DelimitedTable
from fminfer.files.tables.json_table import JsonTable
from fminfer.files.tables.parquet_table import ParquetTable
from fminfer.files.tables.table import RowFault as RowFault
from fminfer.files.tables.table import TableFile as TableFile

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"


def find_delimiter(paths: Sequence[Path], delimiter: str | None) -> str | None:
    """Return what --delimiter says beyond a file's name; None: nothing.

    Raises:
        UsageError: no file has a delimiter.
    """
    if delimiter is None or not paths:
        return delimiter
    signs = [DELIMITERS.get(_find_ending(path)) for path in paths]
    if not any(signs):
        raise UsageError(
            f"--delimiter {delimiter} is of .csv and .tsv files, and {paths[0]} is none. "
            "Save a CSV as such a file, or leave it out"
        )
    return None if signs == [delimiter.replace("\\t", "\t")] else delimiter


def open_table(path: Path, delimiter: str | None = None) -> TableFile:
    """Open a file of rows, as its name says; lines of JSON objects are rows, too.

    Args:
        delimiter: between the cells of a CSV; None: a comma, or a tab in a .tsv file.

    Raises:
        UsageError: it cannot be read as a table, or pyarrow is missing.
    """
    ending = _find_ending(path)
    is_delimited = ending in DELIMITERS
    if (is_delimited or ending == PARQUET) and not path.is_file():
        raise UsageError(
            f"{path} is a pipe or a folder, and a table is read more than once; save it "
            "as a file, or send its rows as JSON lines"
        )
    if ending == PARQUET and path.suffix == PARQUET:
        return ParquetTable(path)
    if is_delimited:
        return DelimitedTable(path, delimiter or DELIMITERS[ending])
    return JsonTable(path)


def _find_ending(path: Path) -> str:
    """Return what a file's name says of its rows; a pipe has JSON lines."""
    return "" if is_stream(path) else strip_compression(path).suffix

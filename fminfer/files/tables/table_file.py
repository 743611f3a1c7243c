"""Tables in files, read a piece at a time: as rows for templates, as batches for new tables."""

from __future__ import annotations

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


def open_table(path: Path, delimiter: str | None = None) -> TableFile:
    """Open a file of rows, as its name says; lines of JSON objects are rows, too.

    Args:
        delimiter: between the cells of a CSV; None: a comma, or a tab in a .tsv file.

    Raises:
        UsageError: it cannot be read as a table, or pyarrow is missing.
    """
    if is_stream(path) and delimiter is not None:
        raise UsageError(
            f"--delimiter is of CSV files, and {path} must have rows as JSON lines; save "
            "the CSV as a file"
        )
    ending = "" if is_stream(path) else strip_compression(path).suffix
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

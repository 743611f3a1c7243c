"""Writes a table: the columns of the input's, read again from there, and those of the answers.

It is written batch by batch, in the order of the rows, so that memory does not grow with them.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from fminfer.core.errors import UsageError
from fminfer.core.quantities import with_noun
from fminfer.core.version import __version__
from fminfer.files.disk import path_beside
from fminfer.files.journal_rows import Row
from fminfer.files.streams import read_changed_ns
from fminfer.files.tables.csv_writer import ByteFile, CsvWriter
from fminfer.files.tables.result_columns import ResultColumn, find_type, read_cells
from fminfer.files.tables.table import import_pyarrow
from fminfer.files.tables.table_file import TableFile, open_table

TABLE_ENDINGS = (".parquet", ".csv")  # of tables that can be written
MARK = b"fminfer_table"  # a key in the metadata of a Parquet table of ours
# Rows of a row group of Parquet, and bytes that are held for one, at most.
GROUP_ROWS = 1 << 16
GROUP_BYTES = 64 << 20
BATCH_ROWS = 4096  # of the input, whose records are held


def is_table_name(path: Path | str | None) -> bool:
    """Tell whether an output's name is that of a table."""
    return str(path).endswith(TABLE_ENDINGS)


def records_path(table: Path) -> Path:
    """Return where the records of a table's run go: `a.records.jsonl` for `a.parquet`."""
    return path_beside(table, ".records.jsonl", without=table.suffix)


class _Draft:
    """A file as pyarrow wants one; what comes after a failure is dropped."""

    closed = False

    def __init__(self, file: ByteFile) -> None:
        self._file = file
        self.is_dropped = False

    def write(self, data: bytes) -> None:
        if not self.is_dropped:
            self._file.write(data)


@dataclass(slots=True, frozen=True)
class TableOutput:
    """A table that a run writes beside its records."""

    path: Path
    columns: tuple[ResultColumn, ...]
    delimiter: str | None = None  # of an input that is a text

    @property
    def layout(self) -> str:
        """Return a digest of the columns, by which a later run knows whether they differ."""
        text = json.dumps([astuple(column) for column in self.columns])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def check_input(self, table: TableFile) -> None:
        """Raise a UsageError if a table of these columns cannot be written beside an input's."""
        both = [column.name for column in self.columns if column.name in table.columns]
        if both:
            raise UsageError(
                f"{table.path} has a column {both[0]!r}, and the answers would have "
                "another one of this name. Give --prefix TEXT, such as --prefix model_: "
                "it stands before the names of all columns that the run adds"
            )
        try:
            self.open_format(_Draft(io.BytesIO()), self.make_schema(table)).close()
        except (ValueError, NotImplementedError) as error:  # pyarrow's
            raise UsageError(
                f"{self.path} cannot hold the columns of {table.path}: {error}. Take such "
                "a column out, or give --output a name that ends in .csv or .jsonl"
            ) from error

    def make_schema(self, table: TableFile) -> Any:
        """Return the columns of an input and of its answers, with the input's own metadata."""
        pyarrow = import_pyarrow()
        added = [
            pyarrow.field(column.name, find_type(column)) for column in self.columns
        ]
        metadata = {**(table.schema.metadata or {}), MARK: __version__.encode()}
        return pyarrow.schema([*table.schema, *added], metadata)

    def open_format(self, file: _Draft, schema: Any) -> Any:
        """Begin a table of a schema, as the ending of its name says."""
        if self.path.suffix == ".csv":
            return CsvWriter(file, schema)
        return import_pyarrow("pyarrow.parquet").ParquetWriter(file, schema)


@dataclass(slots=True, frozen=True)
class TableTask:
    """A table to write, and the input that its rows come from."""

    output: TableOutput
    source: Path
    changed_ns: int  # when the input was changed last, as its rows were answered
    is_cut: bool  # only its first rows are answered


class TableWriter:
    """A table that is being written; it takes the rows of a journal, in their order.

    Raises:
        UsageError: the input is not as it was when its rows were answered.
    """

    def __init__(self, file: ByteFile, task: TableTask) -> None:
        self.name = task.output.path.name
        self.layout = task.output.layout
        self._task = task
        self._columns = task.output.columns
        table = open_table(task.source, task.output.delimiter)
        self._schema = task.output.make_schema(table)
        self._batches = (
            batch.slice(start, BATCH_ROWS)
            for batch in table.read_batches()
            for start in range(0, batch.num_rows, BATCH_ROWS)
        )
        self._batch = next(self._batches, None)  # whose rows get their records
        self._cells: list[list[Any]] = []  # of the records so far
        self._num_rows = 0
        self._joined: list[Any] = []  # tables that are yet to be written
        self._num_joined_rows = 0
        self._num_joined_bytes = 0
        self._draft = _Draft(file)
        self._format = task.output.open_format(self._draft, self._schema)

    def add(self, row: Row) -> None:
        """Add a finished row; they come in order, and none is left out."""
        self._num_rows += 1
        if self._batch is None or row.number != self._num_rows:
            raise self._changed_error(f"row {row.number:,} is not the next one")
        self._cells.append(read_cells(row, self._columns))
        if len(self._cells) == self._batch.num_rows:
            self._join_batch()
            self._batch = next(self._batches, None)

    def close(self) -> None:
        """Write what is left, once every row has come."""
        if self._batch is not None and not self._task.is_cut:
            rows = with_noun(self._num_rows, "row")
            raise self._changed_error(f"it has more than {rows}")
        if self._cells:
            self._join_batch()
        self._write_joined()
        if read_changed_ns(self._task.source) != self._task.changed_ns:
            raise self._changed_error("it was written to")
        self._format.close()

    def drop(self) -> None:
        """Write no more: the run has failed, and its draft goes."""
        self._draft.is_dropped = True
        with suppress(Exception):  # pyarrow would do so later, and print what it meets
            self._format.close()

    def _join_batch(self) -> None:
        """Put the cells of records beside the rows of their batch."""
        assert self._batch is not None, "records without rows"
        pyarrow = import_pyarrow()
        cells = zip(*self._cells, strict=True)
        added = [
            pyarrow.array(values, find_type(column))
            for values, column in zip(cells, self._columns, strict=True)
        ]
        rows = self._batch.slice(0, len(self._cells))
        joined = pyarrow.Table.from_arrays([*rows.columns, *added], schema=self._schema)
        self._cells = []

        self._joined.append(joined)
        self._num_joined_rows += joined.num_rows
        self._num_joined_bytes += joined.nbytes
        is_full = self._num_joined_bytes >= GROUP_BYTES
        if is_full or self._num_joined_rows >= GROUP_ROWS:
            self._write_joined()

    def _write_joined(self) -> None:
        """Write what was joined, as a row group of Parquet."""
        if self._joined:
            self._format.write_table(import_pyarrow().concat_tables(self._joined))
        self._joined = []
        self._num_joined_rows = 0
        self._num_joined_bytes = 0

    def _changed_error(self, what: str) -> UsageError:
        return UsageError(
            f"{self._task.source} was changed since its rows were answered: {what}. So no "
            "table is written. Run the same command again: it keeps the answers to rows "
            "that are still there (--restart answers all anew)"
        )


@contextmanager
def writing_table(file: ByteFile, task: TableTask) -> Iterator[TableWriter]:
    """Begin a table; whoever adds rows closes it. If that fails, nothing more is written."""
    writer = TableWriter(file, task)
    try:
        yield writer
    except BaseException:
        writer.drop()
        raise

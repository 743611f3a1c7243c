"""Writes a table: the columns of the input's, read again from there, and those of the answers.

It is written batch by batch, in the order of the rows, so that memory does not grow with them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fminfer.core.errors import UsageError
from fminfer.core.version import __version__
from fminfer.files.disk import path_beside
from fminfer.files.journal_rows import Row
from fminfer.files.streams import read_changed_ns
from fminfer.files.tables.csv_writer import ByteFile, CsvWriter
from fminfer.files.tables.parquet_table import FAULTS
from fminfer.files.tables.result_columns import (
    FIXED_NAMES,
    ResultColumn,
    make_arrow_type,
    parse_cells,
)
from fminfer.files.tables.table import import_pyarrow
from fminfer.files.tables.table_file import TableFile, open_table

OUTPUT_ENDINGS = (".parquet", ".csv")  # of tables that can be written
MARK = b"fminfer_table"  # a key in the metadata of a Parquet table of ours
MAX_HEADER = 1 << 20  # characters of a CSV that may be ours
# Rows of a row group of Parquet, and bytes of their cells and records, about.
GROUP_ROWS = 1 << 15
GROUP_BYTES = 64 << 20


def is_table_name(path: Path | str | None) -> bool:
    """Tell whether an output's name is that of a table."""
    return str(path).endswith(OUTPUT_ENDINGS)


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
        shared_names = [
            column.name for column in self.columns if column.name in table.columns
        ]
        if shared_names:
            raise UsageError(
                f"{table.path} has a column {shared_names[0]!r}, and the answers would have "
                "another one of this name. Give --prefix TEXT, such as --prefix model_: "
                "it stands before the names of all columns that the run adds"
            )
        pyarrow = import_pyarrow()
        for field in table.schema:
            try:
                self.open_format(_Draft(io.BytesIO()), pyarrow.schema([field])).close()
            except (ValueError, NotImplementedError) as error:  # pyarrow's
                raise UsageError(
                    f"{self.path} cannot hold column {field.name!r} of {table.path}: {error}. "
                    "Remove that column from the input, or give --output a name that ends in "
                    ".csv or .jsonl"
                ) from error

    def make_schema(self, table: TableFile) -> Any:
        """Return the columns of an input and of its answers, with the input's own metadata."""
        pyarrow = import_pyarrow()
        added = [
            pyarrow.field(column.name, make_arrow_type(column))
            for column in self.columns
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

    def __init__(self, file: _Draft, task: TableTask) -> None:
        self.output = task.output
        self._task = task
        self._table = open_table(task.source, task.output.delimiter)
        self._schema = task.output.make_schema(self._table)
        self._batches = self._table.read_batches()
        self._num_rows = 0
        # yet to be written: cells of the answers, and the input's rows, which are read ahead
        self._cells: list[dict[str, Any]] = []
        self._input_batches: list[Any] = []
        self._num_input_rows = 0  # in these batches
        self._row_bytes = 0  # of an input's row in the last batch
        self._num_bytes = 0  # of rows with an answer
        self.format = task.output.open_format(file, self._schema)

    def add(self, row: Row) -> None:
        """Add a finished row; they come in order, and none is left out."""
        self._num_rows += 1
        assert row.number == self._num_rows, "rows of a table are counted from 1"
        self._cells.append(parse_cells(row, self.output.columns))
        if len(self._cells) > self._num_input_rows:
            self._read_batch()
        self._num_bytes += len(row.record) + self._row_bytes
        if len(self._cells) >= GROUP_ROWS or self._num_bytes >= GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        """Write what is left, once every row has come."""
        self._write_group()
        batches = chain(self._input_batches, self._batches)
        is_longer = not self._task.is_cut and any(batch.num_rows for batch in batches)
        if is_longer or read_changed_ns(self._task.source) != self._task.changed_ns:
            raise changed_error(self._task.source)
        self.format.close()

    def _write_group(self) -> None:
        """Write rows with their answers: a row group of Parquet."""
        pyarrow = import_pyarrow()
        added = [
            (column.name, make_arrow_type(column)) for column in self.output.columns
        ]
        answers = pyarrow.Table.from_pylist(self._cells, pyarrow.schema(added))
        rows = pyarrow.Table.from_batches(self._input_batches, self._table.schema)
        columns = [*rows.slice(0, answers.num_rows).columns, *answers.columns]
        self.format.write_table(pyarrow.Table.from_arrays(columns, schema=self._schema))

        rest = rows.slice(answers.num_rows)
        self._input_batches = rest.to_batches()
        self._num_input_rows = rest.num_rows
        self._cells = []
        self._num_bytes = 0

    def _read_batch(self) -> None:
        """Read the input's next rows."""
        batch = next(filter(len, self._batches), None)
        if batch is None:
            raise changed_error(self._task.source)
        self._input_batches.append(batch)
        self._num_input_rows += batch.num_rows
        # without dictionaries: each group holds all of them, and many groups were a large file
        columns = [getattr(column, "indices", column) for column in batch.columns]
        self._row_bytes = sum(column.nbytes for column in columns) // batch.num_rows


def changed_error(source: Path) -> UsageError:
    """Return the error about a table that was edited while its rows were answered."""
    return UsageError(
        f"{source} was changed since its rows were answered, and a table has rows beside "
        "their answers. Run the same command again: it keeps the answers to rows that are "
        "still there (--restart answers all anew)"
    )


@contextmanager
def writing_table(file: ByteFile, task: TableTask) -> Iterator[TableWriter]:
    """Begin a table; whoever adds rows closes it. If that fails, nothing more is written."""
    draft = _Draft(file)
    writer = TableWriter(draft, task)
    try:
        yield writer
    except BaseException:
        draft.is_dropped = True
        with suppress(Exception):  # pyarrow would do so later, and print what it meets
            writer.format.close()
        raise


def is_own_table(path: Path) -> bool:
    """Tell whether a run wrote a table: Parquet has a mark, a CSV the names of our columns."""
    if path.suffix == ".parquet":
        with suppress(*FAULTS):  # it is no Parquet, or is damaged
            schema = import_pyarrow("pyarrow.parquet").read_schema(path)
            return MARK in (schema.metadata or {})
        return False
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = iter(lambda: file.readline(MAX_HEADER), "")
        try:
            names = {*next(csv.reader(lines), [])}
        except csv.Error:
            return False
    prefixes = [name.removesuffix(FIXED_NAMES[0]) for name in names]
    return any({*map(prefix.__add__, FIXED_NAMES)} <= names for prefix in prefixes)

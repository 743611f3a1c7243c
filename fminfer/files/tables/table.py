"""What every table has: columns, a schema, and its rows, one by one or in batches."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fminfer.core.errors import DamagedInputError, UsageError
from fminfer.files.streams import Digest
from fminfer.machine.installation import describe_install

BATCH_ROWS = 256  # texts may be long
Cells = dict[str, Any]  # by column


@dataclass(slots=True, frozen=True)
class RowFault:
    """A row that cannot be read, and why."""

    message: str
    raw: bytes = b""  # what it holds, for people; empty: the cells say it
    cells: Cells = field(default_factory=dict)  # as far as they go
    is_damage: bool = False  # the file breaks off here: no row follows


class TableFile(ABC):
    """A table in a file. Its rows are counted from 1; blank lines are none."""

    path: Path
    columns: tuple[str, ...]
    has_header = True  # its columns are known before any row is read
    num_rows: int | None = None  # None: not known before its end
    unread_columns: dict[str, str] = {}  # noqa: RUF012  those with no JSON, and their types

    @property
    @abstractmethod
    def schema(self) -> Any:
        """Return the `pyarrow.Schema`; all columns of a CSV are texts."""

    @abstractmethod
    def read_rows(self, digest: Digest | None = None) -> Iterator[Cells | RowFault]:
        """Yield each row, with cells as JSON has them; `digest` takes the file's bytes."""

    def read_batches(self) -> Iterator[Any]:
        """Yield `pyarrow.RecordBatch`es of all rows, one for each row number.

        A row that cannot be read has the cells that it has, and nulls.
        """
        pyarrow = import_pyarrow()
        for rows in split_batches(self.read_rows()):
            cells = [
                self._make_cells(row.cells if isinstance(row, RowFault) else row)
                for row in rows
            ]
            yield pyarrow.RecordBatch.from_pylist(cells, schema=self.schema)

    def check_column(self, column: str, flag: str) -> None:
        """Raise a UsageError if a flag names a column that is not read, as far as is known."""
        if not self.has_header:  # to find its columns would read all of it
            return
        if column in self.unread_columns:
            raise UsageError(
                f"{flag}: column {column!r} of {self.path} has the type "
                f"{self.unread_columns[column]}, which is not read. Write it as text"
            )
        if self.columns and column not in self.columns:
            columns = ", ".join(self.columns)
            raise UsageError(
                f"{flag}: {self.path} has no column {column!r}. Its columns are: {columns}"
            )

    def make_value(self, cell: Any) -> Any:
        """Return the value of a request's field that a cell holds; None: it holds none."""
        return cell

    def _make_cells(self, cells: Cells) -> Cells:
        """Return cells as the schema has them."""
        return cells


def split_batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of at most `BATCH_ROWS` rows."""
    rest = iter(rows)
    while batch := list(islice(rest, BATCH_ROWS)):
        yield batch


def read_rest(chunks: Iterable[bytes], digest: Digest | None) -> None:
    """Let a digest have what stands behind damage."""
    if digest is not None:
        with suppress(DamagedInputError):
            for _ in chunks:
                pass


def import_pyarrow(module: str = "pyarrow") -> Any:
    """Return pyarrow, or one of its modules; raise a UsageError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            "reading Parquet and writing tables need pyarrow, which is not installed "
            f"({error}): {describe_install('tables')}"
        ) from error


def check_names_differ(path: Path, columns: tuple[str, ...]) -> None:
    """Raise a UsageError if two columns have one name."""
    equal = [name for name in dict.fromkeys(columns) if columns.count(name) > 1]
    if equal:
        raise UsageError(
            f"{path} has several columns named {', '.join(map(repr, equal))}; a cell is "
            "found by its column's name. Rename them, so that all names differ"
        )

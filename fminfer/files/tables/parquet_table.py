"""Parquet, read with pyarrow: row groups in turn, in batches of few rows."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fminfer.core.errors import UsageError
from fminfer.files.streams import Digest, raising_read_errors, read_chunks
from fminfer.files.tables.table import (
    BATCH_ROWS,
    Cells,
    RowFault,
    TableFile,
    check_names_differ,
    import_pyarrow,
    read_rest,
)

FAULTS = (OSError, ValueError, NotImplementedError)  # that pyarrow raises
READ_BYTES = 2**20  # at a time of a column; otherwise all of a row group's
_ZERO_FRACTION = r"\.0+([^0-9]|$)"  # of a time's seconds

# with a zone, pyarrow's year is a wrong one
_FAR_TIME = re.compile(r"<value out of range: |(-\d{4}|\d{5})-\d\d-\d\d .*[-+]\d{4}")
log = logging.getLogger("fminfer")


class ParquetTable(TableFile):
    """A Parquet file; its rows and types are known from its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with self._open_file() as parquet:
                schema = parquet.schema_arrow
                self.num_rows: int | None = parquet.metadata.num_rows
        except FAULTS as error:
            self._check_error(error)
            raise UsageError(
                f"{path} cannot be read as Parquet: {error}. It may be cut off, or be "
                "something else; fetch or write it again"
            ) from error

        # a row of nulls stands for damage
        fields = [field.with_nullable(True) for field in schema]
        self._schema = import_pyarrow().schema(fields, schema.metadata)
        self.columns = tuple(schema.names)
        check_names_differ(path, self.columns)
        kinds = {field.name: field.type for field in self._schema}
        self._json_types = {
            name: json_type
            for name, kind in kinds.items()
            if (json_type := find_json_type(kind)) is not None
        }
        self.unread_columns = {
            name: str(kind)
            for name, kind in kinds.items()
            if name not in self._json_types
        }
        self._time_columns = [
            name
            for name in self._json_types
            if "date" in str(kinds[name]) or "time" in str(kinds[name])
        ]

    @property
    def schema(self) -> Any:
        """Return the file's own types; each may be null."""
        return self._schema

    def read_rows(self, digest: Digest | None = None) -> Iterator[Cells | RowFault]:
        """Yield each row, without the columns that JSON has no type for."""
        names = list(self._json_types)
        for batch in self._read_batches_or_fault(names):
            if isinstance(batch, RowFault):
                yield batch
                continue
            columns = [self._make_cell_list(name, batch.column(name)) for name in names]
            for place in range(batch.num_rows):
                row = {
                    name: cells[place]
                    for name, cells in zip(names, columns, strict=True)
                }
                yield self._find_far_time(row) or row
        read_rest(read_chunks(self.path, digest), digest)

    def read_batches(self) -> Iterator[Any]:
        """Yield the file's own batches; a row of nulls stands where it is damaged.

        If only a column that is not read is damaged, it is null from there on.
        """
        pyarrow = import_pyarrow()
        num_rows = 0
        for batch in self._read_batches_or_fault(None):
            if isinstance(batch, RowFault):
                break
            num_rows += batch.num_rows
            yield pyarrow.RecordBatch.from_arrays(batch.columns, schema=self.schema)
        else:
            return

        if self.unread_columns:
            log.warning(
                "%s, from row %s on: %s. The table has nulls there, for %s as well",
                self.path,
                num_rows + 1,
                batch.message,
                ", ".join(self.unread_columns),
            )
        for batch in self._read_batches_or_fault([*self._json_types]):
            if isinstance(batch, RowFault):
                batch = pyarrow.RecordBatch.from_pylist([{}], schema=self.schema)
            passed = min(num_rows, batch.num_rows)
            num_rows -= passed
            yield self._fill_columns(batch.slice(passed))

    def _fill_columns(self, batch: Any) -> Any:
        """Return rows with all columns; what a batch lacks is null."""
        pyarrow = import_pyarrow()
        columns = [
            batch.column(field.name)
            if field.name in batch.schema.names
            else pyarrow.nulls(batch.num_rows, field.type)
            for field in self.schema
        ]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self.schema)

    def _find_far_time(self, row: Cells) -> RowFault | None:
        """Return a row's fault if it has a time that has no text."""
        for name in self._time_columns:
            if _FAR_TIME.search(str(row[name])):
                return RowFault(
                    f"column {name!r} has a date or time that is too far away to be "
                    "read. Correct it, or make it null",
                    cells=row,
                )
        return None

    def _open_file(self) -> Any:
        parquet = import_pyarrow("pyarrow.parquet")
        return parquet.ParquetFile(self.path, buffer_size=READ_BYTES, pre_buffer=False)

    def _read_batches_or_fault(self, names: Sequence[str] | None) -> Iterator[Any]:
        """Yield the batches of some columns, or of all; a fault where the data is damaged."""
        try:
            with self._open_file() as file:
                # one by one: a batch of two groups would be lost with the second
                for group in range(file.num_row_groups):
                    yield from file.iter_batches(
                        BATCH_ROWS, [group], columns=names, use_threads=False
                    )
        except FAULTS as error:
            self._check_error(error)
            cause = " ".join(str(error).split()).rstrip(".")
            yield RowFault(f"the Parquet data is damaged: {cause}", is_damage=True)

    def _check_error(self, error: Exception) -> None:
        """Raise a UsageError for what is no damage: encryption, or a fault of the disk."""
        if "crypt" in str(error).replace(str(self.path), ""):
            raise UsageError(
                f"{self.path} is encrypted; write it without encryption. Keys cannot be "
                "given"
            ) from error
        if isinstance(error, OSError) and error.errno:
            with raising_read_errors(self.path):
                raise error

    def _make_cell_list(self, name: str, column: Any) -> list[Any]:
        """Return a column's cells as JSON has them."""
        json_type = self._json_types[name]
        if json_type == column.type:
            cells: list[Any] = column.to_pylist()
            return [*map(_spell_infinite, cells)] if _has_floats(json_type) else cells
        types = import_pyarrow().types
        try:
            text_or_list = column.cast(json_type)
        except (ValueError, NotImplementedError) as error:
            raise UsageError(
                f"column {name!r} of {self.path} ({column.type}) cannot be read: {error}. "
                "Write it as text, or without this column"
            ) from error
        if types.is_timestamp(column.type) or types.is_time(column.type):
            compute = import_pyarrow("pyarrow.compute")
            text_or_list = compute.replace_substring_regex(
                text_or_list, _ZERO_FRACTION, r"\1"
            )
        return [*map(_spell_infinite, text_or_list.to_pylist())]


def find_json_type(kind: Any) -> Any | None:
    """Return the type as which a column's cells are read; None: JSON has none for them.

    Dates, times and decimals become texts, durations whole numbers of their unit.
    """
    pyarrow = import_pyarrow()
    types = pyarrow.types
    if isinstance(kind, pyarrow.BaseExtensionType):
        return find_json_type(kind.storage_type)
    if types.is_dictionary(kind):
        return find_json_type(kind.value_type)

    if types.is_duration(kind):
        return pyarrow.int64()
    if types.is_decimal(kind) or (
        types.is_temporal(kind) and not types.is_interval(kind)
    ):
        return pyarrow.string()

    if types.is_struct(kind):
        fields = [(field.name, find_json_type(field.type)) for field in kind]
        is_readable = all(each is not None for _, each in fields)
        return pyarrow.struct(fields) if is_readable else None
    if types.is_map(kind):  # read as pairs
        plain = (find_json_type(kind.key_type), find_json_type(kind.item_type))
        return kind if plain == (kind.key_type, kind.item_type) else None
    if hasattr(kind, "value_type"):  # a list of some kind
        item = find_json_type(kind.value_type)
        if item is None or item == kind.value_type:
            return None if item is None else kind
        return pyarrow.list_(item)

    is_plain = types.is_primitive(kind) or types.is_boolean(kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_text = is_text or types.is_string_view(kind) or types.is_null(kind)
    return kind if is_plain or is_text else None


def _has_floats(kind: Any) -> bool:
    """Tell whether a type may hold a number that JSON does not have."""
    return "float" in str(kind) or "double" in str(kind)


def _spell_infinite(cell: Any) -> Any:
    """Return a cell whose numbers JSON has: nan and infinities become their names."""
    if isinstance(cell, float) and not math.isfinite(cell):
        if math.isnan(cell):
            return "NaN"
        return "Infinity" if cell > 0 else "-Infinity"
    if isinstance(cell, list | tuple):
        return [_spell_infinite(each) for each in cell]
    if isinstance(cell, dict):
        return {name: _spell_infinite(each) for name, each in cell.items()}
    return cell

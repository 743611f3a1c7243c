"""CSV and TSV: UTF-8 with a header, every cell a text, and line breaks inside quotes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fminfer.contract.json_object import dump_json
from fminfer.core.errors import DamagedInputError, UsageError
from fminfer.core.quantities import with_noun
from fminfer.files.json_values import MAX_VALUE_BYTES, CutValue
from fminfer.files.numbered_values import skip_blank_lines, split_lines, strip_bom
from fminfer.files.streams import Digest, explain_bytes, read_chunks
from fminfer.files.tables.table import (
    Cells,
    RowFault,
    TableFile,
    check_names_differ,
    import_pyarrow,
)

OTHER_DELIMITERS = (";", "\t", "|", ",")


class DelimitedTable(TableFile):
    """A CSV file, also packed. Its header is read at once."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self.path = path
        self._delimiter = "\t" if delimiter == "\\t" else delimiter
        if len(self._delimiter) != 1 or self._delimiter in '"\r\n':
            raise UsageError(
                f"--delimiter is {delimiter!r}; it must be one character, as ';' or '\\t'"
            )
        self._check_first_bytes()
        self.columns = ()
        header = next(self._split_rows(), [])
        if isinstance(header, RowFault):
            raise UsageError(f"the header of {path} cannot be read: {header.message}")
        self.columns = tuple(header)
        check_names_differ(path, self.columns)
        self._check_delimiter()

    @property
    def schema(self) -> Any:
        """Return texts alone."""
        pyarrow = import_pyarrow()
        return pyarrow.schema([(name, pyarrow.string()) for name in self.columns])

    def read_rows(self, digest: Digest | None = None) -> Iterator[Cells | RowFault]:
        """Yield each row behind the header; a row with other cells than it costs itself."""
        rows = self._split_rows(digest)
        next(rows, None)
        num_columns = len(self.columns)
        for row in rows:
            if isinstance(row, RowFault):
                yield row
            elif len(row) == num_columns:
                yield dict(zip(self.columns, row, strict=True))
            else:
                yield RowFault(
                    f"the row has {with_noun(len(row), 'cell')}, and the header has "
                    f"{with_noun(num_columns, 'column')} ({', '.join(self.columns)}). "
                    "Quote cells that hold the delimiter or a line break",
                    raw=dump_json(row),
                    cells=dict(zip(self.columns, row, strict=False)),
                )

    def make_value(self, cell: Any) -> Any:
        """Return the value that a text stands for: of JSON if it is that, or the text."""
        try:
            value = json.loads(cell, parse_constant=str)
        except ValueError:
            return cell or None
        return cell if isinstance(value, str) else value

    def _split_rows(
        self, digest: Digest | None = None
    ) -> Iterator[list[str] | RowFault]:
        """Yield the cells of each row, the header's as well."""
        lines = _TextLines(self.path, digest)
        # Python's own limit is 131,072 characters a cell; a row has ours
        csv.field_size_limit(max(csv.field_size_limit(), MAX_VALUE_BYTES))
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        while True:
            lines.begin_row()
            try:
                cells = next(reader, None)
            except DamagedInputError as error:
                yield RowFault(str(error), raw=error.rest, is_damage=True)
                return
            except csv.Error as error:
                yield lines.make_fault(error)
                continue
            if cells is None:
                return
            if lines.bad_bytes:
                yield RowFault(
                    f"the row is not UTF-8 ({lines.bad_bytes}); save the file as UTF-8",
                    raw=dump_json(cells),
                    cells=dict(zip(self.columns, cells, strict=False)),
                )
            elif cells:  # a blank line is no row
                yield cells

    def _check_first_bytes(self) -> None:
        """Raise a UsageError if the file holds something else than lines of text."""
        _, head = skip_blank_lines(strip_bom(read_chunks(self.path)))
        trouble = explain_bytes(head)
        if b"\r" in head and b"\n" not in head:
            trouble = (
                "its lines end in CR alone; end them in LF (tr '\\r' '\\n' does it)"
            )
        if trouble:
            raise UsageError(f"{self.path} cannot be read as CSV: {trouble}")

    def _check_delimiter(self) -> None:
        """Raise a UsageError if the only column's name holds other delimiters."""
        signs = [sign for sign in OTHER_DELIMITERS if sign in "".join(self.columns)]
        if len(self.columns) == 1 and signs:
            raise UsageError(
                f"{self.path} has one column, {self.columns[0]!r}: its cells seem to be "
                f"separated by {signs[0]!r}. Add --delimiter {_type_delimiter(signs[0])}"
            )


def _type_delimiter(sign: str) -> str:
    return "'\\t'" if sign == "\t" else f"'{sign}'"


class _TextLines:
    """A file's lines as text with their ends, for `csv`, and what is wrong in a row."""

    def __init__(self, path: Path, digest: Digest | None) -> None:
        chunks = strip_bom(read_chunks(path, digest))
        self._lines = split_lines(chunks, passes_blank=False)
        self._row_bytes = 0
        self._is_at_end = False
        self.bad_bytes = ""  # of this row: what is no UTF-8

    def begin_row(self) -> None:
        self._row_bytes = 0
        self.bad_bytes = ""

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        numbered = next(self._lines, None)
        if numbered is None:
            self._is_at_end = True
            raise StopIteration
        line = numbered[1]
        is_cut = isinstance(line, CutValue)
        raw = line.head if isinstance(line, CutValue) else line
        self._row_bytes += len(raw)
        if is_cut or self._row_bytes > MAX_VALUE_BYTES:
            raise DamagedInputError(
                f"the row has more than {MAX_VALUE_BYTES:,} bytes, and no more are "
                "read; see whether a quote is not closed",
                raw[:100],
            )
        try:
            return raw.decode() + "\n"
        except UnicodeDecodeError as error:
            self.bad_bytes = f"byte {raw[error.start]:#04x} in {raw[:40]!r}"
            return raw.decode(errors="replace") + "\n"

    def make_fault(self, error: csv.Error) -> RowFault:
        """Say what `csv` refuses; a quote without an end takes the rest of the file."""
        if self._is_at_end:
            return RowFault("a quote of this row is not closed", is_damage=True)
        return RowFault(
            f"the row is no CSV: {error}. A quote inside quotes is written twice"
        )

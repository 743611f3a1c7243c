"""CSV and TSV: UTF-8 with a header, every cell a text, and line breaks inside quotes."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fminfer.contract.json_object import dump_json
from fminfer.core.errors import DamagedInputError, UsageError
from fminfer.core.quantities import with_noun
from fminfer.files.json_values import MAX_VALUE_BYTES, CutValue
from fminfer.files.numbered_values import skip_blank_lines, split_lines, strip_bom
from fminfer.files.streams import Digest, explain_bytes, read_chunks
from fminfer.files.tables.json_table import DECODER
from fminfer.files.tables.table import (
    Cells,
    RowFault,
    TableFile,
    check_names_differ,
    import_pyarrow,
    read_rest,
)

MAX_BYTES_AGAIN = 1 << 28  # that are read again after quotes that are not closed
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
                    raw=dump_json(row) if len(row) > num_columns else b"",
                    cells=dict(zip(self.columns, row, strict=False)),
                )

    def make_value(self, cell: Any) -> Any:
        """Return the value that a text stands for: of JSON if it is that, or the text."""
        try:
            value = DECODER.decode(cell)
        except (ValueError, RecursionError):
            return cell or None
        return cell if isinstance(value, str) else value

    def _split_rows(
        self, digest: Digest | None = None
    ) -> Iterator[list[str] | RowFault]:
        """Yield the cells of each row, the header's as well."""
        chunks = read_chunks(self.path, digest)
        lines = _TextLines(chunks)
        # Python's own limit is 131,072 characters a cell; a row has ours
        csv.field_size_limit(max(csv.field_size_limit(), MAX_VALUE_BYTES))
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        while True:
            lines.begin_row()
            fault = None
            try:
                cells = next(reader, None)
            except csv.Error as error:
                fault = lines.make_fault(error)
            except DamagedInputError as error:
                fault = RowFault(str(error), raw=error.rest, is_damage=True)

            if fault:
                yield fault
                if fault.is_damage:
                    read_rest(chunks, digest)
                    return
                continue
            if cells is None:
                return
            if lines.bad_bytes:
                yield RowFault(
                    f"the row is not UTF-8 ({lines.bad_bytes}); save the file as UTF-8",
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
    """A file's lines as text with their ends, for `csv`, and what is wrong in a row.

    If a row of several lines is no CSV, only its first line is: the others are read again.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._lines = split_lines(strip_bom(chunks), passes_blank=False)
        self._lines_again: deque[bytes | CutValue] = deque()
        self._num_bytes_again = 0
        self._row_lines: list[bytes | CutValue] = []
        self._row_bytes = 0
        self._number = 0  # of the row's last line
        self.bad_bytes = ""  # of this row: what is no UTF-8

    def begin_row(self) -> None:
        self._row_lines = []
        self._row_bytes = 0
        self.bad_bytes = ""

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        line = self._lines_again.popleft() if self._lines_again else None
        if line is None:
            line = next(self._lines)[1]
        raw = _cut_line(line)
        self._number += 1
        self._row_lines.append(line)
        self._row_bytes += len(raw) + 1
        if isinstance(line, CutValue) or self._row_bytes > MAX_VALUE_BYTES:
            raise csv.Error(
                f"it has more than {MAX_VALUE_BYTES:,} bytes; see whether a quote is not "
                "closed"
            )
        try:
            return raw.decode() + "\n"
        except UnicodeDecodeError as error:
            self.bad_bytes = f"byte {raw[error.start]:#04x} in {raw[:40]!r}"
            return raw.decode(errors="replace") + "\n"

    def make_fault(self, error: csv.Error) -> RowFault:
        """Say what `csv` refuses in the row's first line, and read the others again."""
        first, *others = self._row_lines
        self._lines_again.extendleft(reversed(others))
        self._number -= len(others)
        if others:
            self._num_bytes_again += self._row_bytes
        place = f"line {self._number} of the file is no CSV"
        if self._num_bytes_again > MAX_BYTES_AGAIN:
            return RowFault(
                f"{place}, as many before it: quotes are not closed",
                raw=_cut_line(first),
                is_damage=True,
            )
        advice = "A quote inside quotes is written twice"
        cause = str(error)
        if "new-line" in cause:
            cause = "it has a CR outside quotes"
            advice = "End lines in LF (tr '\\r' '\\n' does it), or quote the cell"
        elif "unexpected end" in cause:
            cause = "a quote of this row is not closed"
        return RowFault(f"{place}: {cause}. {advice}", raw=_cut_line(first))


def _cut_line(line: bytes | CutValue) -> bytes:
    return line.head if isinstance(line, CutValue) else line

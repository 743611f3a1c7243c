"""Rows in JSON: an object a line, or the values of a .json file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from fminfer.contract.fields import describe_json_type
from fminfer.contract.json_object import dump_json, join_lines, parse_object
from fminfer.core.errors import DamagedInputError, RequestError, UsageError
from fminfer.files.json_values import CutValue
from fminfer.files.numbered_values import number_values
from fminfer.files.streams import Digest, read_chunks
from fminfer.files.tables.table import (
    Cells,
    RowFault,
    TableFile,
    import_pyarrow,
    read_rest,
    split_batches,
)

_LARGE_INTEGER = re.compile(rb"[\[:,]-?\d{16,}[\],}]")  # of JSON without spaces


class JsonTable(TableFile):
    """A file of JSON objects, each a row. Its columns are those of all rows."""

    has_header = False

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the names of all rows, which are read for it."""
        return tuple(self.schema.names)

    @property
    def schema(self) -> Any:
        """Return types that hold all cells; a column of mixed ones has JSON texts."""
        return self._schema_and_mixed[0]

    def read_rows(self, digest: Digest | None = None) -> Iterator[Cells | RowFault]:
        """Yield each row; what is no object costs itself."""
        chunks = read_chunks(self.path, digest)
        try:
            for _, raw, fault in number_values(self.path, chunks):
                if isinstance(raw, CutValue):
                    yield RowFault(raw.fault, raw.head)
                elif raw.strip():
                    yield RowFault(fault, raw) if fault else _parse_row(raw.strip())
        except DamagedInputError as error:
            read_rest(chunks, digest)
            yield RowFault(str(error), error.rest, is_damage=True)

    @cached_property
    def _schema_and_mixed(self) -> tuple[Any, frozenset[str]]:
        """Return the schema, and the columns whose cells become JSON texts."""
        pyarrow = import_pyarrow()
        types = dict[str, Any]()
        mixed = set[str]()
        large = set[str]()  # with integers that a float may not hold
        widened = set[str]()  # whose types differ between batches
        for batch in split_batches(self.read_rows()):
            rows = [row for row in batch if isinstance(row, dict)]
            for name in dict.fromkeys(name for row in rows for name in row):
                cells = [row.get(name) for row in rows]
                try:
                    known = types.get(name, pyarrow.null())
                    kind = pyarrow.array(cells).type
                    types[name] = _merge_types(known, kind)
                except (pyarrow.ArrowException, OverflowError, UnicodeError):
                    mixed.add(name)
                    types[name] = pyarrow.string()
                    continue
                if known not in (kind, pyarrow.null()):
                    widened.add(name)
                if _LARGE_INTEGER.search(dump_json(cells)):
                    large.add(name)

        mixed |= {name for name in large & widened if "double" in str(types[name])}
        for name in mixed:
            types[name] = pyarrow.string()
        try:
            return pyarrow.schema(list(types.items())), frozenset(mixed)
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{self.path} has a column {error.object!a}: half a surrogate pair, "
                "which a table cannot hold. Rename it"
            ) from error

    def _make_cells(self, cells: Cells) -> Cells:
        mixed = self._schema_and_mixed[1] & cells.keys()
        return {
            **cells,
            **{
                name: dump_json(cells[name]).decode()
                for name in mixed
                if cells[name] is not None
            },
        }


def _merge_types(first: Any, second: Any) -> Any:
    pyarrow = import_pyarrow()
    schemas = [pyarrow.schema([("cell", kind)]) for kind in (first, second)]
    return pyarrow.unify_schemas(schemas, promote_options="permissive").field(0).type


def _raise_constant_error(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


# orjson would make a float of a large integer
DECODER = json.JSONDecoder(
    parse_constant=_raise_constant_error, parse_float=_parse_float
)


def _parse_row(raw: bytes) -> Cells | RowFault:
    """Return a row's cells; a fault says what is no JSON, or no object."""
    try:
        row = DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as error:
        message = f"the line cannot be read: {error}"
        try:
            parse_object(raw)
        except RequestError as request_error:  # which says more
            message = request_error.message
        return RowFault(message, join_lines(raw))
    if not isinstance(row, dict):
        kind = describe_json_type(row)
        return RowFault(
            f"the line holds a JSON {kind}; a row is an object of cells by column",
            join_lines(raw),
        )
    return row

"""The columns that a run adds to the table of its input, and their cells in each record.

Which ones there are follows from the request fields that all rows share, before any is answered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from fminfer.contract.constraint import CONSTRAINTS, find_constraint
from fminfer.contract.json_object import dump_json
from fminfer.contract.record import Choice, parse_record
from fminfer.contract.responses import convert_result
from fminfer.core.errors import RequestError, UsageError
from fminfer.files.journal_rows import Row
from fminfer.files.tables.table import import_pyarrow

CellKind = Literal["text", "integer", "number", "boolean", "json"]
# A "row" has one cell of a column. Of the other groups each choice of the row has its own.
Group = Literal["row", "choice", "label", "property"]
SCALARS: dict[str, CellKind] = {  # types of JSON Schema
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
}
PYTHON_TYPES: dict[CellKind, Any] = {
    "text": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
MAX_INTEGER = 2**63 - 1  # orjson makes floats of those beyond 2**64


@dataclass(slots=True, frozen=True)
class ResultColumn:
    """A column that a run adds: its name in the table, and which cells it has."""

    name: str
    kind: CellKind
    group: Group
    key: str  # what its cells are, without a prefix
    is_list: bool = False  # a cell has a value for each choice


Part = tuple[str, CellKind, Group]  # a column before it has its name
Values = dict[Group, Mapping[str, Any]]  # of one choice, by the keys of their columns
FIXED_COLUMNS: tuple[Part, ...] = (
    ("answer", "text", "choice"),
    ("finish_reason", "text", "choice"),
    ("error", "text", "row"),
    ("prompt_tokens", "integer", "row"),
    ("completion_tokens", "integer", "row"),
)
FIXED_NAMES = tuple(name for name, *_ in FIXED_COLUMNS)


def make_result_columns(
    fields: Mapping[str, Any], prefix: str = "", varying: Collection[str] = ()
) -> tuple[ResultColumn, ...]:
    """Return the columns that rows with these request fields add.

    Args:
        varying: fields that differ from row to row.

    Raises:
        UsageError: a field says wrongly what an answer must be.
    """
    is_list = "n" in varying or (fields.get("n") or 1) != 1
    parts = [*FIXED_COLUMNS, *_list_constraint_columns(fields)]
    names = _name_columns(parts)
    return tuple(
        ResultColumn(prefix + name, kind, group, key, is_list and group != "row")
        for name, (key, kind, group) in zip(names, parts, strict=True)
    )


def make_arrow_type(column: ResultColumn) -> Any:
    """Return the type of a column's cells, as pyarrow has it."""
    pyarrow = import_pyarrow()
    types = {
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
    }
    plain = types.get(column.kind, pyarrow.string())
    return pyarrow.list_(plain) if column.is_list else plain


def parse_cells(row: Row, columns: Collection[ResultColumn]) -> dict[str, Any]:
    """Return the cells of a finished row by the names of their columns."""
    fields = parse_record(row.record)
    if row.is_error:
        error = fields["error"]
        choices: list[Values] = [
            {"row": {"error": f"{error['code']}: {error['message']}"}}
        ]
    else:
        counts = {"prompt_tokens": row.tokens[0], "completion_tokens": row.tokens[2]}
        result = convert_result(fields["result"])
        # vectors and scores are one choice, of JSON
        listed = result.get("choices") or [{"text": _dump_json(result)}]
        choices = [{"row": counts, **_parse_choice(choice)} for choice in listed]

    return {
        column.name: [_convert_cell(column, choice) for choice in choices]
        if column.is_list and not row.is_error
        else _convert_cell(column, choices[0])
        for column in columns
    }


def _list_constraint_columns(fields: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the columns of labels with probabilities, or of a flat schema's properties."""
    try:
        constraint = find_constraint(
            {
                name: field.kind.parse(name, fields[name], 0)
                for name, field in CONSTRAINTS.items()
                if fields.get(name) is not None
            }
        )
    except RequestError as error:
        raise UsageError(error.message) from None
    if constraint is not None and constraint.kind == "labels":
        yield "label_probability", "number", "choice"
        yield "label_mass", "number", "choice"
        labels, _ = json.loads(constraint.text)
        for label in labels:
            yield label, "number", "label"
    elif constraint is not None and constraint.kind == "json":
        for name, schema in json.loads(constraint.text).get("properties", {}).items():
            yield name, _choose_kind(schema), "property"


def _name_columns(parts: list[Part]) -> list[str]:
    """Name columns by their keys.

    Labels have no space around them, if that tells them. A label or property of the name of
    another column has its group before it: `label_error`.
    """
    stripped = Counter(key.strip() for key, _, group in parts if group == "label")
    names: list[str] = []
    for key, _, group in parts:
        is_alone = group == "label" and stripped[key.strip()] == 1
        name = key.strip() if is_alone else key
        while name in names:
            name = f"{group}_{name}"
        names.append(name)
    return names


def _choose_kind(schema: Any) -> CellKind:
    """Choose what holds a property's values: one plain type, beside null, or else JSON."""
    ways = schema.get("anyOf", [schema]) if isinstance(schema, dict) else [schema]
    types = {name for way in ways for name in _list_types(way)} - {"null"}
    return SCALARS.get(types.pop(), "json") if len(types) == 1 else "json"


def _list_types(schema: Any) -> list[str]:
    """Return the names of types that a schema allows; what it does not say is "any"."""
    fields = schema if isinstance(schema, dict) else {}
    types = fields.get("type")
    if types is not None:
        return types if isinstance(types, list) else [types]
    values = fields.get("enum") or [fields.get("const")]
    return ["string" if isinstance(value, str) else "any" for value in values]


def _parse_choice(fields: dict[str, Any]) -> Values:
    """Return the values of an answer's choice, by the groups of their columns."""
    text = Choice(fields).text
    if not text and (calls := (fields.get("message") or {}).get("tool_calls")):
        text = _dump_json(calls)
    labels = fields.get("label_probabilities") or {}
    values = {
        **fields,  # finish_reason and label_mass
        "answer": text,
        "label_probability": labels.get(text),
    }
    properties: dict[str, Any] = {}
    if text.lstrip().startswith("{"):
        with suppress(ValueError):  # it was cut off
            properties = orjson.loads(text)
    return {"choice": values, "label": labels, "property": properties}


def _convert_cell(column: ResultColumn, choice: Values) -> Any:
    """Return a choice's value as its column holds it; None: it has none, or cannot."""
    kind = column.kind
    value = choice.get(column.group, {}).get(column.key)
    if value is None:
        return None
    if kind == "json":
        return _dump_json(value)
    is_fit = isinstance(value, bool) == (kind == "boolean")
    if not is_fit or not isinstance(value, PYTHON_TYPES[kind]):
        return None
    if kind == "integer":
        return value if value <= MAX_INTEGER else None
    if kind == "text":  # half a surrogate pair is in no table
        return value.encode("utf-8", "replace").decode()
    return float(value) if kind == "number" else value


def _dump_json(value: Any) -> str:
    return dump_json(value).decode()

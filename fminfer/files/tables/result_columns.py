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

from fminfer.contract.constraint import CONSTRAINTS, find_constraint
from fminfer.contract.json_object import parse_json
from fminfer.contract.record import Choice, parse_record
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
MAX_INTEGER = 2**63 - 1


@dataclass(slots=True, frozen=True)
class ResultColumn:
    """A column that a run adds: its name in the table, and which cells it has."""

    name: str
    kind: CellKind
    group: Group
    key: str  # what its cells are, without a prefix
    is_list: bool = False  # a cell has a value for each choice


@dataclass(slots=True, frozen=True)
class RowFields:
    """What requests made of a table's rows have in common."""

    fields: Mapping[str, Any]
    columns: Mapping[str, str]  # fields that take a column's cells
    delimiter: str | None = None


ALWAYS: tuple[tuple[str, CellKind, Group], ...] = (
    ("answer", "text", "choice"),
    ("finish_reason", "text", "choice"),
    ("error", "text", "row"),
    ("prompt_tokens", "integer", "row"),
    ("completion_tokens", "integer", "row"),
)
FIXED_NAMES = tuple(name for name, *_ in ALWAYS)


def make_result_columns(
    fields: Mapping[str, Any], prefix: str = "", varying: Collection[str] = ()
) -> tuple[ResultColumn, ...]:
    """Return the columns that rows with these request fields add.

    Args:
        varying: fields that differ from row to row.

    Raises:
        UsageError: a field says wrongly what an answer must be, or two names are equal.
    """
    is_list = "n" in varying or (fields.get("n") or 1) != 1
    parts = [
        *ALWAYS,
        *((key, kind, group) for key, kind, group in _list_further(fields)),
    ]
    names = _name_columns(parts)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(
            f"two columns of the table would have the name {twice[0]!r}. A label, or a "
            "property of the schema, has the name of another column; rename it"
        )
    return tuple(
        ResultColumn(prefix + name, kind, group, key, is_list and group != "row")
        for name, (key, kind, group) in zip(names, parts, strict=True)
    )


def find_type(column: ResultColumn) -> Any:
    """Return the type of a column's cells, as pyarrow has it."""
    pyarrow = import_pyarrow()
    types = {
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
    }
    plain = types.get(column.kind, pyarrow.string())
    return pyarrow.list_(plain) if column.is_list else plain


def read_cells(row: Row, columns: Collection[ResultColumn]) -> list[Any]:
    """Return the cells of a finished row, one a column."""
    fields = parse_record(row.record)
    if row.is_error:
        error = fields["error"]
        cells = {"error": _mend(f"{error['code']}: {error['message']}")}
        return [
            cells.get(column.key) if column.group == "row" else None
            for column in columns
        ]
    counts = {"prompt_tokens": row.tokens[0], "completion_tokens": row.tokens[2]}
    has_properties = any(column.group == "property" for column in columns)
    choices = [
        _read_choice(choice, has_properties=has_properties)
        for choice in _list_choices(fields["result"])
    ]
    return [
        counts.get(column.key)
        if column.group == "row"
        else _read_choices(column, choices)
        for column in columns
    ]


def _list_further(
    fields: Mapping[str, Any],
) -> Iterator[tuple[str, CellKind, Group]]:
    """Yield the columns of labels with probabilities, or of a flat schema's properties."""
    outputs = fields.get("structured_outputs")
    has_probabilities = isinstance(outputs, dict) and outputs.get("probabilities")
    if isinstance(outputs, dict):
        outputs = {k: v for k, v in outputs.items() if k != "probabilities"}
    values = {**fields, "structured_outputs": outputs}
    try:
        constraint = find_constraint(
            {
                name: field.kind.parse(name, values[name], 0)
                for name, field in CONSTRAINTS.items()
                if values.get(name) is not None
            }
        )
    except RequestError as error:
        raise UsageError(error.message) from None
    if constraint is None:
        return
    if constraint.kind == "choice" and has_probabilities:
        yield "label_probability", "number", "choice"
        yield "label_mass", "number", "choice"
        for label in json.loads(constraint.text):
            yield label, "number", "label"
    elif constraint.kind == "json":
        properties = json.loads(constraint.text).get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            yield name, _choose_kind(schema), "property"


def _name_columns(parts: list[tuple[str, CellKind, Group]]) -> list[str]:
    """Name columns by their keys; labels without the space around them, if that tells them."""
    stripped = Counter(key.strip() for key, _, group in parts if group == "label")
    return [
        key.strip() if group == "label" and stripped[key.strip()] == 1 else key
        for key, _, group in parts
    ]


def _choose_kind(schema: Any) -> CellKind:
    """Choose what holds a property's values: one plain type, beside null, or else JSON."""
    ways = [schema]
    if isinstance(schema, dict) and isinstance(schema.get("anyOf"), list):
        ways = schema["anyOf"]
    types = {name for way in ways for name in _list_types(way)} - {"null"}
    return SCALARS.get(types.pop(), "json") if len(types) == 1 else "json"


def _list_types(schema: Any) -> list[str]:
    """Return the names of types that a schema allows; what it does not say is "any"."""
    if not isinstance(schema, dict):
        return ["any"]
    if "type" in schema:
        types = schema["type"]
        return [str(name) for name in (types if isinstance(types, list) else [types])]
    values = schema.get("enum") or [schema.get("const")]
    return ["string" if isinstance(value, str) else "any" for value in values]


def _list_choices(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer; vectors and scores count as one, whose text is JSON."""
    choices: list[dict[str, Any]] | None = result.get("choices")
    if choices is None:
        return [{"text": _dump_json(result.get("data", result.get("results")))}]
    return choices


def _read_choice(
    fields: dict[str, Any], *, has_properties: bool
) -> dict[Group, Mapping[str, Any]]:
    text = Choice(fields).text
    if not text and (calls := (fields.get("message") or {}).get("tool_calls")):
        text = _dump_json(calls)
    labels = fields.get("label_probabilities") or {}
    own = {
        "answer": text,
        "finish_reason": fields.get("finish_reason"),
        "label_probability": labels.get(text),
        "label_mass": fields.get("label_mass"),
    }
    properties = _parse_object(text) if has_properties else {}
    return {"choice": own, "label": labels, "property": properties}


def _parse_object(text: str) -> dict[str, Any]:
    """Return an answer's object; an empty one if it was cut off."""
    with suppress(ValueError):
        value = parse_json(text.encode("utf-8", "surrogatepass"))
        if isinstance(value, dict):
            return value
    return {}


def _read_choices(
    column: ResultColumn, choices: list[dict[Group, Mapping[str, Any]]]
) -> Any:
    cells = [
        _fit_cell(choice[column.group].get(column.key), column.kind)
        for choice in choices
    ]
    return cells if column.is_list else cells[0]


def _fit_cell(value: Any, kind: CellKind) -> Any:
    """Return a value as a column of its kind holds it; None: it cannot."""
    if value is None:
        return None
    if kind == "json":
        return _dump_json(value)
    if kind == "text":
        return _mend(value) if isinstance(value, str) else None
    if kind == "boolean" or isinstance(value, bool):
        return value if kind == "boolean" and isinstance(value, bool) else None
    if not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        if kind == "number":
            return float(value)
        if int(value) == value and abs(value) <= MAX_INTEGER:
            return int(value)
    return None


def _dump_json(value: Any) -> str:
    return _mend(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _mend(text: str) -> str:
    """Replace halves of surrogate pairs, which no table can hold."""
    return text.encode("utf-8", "replace").decode()

"""The columns that a run adds to a table: their names, types and cells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fminfer.core.errors import UsageError
from fminfer.files.journal_rows import Row
from fminfer.files.tables.result_columns import make_result_columns, parse_cells

SCHEMA = {
    "type": "object",
    "properties": {
        "stars": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "is_new": {"type": "boolean"},
        "mood": {"enum": ["good", "bad"]},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "any": {},
        "two": {"type": ["string", "integer"]},
    },
}
KINDS = {
    "stars": "integer",
    "share": "number",
    "is_new": "boolean",
    "mood": "text",
    "name": "text",
    "tags": "json",
    "any": "json",
    "two": "json",
}
SCHEMA_FIELDS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": json.dumps(SCHEMA)},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "review", "schema": SCHEMA},
        }
    },
]


def read(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of properties in an answer, which is of a chat."""
    message = {"role": "assistant", "content": text}
    result = {"choices": [{"message": message, "finish_reason": "stop"}]}
    record = json.dumps({"request": {}, "result": result}).encode()
    cells = parse_cells(
        Row(1, False, (1, 0, 1), 0, record), make_result_columns(fields)
    )
    assert cells["answer"] == text.encode("utf-8", "replace").decode()
    return {name: cells[name] for name in KINDS}


@pytest.mark.parametrize("fields", SCHEMA_FIELDS)
def test_a_flat_schema_has_a_column_a_property(fields: dict[str, Any]) -> None:
    """Its types are those of the schema, wherever a request may have one."""
    columns = make_result_columns(fields)
    kinds = {each.name: each.kind for each in columns if each.group == "property"}
    assert kinds == KINDS


def test_labels_and_properties_named_as_other_columns() -> None:
    """They were refused: no table could have the label "error"."""
    labels = ["error", "label_error", " answer", "ok"]
    choice = {"choice": labels, "probabilities": True}
    columns = make_result_columns({"structured_outputs": choice}, "m_")
    assert {each.key: each.name for each in columns if each.group == "label"} == {
        "error": "m_label_error",
        "label_error": "m_label_label_error",
        " answer": "m_label_answer",
        "ok": "m_ok",
    }
    properties = {"answer": {"type": "string"}, "error": {"type": "integer"}}
    schema = {"type": "object", "properties": properties}
    fields = {"structured_outputs": {"json": schema}}
    result = {"choices": [{"text": '{"answer": "x", "error": 3}'}]}
    row = Row(1, False, (1, 0, 1), 0, json.dumps({"result": result}).encode())
    cells = parse_cells(row, make_result_columns(fields))
    assert (cells["property_answer"], cells["property_error"]) == ("x", 3)
    assert cells["answer"].startswith("{") and cells["error"] is None


def test_cells_of_properties() -> None:
    """A value that its column cannot hold is null, and so are all of a broken answer."""
    fields = SCHEMA_FIELDS[0]
    answer = {
        "stars": 5,
        "share": 1,
        "is_new": False,
        "mood": "good",
        "name": None,
        "tags": ["é", "b"],
        "any": {"a": 1.5},
        "two": "2",
    }
    cells = read(" " + json.dumps(answer), fields)
    texts = {"tags": '["é","b"]', "any": '{"a":1.5}', "two": '"2"'}
    assert cells == answer | texts
    assert type(cells["share"]) is float and cells["is_new"] is False

    wrong = {"stars": True, "share": "1", "is_new": 0, "mood": 3, "two": None}
    assert set(read(json.dumps(wrong), fields).values()) == {None}
    assert read('{"stars": 9223372036854775808}', fields)["stars"] is None
    assert read('{"stars": 9223372036854775807}', fields)["stars"] == 2**63 - 1
    for broken in ('{"stars": 5, "sha', "", "5", '[{"stars": 5}]', "no"):
        assert set(read(broken, fields).values()) == {None}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"json": {"type": "array"}}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_other_runs_add_five_columns(fields: dict[str, Any]) -> None:
    assert [column.name for column in make_result_columns(fields, "m_")] == [
        "m_answer",
        "m_finish_reason",
        "m_error",
        "m_prompt_tokens",
        "m_completion_tokens",
    ]


def test_labels_keep_space_that_tells_them() -> None:
    choice = {"choice": [" good", "good", " bad"], "probabilities": 2}
    columns = make_result_columns({"structured_outputs": choice})
    assert [each.name for each in columns if each.group == "label"] == [
        " good",
        "good",
        "bad",
    ]


def test_lists_where_a_column_sets_n() -> None:
    """How many choices a row has is not known before the run."""
    lists = [each.name for each in make_result_columns({}, "", ["n"]) if each.is_list]
    assert lists == ["answer", "finish_reason"]


def test_a_wrong_field_is_refused() -> None:
    with pytest.raises(UsageError, match="structured_outputs"):
        make_result_columns({"structured_outputs": {"choice": []}})


def test_tool_calls_and_vectors_are_json() -> None:
    """Their records have no text."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "tool_calls": [call]}
    for result, answer in (
        ({"choices": [{"message": message}]}, [call]),
        ({"data": [{"embedding": [0.5]}]}, {"data": [{"embedding": [0.5]}]}),
    ):
        record = json.dumps({"request": {}, "result": result}).encode()
        row = Row(1, False, (1, 0, 0), 0, record)
        cells = parse_cells(row, make_result_columns({}))
        assert json.loads(cells["answer"]) == answer

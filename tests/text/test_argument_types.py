"""Arguments that models write as bare text, and the types that schemas say."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fminfer.text.calls.argument_types import make_argument

ANY: dict[str, Any] = {}
STRING = {"type": "string"}
INTEGER = {"type": "integer"}
MAYBE = {"anyOf": [STRING, {"type": "null"}]}
LOOP = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}
DEFS = {
    "day": {"enum": ["mon", "tue"]},
    "count": INTEGER,
    "a_b": {"$ref": "#/$defs/count"},
    "loop": LOOP,
}


def write(schema: Any, text: str) -> Any:
    root = {"properties": {"x": schema}, "$defs": DEFS}
    return json.loads(make_argument(root, "x", text))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "5", "5"),
        (STRING, '"5"', '"5"'),
        (STRING, " null\n", " null\n"),
        (STRING, "", ""),
        (INTEGER, "5", 5),
        (INTEGER, " 5\n", 5),
        (INTEGER, "5.0", 5.0),
        (INTEGER, "five", "five"),
        (INTEGER, "", ""),
        ({"type": "number"}, "1e-05", 1e-05),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "1" * 5000, "1" * 5000),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, 'a', None]", [1, "a", None]),
        ({"type": "array"}, "(1, (2,), [3])", [1, [2], [3]]),
        ({"type": "array"}, "(1, (3))", "(1, (3))"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "object"}, '{"a": {"b": "é"}}', {"a": {"b": "é"}}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, "__import__('os')", "__import__('os')"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": ["string", "integer"]}, '"5"', "5"),
        (MAYBE, "null", None),
        (MAYBE, "None", None),
        (MAYBE, "5", "5"),
        (MAYBE, "nothing", "nothing"),
        ({"oneOf": [STRING, ANY]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": "2"}, "2", "2"),
        ({"$ref": "#/$defs/day"}, "mon", "mon"),
        ({"$ref": "#/$defs/count"}, "5", 5),
        ({"$ref": "#/$defs/a_b"}, "5", 5),
        ({"$ref": "#/$defs/day"}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "5", 5),
        ({"$ref": "https://example.org/schema"}, "x", "x"),
        (LOOP, "5", "5"),
        # nothing is said: JSON if it is JSON, else text
        (ANY, "5", 5),
        (ANY, '"5"', "5"),
        (ANY, "True", "True"),
        (ANY, "den", "den"),
        (ANY, '"\\ud800"', '"\\ud800"'),
        (True, "5", 5),
        # schemas that are none
        (5, "5", 5),
        ({"type": [{}, 5]}, "5", 5),
        ({"type": 5}, "5", 5),
        ({"enum": 5}, "5", 5),
        ({"anyOf": 5}, "5", 5),
        ({"anyOf": [5]}, "5", 5),
        ({"$ref": 5}, "5", 5),
    ],
)
def test_types(schema: Any, text: str, value: Any) -> None:
    found = write(schema, text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("schema", [None, {}, {"properties": 5}, 5])
def test_parameters_that_no_schema_knows(schema: Any) -> None:
    assert make_argument(schema, "x", "5") == "5"
    assert make_argument(schema, "x", "den") == '"den"'


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": STRING},
        {"properties": {"y": ANY}, "additionalProperties": STRING},
        {"$ref": "#/$defs/f", "$defs": {"f": {"properties": {"x": STRING}}}},
    ],
)
def test_a_type_may_come_from_elsewhere(schema: Any) -> None:
    assert make_argument(schema, "x", "5") == '"5"'
    assert make_argument(schema, "y", "den") == '"den"'


def test_schemas_that_lead_back_to_themselves_take_no_time() -> None:
    """Ten alternatives that each lead to all ten are 10 ** 16 ways."""
    branches = [{"$ref": f"#/$defs/{i}"} for i in range(10)]
    defs = {str(i): {"anyOf": branches} for i in range(10)}
    chain = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(5000)}
    root = {
        "properties": {"x": {"anyOf": branches}, "y": {"$ref": "#/$defs/c0"}},
        "$defs": defs | chain,
    }
    start = time.thread_time()
    assert make_argument(root, "x", "5") == "5"
    assert make_argument(root, "y", "5") == "5"
    assert time.thread_time() - start < 8

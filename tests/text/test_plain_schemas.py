"""Keywords as zod, pydantic and OpenAPI write them: neutral ones, nulls, bounds and names."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fminfer.core.errors import RequestError
from fminfer.text.plain_schemas import rewrite_schema
from tests.text.test_grammars import as_json, compile_for, follow, ids_of
from tests.text.test_string_formats import accepts
from tests.text.test_tokenizer import byte_level

TRUE = {"type": "boolean"}
TEXT = {"type": "string"}
LIMIT = 3.4028234663852886e38


def record(**more: Any) -> dict[str, Any]:
    return {"type": "object"} | more


@pytest.mark.parametrize(
    ("schema", "fitting", "other"),
    [
        (record(propertyNames=TEXT, additionalProperties=TRUE), {"x": True}, {"x": 1}),
        (record(propertyNames={}, required=[], not_=1), {"x": 1}, []),
        (
            record(propertyNames={"enum": ["a", "b"]}, additionalProperties=TRUE),
            {"a": True},
            {"c": True},
        ),
        (
            record(
                propertyNames={"type": "string", "const": "a"},
                additionalProperties=TRUE,
            ),
            {"a": True},
            {"a": 1},
        ),
        (
            record(propertyNames={"enum": ["a"]}, properties={"b": TRUE, "a": TEXT}),
            {"a": "x"},
            {"b": True},
        ),
        ({"type": "array", "uniqueItems": False}, [1, 1], {}),
        (record(required=None, properties=None), {}, 1),
        (
            record(properties={"a": TRUE | {"enum": None}}, maxProperties=1),
            {"a": True},
            {"a": 1},
        ),
        ({"const": None}, None, 1),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, -(2**62), 0.5),
        ({"type": "integer", "maximum": 2**64, "minimum": 0}, 2**62, -1),
        ({"type": "number", "minimum": -LIMIT, "maximum": LIMIT}, -0.5, "a"),
        ({"type": "number", "exclusiveMinimum": True, "minimum": 1}, 1.5, 1),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, 0.5, 0),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -1e-3}, -1e-3, 0),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, 1.25, 1),
        ({"multipleOf": 0.1, "exclusiveMinimum": 0, "maximum": 0.5}, 0.5, 0),
        ({"type": "integer", "exclusiveMaximum": True, "maximum": 3}, 2, 3),
        ({"type": "integer", "exclusiveMinimum": 0}, 1, 0),
        ({"type": "integer", "exclusiveMinimum": False, "minimum": 0}, 0, -1),
        ({"type": "string", "nullable": True}, None, 1),
        ({"type": ["string"], "nullable": False}, "a", None),
        ({"type": "integer", "format": "int32"}, 2**31 - 1, 2**31),
        ({"type": "integer", "format": "uint8"}, 255, -1),
        ({"type": "number", "format": "double"}, 1e300, "a"),
        ({"type": "string", "format": "int64"}, "12", 12),
        (
            {
                "$ref": "#/components/schemas/Day",
                "components": {
                    "schemas": {"Day": {"format": "date", "type": "string"}}
                },
            },
            "2024-02-29",
            "2023-02-29",
        ),
        (
            {"type": "array", "items": [{"type": "string", "format": "date"}]},
            ["2024-02-29"],
            ["2023-02-29"],
        ),
    ],
)
def test_what_they_mean(schema: Any, fitting: Any, other: Any) -> None:
    """Draft 4's `exclusiveMinimum: true` and OpenAPI's `nullable` had no effect, others
    refused."""
    assert accepts(schema, fitting) and not accepts(schema, other)


def test_names_of_an_enum_come_once() -> None:
    schema = record(propertyNames={"enum": ["a", "b"]}, additionalProperties=TRUE)
    grammar = compile_for(byte_level(), as_json(schema))
    assert follow(grammar, ids_of(grammar, '{"a":true,"b":false}'))
    assert not follow(grammar, ids_of(grammar, '{"a":true,"a":false}'))


def test_names_with_patterns_beside_an_enum_are_refused() -> None:
    names = {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^b": {}}}
    with pytest.raises(RequestError, match="propertyNames"):
        compile_for(byte_level(), as_json(record(**names)))


def test_unknown_formats_are_named() -> None:
    """`format: password` and `path` were refused: they ask for nothing that a text
    could break."""
    schema = {"items": {"type": "string", "format": "password"}, "format": "uuid"}
    grammar = compile_for(byte_level(), as_json(schema))
    assert grammar.unknown_keywords == ('the format "password"',)
    with pytest.raises(RequestError, match="Unknown format: regex"):
        compile_for(byte_level(), as_json(schema | {"format": "regex"}))


@pytest.mark.parametrize(
    "odd",
    [
        {"allOf": 5, "format": "date"},
        {"propertyNames": {"enum": 5}},
        {"properties": 5, "minProperties": 1},
        {"required": [{}], "maxProperties": 1},
        {"minimum": "1"},
        {"pattern": 5},
        {"type": 5, "nullable": True},
    ],
)
def test_odd_values_cost_their_own_line(odd: Any) -> None:
    try:
        compile_for(byte_level(), as_json({"type": "object"} | odd))
    except RequestError as error:
        assert "cannot be had" in error.message


def test_large_schemas_take_no_time() -> None:
    names = [f"n{number}" for number in range(15_000)]
    start = time.thread_time()
    plain = rewrite_schema(
        {"properties": {key: {} for key in names}, "propertyNames": {"enum": names}}
    )
    assert len(json.dumps(plain)) > 100_000 and time.thread_time() - start < 1

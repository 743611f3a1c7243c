"""Rewrites schemas in the keywords that llguidance holds answers to, with their exact meaning.

zod, pydantic and OpenAPI write keywords that ask for nothing, nulls, and bounds of 64 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from fminfer.text.formats import FORMATS, NATIVE_FORMATS
from fminfer.text.json_schemas import KNOWN_KEYS, change_parts, compact
from fminfer.text.patterns import plain_pattern

Schema = dict[str, Any]

# Keywords, and the values in JSON with which they ask for nothing.
_NEUTRAL = {
    "uniqueItems": ("false",),
    "nullable": ("false",),
    "not": ("false",),
    "required": ("false",),  # of drafts before 4
    "exclusiveMinimum": ("false",),  # of draft 4 and OpenAPI 3.0
    "exclusiveMaximum": ("false",),
    "propertyNames": ("true", "{}", '{"type":"string"}'),
    "unevaluatedProperties": ("true", "{}"),
    "unevaluatedItems": ("true", "{}"),
    "dependentRequired": ("{}",),
    "dependentSchemas": ("{}",),
    "dependencies": ("{}",),
}
_VALUES = ("const", "default", "example")  # null is a value here
_CONDITIONS = (("if", ("then", "else")), ("contains", ("minContains", "maxContains")))
MAX_DIGITS = 17  # of a number without bounds: as many as tell all doubles apart
MOST_PLAIN = 10**17 - 16  # the largest double of 17 digits
MOST_BOUND = 2**63 - 1024  # the largest double below 2^63, for llguidance counts in 64 bits


@lru_cache(4)
def parse_schema(text: str) -> Any:
    """Return the plain form of a schema in JSON. It is shared: leave it as it is."""
    return plain_schema(json.loads(text))


def plain_schema(schema: Any) -> Any:
    """Return a schema that the same values fit, or a little fewer of them."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: value for key, value in schema.items() if not _asks_nothing(key, value)}
    for rewrite in _REWRITES:
        rewrite(plain)
    plain = change_parts(plain, plain_schema)
    # What a reference such as "#/components/schemas/Pet" reaches.
    return plain | {key: plain_schema(plain[key]) for key in plain.keys() - KNOWN_KEYS}


def count_digits(schema: Any) -> tuple[int, int]:
    """Return the digits that numbers may need: before the point, and in all."""
    wholes = [MAX_DIGITS]
    totals = [MAX_DIGITS]
    for number in _find_numbers(schema):
        whole, _, fraction = f"{abs(Decimal(str(number))):f}".partition(".")
        wholes.append(len(whole))
        totals.append(len(whole) + len(fraction) + 1)
    return max(wholes), max(max(totals), max(wholes))


def _find_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _find_numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _asks_nothing(key: str, value: Any) -> bool:
    if value is None:
        return key not in _VALUES
    return key in _NEUTRAL and compact(value) in _NEUTRAL[key]


def _drop_conditions(schema: Schema) -> None:
    """Drop keywords that act beside another one alone."""
    for key, dependents in _CONDITIONS:
        names = (key, *dependents)
        if key not in schema or (key == "if" and not {*dependents} & schema.keys()):
            for name in names:
                schema.pop(name, None)


def _allow_null(schema: Schema) -> None:
    """Act on OpenAPI 3.0's `nullable`, which counts beside `type`."""
    kinds = schema.get("type")
    if schema.get("nullable") is True and kinds is not None:
        del schema["nullable"]
        schema["type"] = [*(kinds if isinstance(kinds, list) else [kinds]), "null"]


def _replace_format(schema: Schema) -> None:
    name = schema.get("format")
    if isinstance(name, str) and name not in NATIVE_FORMATS:
        del schema["format"]
        others = schema.get("allOf", [])
        if name in FORMATS and isinstance(others, list):
            schema["allOf"] = [*others, FORMATS[name]]


def _replace_patterns(schema: Schema) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = plain_pattern(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {plain_pattern(key): patterns[key] for key in patterns}


def _list_names(schema: Schema) -> None:
    """Write names that are an enum as properties, and names with a pattern as their keys."""
    names = schema.get("propertyNames")
    known = schema.get("properties", {})
    if not (isinstance(names, dict) and isinstance(known, dict)) or "patternProperties" in schema:
        return
    keys = names.keys() - {"type", "title", "description"}
    other = schema.get("additionalProperties", True)
    allowed = names.get("enum", [names.get("const")])
    if keys in ({"enum"}, {"const"}) and isinstance(allowed, list):
        listed = dict.fromkeys(name for name in allowed if isinstance(name, str))
        ordered = [*filter(listed.__contains__, known), *listed]
        schema["properties"] = {name: known.get(name, other) for name in ordered}
    elif keys == {"pattern"} and not known:
        schema["patternProperties"] = {plain_pattern(str(names["pattern"])): other}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _bound_numbers(schema: Schema) -> None:
    """Write bounds as llguidance reads them: numbers, within 64 bits, beside `multipleOf` too."""
    for key, exclusive, sign in (
        ("minimum", "exclusiveMinimum", -1),
        ("maximum", "exclusiveMaximum", 1),
    ):
        if schema.get(exclusive) is True:  # of draft 4 and OpenAPI 3.0
            schema[exclusive] = schema.pop(key, None)
            if schema[exclusive] is None:
                del schema[exclusive]
        for name in (key, exclusive):
            bound = schema.get(name)
            is_exact = bound == 2**63 - 1 and schema.get("type") == "integer"
            if isinstance(bound, int | float) and sign * bound > MOST_BOUND and not is_exact:
                schema[name] = sign * MOST_BOUND
        if "multipleOf" in schema and not {key, exclusive} & schema.keys():
            others = [abs(value) for value in schema.values() if isinstance(value, int | float)]
            most = MOST_PLAIN if max(others) < MOST_PLAIN else MOST_BOUND
            schema[key] = sign * most


_REWRITES: tuple[Callable[[Schema], None], ...] = (
    _drop_conditions,
    _allow_null,
    _replace_format,
    _replace_patterns,
    _list_names,
    _bound_numbers,
)

"""Rewrites schemas with keywords that llguidance enforces, without a change of meaning.

zod, pydantic and OpenAPI write nulls, keywords that ask for nothing, and bounds of 64 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from fminfer.text.json_schemas import KNOWN_KEYS, change_inner_schemas, compact_json
from fminfer.text.patterns import rewrite_pattern
from fminfer.text.string_formats import FORMATS, NATIVE_FORMATS

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
MAX_DIGITS = 17  # of a number without bounds: enough to tell all doubles apart
MOST_PLAIN = 10**17 - 16  # the largest double of 17 digits
MOST_FINE = 10**11  # a bound that leaves digits for fractions
MOST_WHOLE = 19  # digits of 64 bits
# the largest double below 2^63, for llguidance counts in 64 bits
MOST_BOUND = 2**63 - 1024


@lru_cache(4)
def parse_schema(text: str) -> Any:
    """Return the plain form of a schema in JSON. It is cached: do not change it.

    Raises:
        ValueError: a keyword's value has the wrong type.
    """
    try:
        return rewrite_schema(json.loads(text))
    except (AttributeError, TypeError, OverflowError):
        raise ValueError("one of its keywords has a value of the wrong type") from None


def rewrite_schema(schema: Any) -> Any:
    """Return a schema that allows the same values, or slightly fewer."""
    if isinstance(schema, list):
        return [rewrite_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: value for key, value in schema.items() if not _is_neutral(key, value)}
    for rewrite in _REWRITES:
        rewrite(plain)
    plain = change_inner_schemas(plain, rewrite_schema)
    # Also targets of references such as "#/components/schemas/Pet".
    return plain | {
        key: rewrite_schema(plain[key]) for key in plain.keys() - KNOWN_KEYS
    }


def count_digits(schema: Any) -> tuple[int, int]:
    """Return the digits that numbers may need: before the point, and in all."""
    numbers: list[str] = []
    text = json.dumps(schema)
    json.loads(text, parse_int=numbers.append, parse_float=numbers.append)
    parts = [f"{abs(Decimal(number)):f}".partition(".") for number in numbers]
    # Below 1,234 numbers have the digits of 1,233. Other bounds may need one digit more.
    whole = max((len(str(int(before) - 1)) for before, _, _ in parts), default=0)
    fraction = max((len(behind.rstrip("0")) for _, _, behind in parts), default=0)
    # As a double, 1.9999999999999999 is 2. What is above 0.5 alone may need one digit more.
    most = MAX_DIGITS - 1 if '"exclusiveM' in text else MAX_DIGITS
    total = min(whole, MOST_WHOLE) + fraction + (1 if fraction else 0)
    return min(max(MAX_DIGITS, whole + 1), MOST_WHOLE), max(most, total)


def _is_neutral(key: str, value: Any) -> bool:
    if value is None:
        return key not in _VALUES
    return key in _NEUTRAL and compact_json(value) in _NEUTRAL[key]


def _allow_null(schema: dict[str, Any]) -> None:
    """Rewrite OpenAPI 3.0's `nullable`, which counts only beside `type`."""
    kinds = schema.get("type")
    if schema.get("nullable") is True and kinds is not None:
        del schema["nullable"]
        schema["type"] = [*(kinds if isinstance(kinds, list) else [kinds]), "null"]


def _replace_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if isinstance(name, str) and name not in NATIVE_FORMATS:
        del schema["format"]
        if name in FORMATS:
            schema["allOf"] = [*schema.get("allOf", ()), FORMATS[name]]


def _replace_patterns(schema: dict[str, Any]) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = rewrite_pattern(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            rewrite_pattern(key): patterns[key] for key in patterns
        }


def _list_property_names(schema: dict[str, Any]) -> None:
    """Rewrite `propertyNames` with an enum as properties, so that no name is repeated."""
    names = schema.get("propertyNames") or {}
    if (
        names.keys() - {"type"} in ({"enum"}, {"const"})
        and "patternProperties" not in schema
    ):
        allowed = names.get("enum", [names.get("const")])
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        listed = dict.fromkeys(name for name in allowed if isinstance(name, str))
        ordered = [*filter(listed.__contains__, known), *listed]
        schema["properties"] = {name: known.get(name, other) for name in ordered}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _close_counted_objects(schema: dict[str, Any]) -> None:
    """Forbid free keys where llguidance cannot count keys beside them."""
    is_counted = {"minProperties", "maxProperties"} & schema.keys()
    if is_counted and {*schema.get("properties", ())} - {*schema.get("required", ())}:
        schema.setdefault("additionalProperties", False)


def _bound_numbers(schema: dict[str, Any]) -> None:
    """Rewrite bounds as llguidance reads them: 64 bits, and always set beside `multipleOf`."""
    numbers = [
        abs(value) for value in schema.values() if isinstance(value, int | float)
    ]
    most = MOST_FINE if isinstance(schema.get("multipleOf"), float) else MOST_PLAIN
    most = most if max(numbers, default=0) < most else MOST_BOUND
    for key, exclusive, sign in (
        ("minimum", "exclusiveMinimum", -1),
        ("maximum", "exclusiveMaximum", 1),
    ):
        if schema.get(exclusive) is True:  # of draft 4 and OpenAPI 3.0
            schema[exclusive] = schema.pop(key, sign * math.inf)
        if "multipleOf" in schema:
            schema.setdefault(key, sign * most)
        for name in {key, exclusive} & schema.keys():
            bound = schema[name]
            is_exact = bound == 2**63 - 1 and schema.get("type") == "integer"
            if (
                isinstance(bound, int | float)
                and sign * bound > MOST_BOUND
                and not is_exact
            ):
                schema[name] = sign * MOST_BOUND


def _move_exclusive_bounds(schema: dict[str, Any]) -> None:
    """Move whole exclusive bounds a little, if the other bound is less than 1 away.

    llguidance takes 0 as above 0, if 0.5 is the maximum.
    """
    others = {
        "minimum": ("exclusiveMinimum", "maximum", "exclusiveMaximum"),
        "maximum": ("exclusiveMaximum", "minimum", "exclusiveMinimum"),
    }
    for key, (exclusive, *ends) in others.items():
        bound = schema.get(exclusive, 0.5)
        gap = min(
            (schema[end] - bound for end in ends if end in schema), key=abs, default=0
        )
        if bound % 1 == 0 and 0 < abs(gap) < 1:
            nearest = schema.pop(exclusive) + gap / 1e6
            schema[key] = (max if gap > 0 else min)(nearest, schema.get(key, nearest))


_REWRITES: tuple[Callable[[dict[str, Any]], None], ...] = (
    _allow_null,
    _replace_format,
    _replace_patterns,
    _list_property_names,
    _close_counted_objects,
    _bound_numbers,
    _move_exclusive_bounds,
)

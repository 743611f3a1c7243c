"""A request's fields, and kinds of values: how each is read, and its JSON Schema."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from fminfer.core.errors import RequestError

T = TypeVar("T")
INT64 = 2**63
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "array", "items": TEXT, "minItems": 1}
SWITCH: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {}


@dataclass(slots=True, frozen=True)
class Kind:
    """What values a field may have, beside null.

    Args:
        parse: takes its name, a value and the largest number that a run allows. It returns what
            Python uses, or raises a RequestError.
        form: the JSON Schema, or a function that takes that number and returns it.
        values_text: the values in a table of the docs; "": any.
    """

    parse: Callable[[str, Any, int], Any]
    form: Schema | Callable[[int], Schema]
    values_text: str = ""

    def make_schema(self, most: int) -> Schema:
        return self.form(most) if callable(self.form) else self.form


# What a field's largest number is one of: the context's tokens, the model's ids, --max-logprobs.
Limit = Literal["", "context", "vocab", "logprobs"]
# Acted on; by a server alone, as an answer in a file has one form; refused but for its neutral
# values; or recorded, as it changes no answer.
Fate = Literal["acted on", "served", "refused", "recorded"]


@dataclass(slots=True, frozen=True)
class Field:
    """One field of requests."""

    name: str
    kind: Kind
    # what it does; of a refused one, what to do instead ("": nothing does it)
    help: str
    limit: Limit = ""
    fate: Fate = "acted on"
    # what its absence means; None: `RequestParams` or `help` says it
    default: object = None
    # of a refused one: values that are accepted beside null
    neutral: tuple[object, ...] = ()
    ours: str = ""  # of a refused one: our name of the same thing
    only: type | None = None  # of a refused one: only values of this type are refused
    is_required: bool = False
    column: str = ""  # numpy's type of its column in a step's draws; "": it has none

    def is_neutral_value(self, value: object) -> bool:
        """Return whether a value of a refused field changes no answer."""
        if value is None or self.is_data(value):
            return True
        return any(is_same(value, each) for each in self.neutral)

    def is_data(self, value: object) -> bool:
        """Return whether a value has another type than a wish, as a column of data may have."""
        return self.only is not None and not isinstance(value, self.only)

    def make_schema(self, most: int = INT64 - 1) -> Schema:
        """Return the JSON Schema of its values, whose `limit` allows numbers up to `most`."""
        if self.only is not None:
            names: dict[type, str] = {dict: "object", list: "array", str: "string"}
            return {
                "anyOf": [
                    {"not": {"type": names[self.only]}},
                    {"enum": [*self.neutral]},
                ]
            }
        if self.fate == "refused":
            return allow_null({"enum": list(self.neutral)}) if self.neutral else NULL
        schema = self.kind.make_schema(most)
        return schema if self.is_required else allow_null(schema)


def make_unchecked_kind(schema: Schema, values_text: str = "") -> Kind:
    """Return a kind whose values are checked elsewhere, or not at all."""
    return Kind(lambda name, value, most: value, schema, values_text)


def make_number_kind(low: float, high: float) -> Kind:
    """Return the kind of numbers within limits, which are read as floats."""

    def parse(name: str, value: Any, most: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type_error(name, value, "a number or null")
        if not (low <= value <= high) or math.isnan(value):
            raise out_of_range_error(name, value, f"from {low} to {high}")
        return float(value)

    return Kind(
        parse, {"type": "number", "minimum": low, "maximum": high}, f"{low} … {high}"
    )


def make_integer_kind(low: int, high: int = INT64 - 1) -> Kind:
    """Return the kind of integers within limits; 2.0 is one, true is none."""

    def parse(name: str, value: Any, most: int) -> int:
        if not is_integral(value):
            raise wrong_type_error(name, value, "an integer or null")
        # The parser rounds integers beyond 64 bits: one just below -2^63 becomes the
        # float -2^63.
        is_rounded = isinstance(value, float) and value == -INT64
        if is_rounded or not low <= value <= min(high, most):
            raise out_of_range_error(
                name, value, _describe_broken_limit(value, low, min(high, most))
            )
        return int(value)

    values_text = (
        f"{low} … {high}"
        if high < INT64 - 1
        else f"≥ {low}"
        if low > -INT64
        else "int64"
    )
    return Kind(
        parse,
        lambda most: {"type": "integer", "minimum": low, "maximum": min(high, most)},
        values_text,
    )


def allow_values(kind: Kind, values_text: str, *values: tuple[object, object]) -> Kind:
    """Return a kind that takes more values of JSON: pairs of one, and as what it is read."""

    def parse(name: str, value: Any, most: int) -> Any:
        for spelling, meaning in values:
            if is_same(value, spelling):
                return meaning
        try:
            return kind.parse(name, value, most)
        except RequestError as error:
            others = ", ".join(json.dumps(spelling) for spelling, _ in values)
            raise RequestError(
                error.code, f"{error.message}, or {others}", name
            ) from None

    more: Schema = {"enum": [spelling for spelling, _ in values]}
    return Kind(
        parse, lambda most: {"anyOf": [kind.make_schema(most), more]}, values_text
    )


def make_sorted_kind(kind: Kind) -> Kind:
    """Return a kind of lists whose order has no meaning, and is put right."""
    return replace(
        kind,
        parse=lambda name, value, most: tuple(sorted(kind.parse(name, value, most))),
    )


def make_type_kind(
    kind: type, allowed: str, schema: Schema, values_text: str = ""
) -> Kind:
    def parse(name: str, value: Any, most: int) -> Any:
        return check_type(name, value, kind, allowed)

    return Kind(parse, schema, values_text)


SWITCH_KIND = make_type_kind(bool, "true, false or null", SWITCH, "true, false")
TEXT_KIND = make_type_kind(str, "a string or null", TEXT, "a string")


def make_enum_kind(*values: str) -> Kind:
    values_text = ", ".join(json.dumps(value) for value in values)

    def parse(name: str, value: Any, most: int) -> str:
        if value not in values or not isinstance(value, str):
            raise out_of_range_error(name, value, f"one of {values_text}")
        return value

    return Kind(parse, {"enum": list(values)}, values_text)


def make_strings_kind(*, allows_one: bool) -> Kind:
    """Return the kind of lists of strings, none of them empty; equal ones are read once.

    With `allows_one` a string by itself may stand for its list, and an empty one for none.
    """
    allowed = (
        "a string, a list of strings or null" if allows_one else "a list of strings"
    )

    def parse(name: str, value: Any, most: int) -> tuple[str, ...]:
        items = [value] if allows_one and isinstance(value, str) else value
        if items == [""] and allows_one:
            items = []
        if not isinstance(items, list) or not all(
            isinstance(text, str) for text in items
        ):
            raise wrong_type_error(name, value, allowed)
        if "" in items:
            raise RequestError(
                "out_of_range", f"{name} holds an empty string; remove it", name
            )
        return tuple(dict.fromkeys(items))

    texts: Schema = {"type": "array", "items": SOME_TEXT}
    schema: Schema = {"anyOf": [SOME_TEXT, texts, {"enum": ["", [""]]}]}
    return Kind(parse, schema if allows_one else texts, allowed)


def make_token_ids_kind(least: int = 0) -> Kind:
    """Return the kind of lists of token ids, `least` at least; equal ids count once."""

    def parse(name: str, value: Any, most: int) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(is_integral(item) for item in value):
            raise wrong_type_error(name, value, "a list of token ids or null")
        if len(value) < least:
            raise RequestError(
                "out_of_range", f"{name} is an empty list; give an id", name
            )
        return tuple(dict.fromkeys(int(item) for item in value))

    return Kind(parse, lambda most: make_token_ids_schema(most, least), "token ids")


def make_token_ids_schema(most: int, least: int = 0) -> Schema:
    """Return the schema of a list of token ids, at least so many of them."""
    items = {"type": "integer", "minimum": 0, "maximum": most}
    return {"type": "array", "items": items, "minItems": least}


def make_biases_kind(limit: float) -> Kind:
    """Return the kind of objects of token ids, written as strings, to numbers within ±limit."""
    allowed = (
        f"an object of token ids to numbers from {-limit} to {limit}, such as "
        f'{{"50256": -100}}'
    )

    def parse(name: str, value: Any, most: int) -> tuple[tuple[int, float], ...]:
        check_type(name, value, dict, allowed)
        bias_by_id: dict[int, float] = {}
        spellings: dict[int, str] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 20):
                raise RequestError(
                    "invalid_type",
                    f"{name} has the key {describe_value(key)}; it must be {allowed}",
                    name,
                )
            token_id = int(key)
            if token_id in bias_by_id:
                raise RequestError(
                    "out_of_range",
                    f'{name} names token {token_id} twice, as "{spellings[token_id]}" and as '
                    f'"{key}"; keep one of the two',
                    name,
                )
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise wrong_type_error(
                    f"{name}[{key}]", bias, f"a number from {-limit} to {limit}"
                )
            bias_by_id[token_id] = make_number_kind(-limit, limit).parse(
                f"{name}[{key}]", bias, most
            )
            spellings[token_id] = key
        return tuple(bias_by_id.items())

    schema: Schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,19}$"},
        "additionalProperties": make_number_kind(-limit, limit).make_schema(0),
    }
    return Kind(parse, schema, f'`{{"id": {-limit} … {limit}}}`')


def make_object_kind(kinds: Mapping[str, Kind], *required: str) -> Kind:
    """Return the kind of objects whose keys are these, and others only if they are null."""

    def parse(name: str, value: Any, most: int) -> dict[str, Any]:
        check_type(name, value, dict, "an object or null")
        members = {key: each for key, each in value.items() if each is not None}
        for key, each in members.items():
            if key not in kinds:
                text = (
                    f"{name} has {describe_value(key)}; it may have {', '.join(kinds)}"
                )
                raise RequestError(
                    "unsupported_parameter",
                    f"{text}. Leave {describe_value(key)} out",
                    name,
                )
            members[key] = kinds[key].parse(f"{name}.{key}", each, most)
        for key in required:
            if key not in members:
                raise RequestError(
                    "out_of_range", f"{name} has no {key}; give one", name
                )
        return members

    properties = {name: kind.make_schema(0) for name, kind in kinds.items()}
    optional = {
        name: allow_null(properties[name]) for name in kinds if name not in required
    }
    schema = make_object_schema(properties | optional, *required) | {
        "additionalProperties": NULL
    }
    return Kind(parse, schema, "an object")


def make_object_schema(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def make_full_object_schema(**properties: Schema) -> Schema:
    return make_object_schema(properties, *properties)


def make_list_schema(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def allow_null(schema: Schema) -> Schema:
    """Return a schema that null passes, too."""
    if schema in (ANYTHING, NULL):
        return schema
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema | {"type": [schema["type"], "null"]}


def _describe_broken_limit(value: float, low: int, high: int) -> str:
    """Name both limits, or of a 64-bit range the one that a value breaks."""
    if high < INT64 - 1:
        return f"from {low} to {high}"
    return f"at least {low}" if value <= low else f"at most {high}"


def is_same(value: object, other: object) -> bool:
    """Return whether two JSON values are equal; 1.0 is 1, true is not."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def is_integral(value: object) -> bool:
    """Return whether a JSON value is an integer; 2.0 is one, true is none."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def check_type(name: str, value: Any, kind: type[T], allowed: str) -> T:
    """Return a value that has a type of Python; raise an error for another."""
    if not isinstance(value, kind):
        raise wrong_type_error(name, value, allowed)
    return value


def wrong_type_error(name: str, value: object, allowed: str) -> RequestError:
    kind = describe_json_type(value)
    what = "" if value is None else f", {'an' if kind == 'object' else 'a'} {kind}"
    return RequestError(
        "invalid_type",
        f"{name} is {describe_value(value)}{what}; it must be {allowed}",
        name,
    )


def out_of_range_error(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(
        "out_of_range", f"{name} is {describe_value(value)}; it must be {allowed}", name
    )


def describe_json_type(value: object) -> str:
    names = {
        dict: "object",
        list: "list",
        str: "string",
        bool: "boolean",
        type(None): "null",
    }
    return names.get(type(value), "number")


def describe_value(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return f"a {describe_json_type(value)} nested too deep to show"
    return text if len(text) <= 60 else text[:57] + "…"

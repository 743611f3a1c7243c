"""What a request says its answer must be: a JSON Schema, a regex, one of some texts, a grammar.

`response_format` is OpenAI's, `structured_outputs` and `guided_…` are vLLM's, `grammar` and
`json_schema` are llama.cpp's. What a schema cannot have is found when it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import orjson

from fminfer.contract.fields import (
    SOME_TEXT,
    SWITCH_KIND,
    TEXT,
    TEXT_KIND,
    Field,
    Kind,
    Schema,
    describe_value,
    make_enum_kind,
    make_list_schema,
    make_object_kind,
    make_strings_kind,
    out_of_range_error,
    wrong_type_error,
)
from fminfer.contract.labels import PROBABILITIES, make_label_constraint
from fminfer.contract.prompts import check_text
from fminfer.core.config import Constraint, ConstraintKind
from fminfer.core.errors import RequestError

# of a constraint; the longest of 1,000 schemas from practice has 31 KB
MAX_BYTES = 256 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_CHOICES = 10_000
MAX_DEPTH = 64  # of a schema; the deepest of those has 19
WHITE_SPACE = "guided_whitespace_pattern"
# A regex of JSON's white space and of nothing else, so that an answer parses whatever it is.
_SPACE = r"[ \t\n\r]|\\[sntr]|\\x(?:20|09|0[aAdD])"
_SPACES = rf"^(?:{_SPACE}|[()|?*+]|\(\?:|\[(?:{_SPACE})+\]|\{{[0-9]{{1,4}}(,[0-9]{{0,4}})?\}})+$"


def find_constraint(values: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a request's fields as they were read; None: it has none."""
    named = {
        name: values[name]
        for name in CONSTRAINTS
        if name != WHITE_SPACE and values.get(name)
    }
    whitespace = values.get(WHITE_SPACE)
    if len(named) > 1:
        first, second, *_ = named
        raise RequestError(
            "out_of_range",
            f"{first} and {second} both say what the answer must be; keep one of them",
            second,
        )
    for name, constraint in named.items():
        if values.get("ignore_eos"):
            raise RequestError(
                "out_of_range",
                f"ignore_eos is true, and an answer under {name} ends where it is "
                "complete. Remove one of the two",
                "ignore_eos",
            )
        return _intern_constraint(_set_whitespace(constraint, whitespace, WHITE_SPACE))
    if whitespace:
        raise out_of_range_error(
            WHITE_SPACE, whitespace, "null without a JSON schema beside it"
        )
    return None


@lru_cache(32)  # texts of at most `MAX_BYTES` each
def _intern_constraint(constraint: Constraint) -> Constraint:
    """Return one object for equal constraints: lines mostly repeat theirs."""
    return constraint


def _set_whitespace(
    constraint: Constraint, whitespace: str | None, name: str
) -> Constraint:
    if not whitespace:
        return constraint
    if constraint.kind != "json" or constraint.whitespace:
        what = (
            "another field tells of it"
            if constraint.whitespace
            else "the answer is no JSON"
        )
        text = f"{name} is of the white space in JSON, and {what}. Remove {name}"
        raise RequestError("out_of_range", text, name)
    return replace(constraint, whitespace=whitespace)


def parse_json_schema(name: str, value: Any, most: int = 0) -> Constraint:
    """Parse a schema: an object, true, or its text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = orjson.loads(check_text(value, name))
        except orjson.JSONDecodeError as error:
            raise out_of_range_error(
                name, value, f"a JSON Schema, and it is no JSON: {error}"
            ) from None
    if schema is False:
        raise out_of_range_error(
            name, value, "a schema that something fits; false allows nothing"
        )
    if schema is not True and not isinstance(schema, dict):
        raise wrong_type_error(
            name, value, "a JSON Schema, which is an object, or its text"
        )
    if _depth_of(schema) > MAX_DEPTH:
        raise out_of_range_error(name, value, f"nested at most {MAX_DEPTH} deep")
    try:
        text = _dump_json({} if schema is True else schema)
    except ValueError:
        raise out_of_range_error(
            name, value, "without numbers that fit no double (1e400)"
        ) from None
    return _make_constraint("json", text, name)


def _depth_of(value: Any) -> int:
    """Return how deep lists and objects lie in each other, or a little more than is allowed."""
    depth = 0
    level = [value]
    while level and depth <= MAX_DEPTH:
        level = [each for each in level if isinstance(each, list | dict)]
        depth += bool(level)
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _parse_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise wrong_type_error(name, value, "a string that is not empty")
    return value


def _parse_choices(name: str, value: Any, most: int) -> Constraint:
    choices = make_strings_kind(allows_one=False).parse(name, value, most)
    if not 1 <= len(choices) <= MAX_CHOICES:
        text = f"{name} has {len(choices):,} choices; it must have"
        raise RequestError("out_of_range", f"{text} from 1 to {MAX_CHOICES:,}", name)
    return _make_constraint("choice", _dump_json(choices), name)


def _parse_json_object(name: str, value: Any, most: int) -> Constraint:
    if value is not True:
        raise wrong_type_error(name, value, "true or null")
    return _ANY_OBJECT


def _dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _make_constraint(kind: ConstraintKind, text: str, name: str) -> Constraint:
    """Return a constraint whose text is not too long, and has no half of a surrogate pair."""
    most = MAX_REGEX_BYTES if kind == "regex" else MAX_BYTES
    size = len(check_text(text, name).encode())
    if size > most:
        message = f"{name} has {size:,} bytes; at most {most:,} may be. Shorten it"
        raise RequestError("out_of_range", message, name)
    return Constraint(kind, text)


def _parse_response_format(name: str, value: Any, most: int) -> Constraint | None:
    """Parse OpenAI's field; llama.cpp and others put the schema beside the type."""
    kind = value.get("type") if isinstance(value, dict) else "text"
    if not isinstance(kind, str) or kind not in _FORMATS:
        known_types = ", ".join(map(describe_value, _FORMATS))
        raise RequestError(
            "unsupported_parameter",
            f"{name} has the type {describe_value(kind)}; it must be one of {known_types}. "
            "For a regex, "
            "choices or a grammar, give structured_outputs",
            name,
        )
    if kind != "json_schema" and isinstance(value, dict) and value.get("json_schema"):
        raise RequestError(
            "unsupported_parameter",
            f"{name} has json_schema and the type {describe_value(kind)}, which does "
            "not read it. Write "
            '"type": "json_schema"',
            name,
        )
    values = _FORMATS[kind].parse(name, value, most)
    if len(values) == 3:
        text = f"{name} has json_schema and schema; keep one of the two"
        raise RequestError("out_of_range", text, name)
    if kind == "json_schema" and len(values) == 1:
        raise RequestError("out_of_range", f"{name} has no schema; give one", name)
    constraint: Constraint | None = values.get("json_schema", values).get("schema")
    return _ANY_OBJECT if constraint is None and kind == "json_object" else constraint


def _parse_structured_outputs(name: str, value: Any, most: int) -> Constraint:
    values = _ANY_WAY.parse(name, value, most)
    ways = [way for way in _WAYS if way in values]
    if len(ways) != 1:
        raise out_of_range_error(name, value, f"an object with {_ONE_WAY}")
    if values.get("disable_additional_properties"):
        text = f"{name}.disable_additional_properties is true, and this version cannot do that"
        remedy = 'Write "additionalProperties": false into the schema'
        raise RequestError("unsupported_parameter", f"{text}. {remedy}", name)
    constraint: Constraint = values[ways[0]]
    if values.get("disable_any_whitespace"):
        constraint = _set_whitespace(
            constraint, "none", f"{name}.disable_any_whitespace"
        )
    pattern = values.get("whitespace_pattern")
    constraint = _set_whitespace(constraint, pattern, f"{name}.whitespace_pattern")
    if "probabilities" in values and ways[0] != "choice":
        text = f"{name}.probabilities needs choice, and this request has {ways[0]}"
        raise RequestError("out_of_range", f"{text}. Remove probabilities", name)
    if num_listed := values.get("probabilities", 0):
        return make_label_constraint(constraint, num_listed, name)
    return constraint


def _parse_whitespace(name: str, value: Any, most: int) -> str:
    """Parse a regex of white space; its `\\s` is that of JSON, and not all of Unicode's."""
    pattern = _parse_text(name, value)
    if len(pattern) > MAX_REGEX_BYTES or not re.search(_SPACES, pattern):
        allowed = (
            "a regex of spaces, \\n, \\t, \\r and \\s alone, of at most "
            f"{MAX_REGEX_BYTES:,}"
        )
        raise out_of_range_error(name, value, f"{allowed} characters, such as [ \\n]?")
    return pattern.replace(r"\s", r"[ \t\n\r]")


def _make_text_kind(kind: ConstraintKind, values_text: str) -> Kind:
    def parse(name: str, value: Any, most: int) -> Constraint:
        return _make_constraint(kind, _parse_text(name, value), name)

    return Kind(parse, SOME_TEXT, values_text)


def _allow_empty(kind: Kind) -> Kind:
    """Return a kind that takes "" for no wish, as some tools write it."""

    def parse(name: str, value: Any, most: int) -> Any:
        return None if value == "" else kind.parse(name, value, most)

    return Kind(
        parse, {"anyOf": [kind.make_schema(0), {"enum": [""]}]}, kind.values_text
    )


def _make_format_kind(kind: str, kinds: Mapping[str, Kind], *required: str) -> Kind:
    return make_object_kind({"type": make_enum_kind(kind), **kinds}, "type", *required)


def _make_any_schema(*kinds: Kind) -> Schema:
    return {"anyOf": [kind.make_schema(0) for kind in kinds]}


_ANY_OBJECT = Constraint("json", '{"type":"object"}')
_SCHEMA: Schema = {
    "anyOf": [
        {"type": "object"},
        {"enum": [True]},
        TEXT | {"pattern": r"^\s*(\{|true)"},
    ]
}
_CHOICES = make_list_schema(SOME_TEXT) | {"minItems": 1, "maxItems": MAX_CHOICES}
_WHITE = Kind(_parse_whitespace, TEXT | {"pattern": _SPACES}, "a regex of white space")
_WAYS = {
    "json": Kind(parse_json_schema, _SCHEMA, "a JSON Schema"),
    "regex": _make_text_kind("regex", "a regex"),
    "choice": Kind(_parse_choices, _CHOICES, "strings"),
    "grammar": _make_text_kind("grammar", "Lark or GBNF"),
    "json_object": Kind(_parse_json_object, {"enum": [True]}, "true"),
}
_BESIDE_WAYS = {
    "disable_any_whitespace": SWITCH_KIND,
    "whitespace_pattern": _WHITE,
    "disable_additional_properties": SWITCH_KIND,
    "disable_fallback": SWITCH_KIND,  # there is nothing to fall back on
}
_BESIDE_CHOICE = _BESIDE_WAYS | {"probabilities": PROBABILITIES}
_ANY_WAY = make_object_kind(_WAYS | _BESIDE_CHOICE)
_ONE_WAY = f"exactly one of {', '.join(_WAYS)}"
_STRUCTURED = _make_any_schema(
    *(
        make_object_kind(
            {way: _WAYS[way]} | (_BESIDE_CHOICE if way == "choice" else _BESIDE_WAYS),
            way,
        )
        for way in _WAYS
    )
)
_BARE = {"schema": _WAYS["json"]}
_NAMED = {
    "json_schema": make_object_kind(
        _BARE | {"name": TEXT_KIND, "strict": SWITCH_KIND, "description": TEXT_KIND},
        "schema",
    )
}
_FORMATS = {  # by their type; a schema stands in one of two places
    "text": _make_format_kind("text", {}),
    "json_object": _make_format_kind("json_object", _BARE),
    "json_schema": _make_format_kind("json_schema", _BARE | _NAMED),
}
_FORMAT = _make_any_schema(
    _FORMATS["text"],
    _FORMATS["json_object"],
    _make_format_kind("json_schema", _BARE, *_BARE),
    _make_format_kind("json_schema", _NAMED, *_NAMED),
)
_FIELDS = (
    Field(
        "response_format",
        Kind(_parse_response_format, _FORMAT, "an object"),
        "OpenAI's way to ask for JSON: `text`, `json_object`, or `json_schema` with a schema, "
        "`strict` or not.",
    ),
    Field(
        "structured_outputs",
        _allow_empty(Kind(_parse_structured_outputs, _STRUCTURED, "an object")),
        f"vLLM's way: {_ONE_WAY}; further `whitespace_pattern`, `disable_any_whitespace`. "
        "With `choice`: `probabilities` (true, or how many of the likeliest labels to list).",
    ),
    Field(
        "guided_json",
        _allow_empty(_WAYS["json"]),
        "An older name of `structured_outputs.json`.",
    ),
    Field(
        "guided_regex", _allow_empty(_WAYS["regex"]), "Of `structured_outputs.regex`."
    ),
    Field(
        "guided_choice",
        _allow_empty(_WAYS["choice"]),
        "Of `structured_outputs.choice`.",
    ),
    Field(
        "guided_grammar",
        _allow_empty(_WAYS["grammar"]),
        "Of `structured_outputs.grammar`.",
    ),
    Field(
        WHITE_SPACE, _allow_empty(_WHITE), "Of `structured_outputs.whitespace_pattern`."
    ),
    Field(
        "json_schema",
        _allow_empty(_WAYS["json"]),
        "llama.cpp's name of `structured_outputs.json`.",
    ),
    Field(
        "grammar",
        _allow_empty(_WAYS["grammar"]),
        "llama.cpp's name of `structured_outputs.grammar`.",
    ),
)
CONSTRAINTS = {each.name: each for each in _FIELDS}

"""What a request says its answer must be: a JSON Schema, a regex, one of some texts, a grammar.

`response_format` is OpenAI's, `structured_outputs` and `guided_…` are vLLM's, `grammar` and
`json_schema` are llama.cpp's. What a schema cannot have is found later, when it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import orjson

from fminfer.contract.fields import (
    NULL,
    SOME_TEXT,
    SWITCH,
    TEXT,
    Kind,
    Schema,
    allow_null,
    list_of,
    object_of,
    of_type,
    out_of_range,
    show,
    strings,
    wrong_type,
)
from fminfer.contract.prompts import check_text
from fminfer.core.config import Constraint, ConstraintKind
from fminfer.core.errors import RequestError

MAX_BYTES = 256 << 10  # of a constraint; the longest of 1,000 schemas from practice has 31 KB
MAX_REGEX_BYTES = 16 << 10
MAX_CHOICES = 10_000
MAX_DEPTH = 64  # of a schema; the deepest of those has 19
# The types of `response_format`, and what may stand beside each.
FORMATS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema", "schema")}
WHITE_SPACE = "guided_whitespace_pattern"
# A regex of JSON's white space and of nothing else, so that an answer parses whatever it is.
_SPACE = r"[ \t\n\r]|\\[sntr]|\\x(?:20|09|0[aAdD])"
_SPACES = rf"^(?:{_SPACE}|[()|?*+]|\(\?:|\[(?:{_SPACE})+\]|\{{[0-9]{{1,4}}(,[0-9]{{0,4}})?\}})+$"


def find_constraint(found: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a request's fields as they were read; None: it has none.

    Raises:
        RequestError: it has two, or one that its other fields contradict.
    """
    named = {name: found[name] for name in KINDS if name != WHITE_SPACE and found.get(name)}
    whitespace = found.get(WHITE_SPACE)
    if len(named) > 1:
        first, second, *_ = named
        raise RequestError(
            "out_of_range",
            f"{first} and {second} both say what the answer must be; keep one of them",
            second,
        )
    for name, constraint in named.items():
        if found.get("ignore_eos"):
            raise RequestError(
                "out_of_range",
                f"ignore_eos is true, and an answer under {name} ends where it is complete. Remove "
                "one of the two",
                "ignore_eos",
            )
        return _intern(_with_whitespace(constraint, whitespace, WHITE_SPACE))
    if whitespace:
        raise out_of_range(WHITE_SPACE, whitespace, "null without a JSON schema beside it")
    return None


@lru_cache(256)
def _intern(constraint: Constraint) -> Constraint:
    """Return one object for equal constraints: lines mostly repeat theirs."""
    return constraint


def _with_whitespace(constraint: Constraint, whitespace: str | None, name: str) -> Constraint:
    if not whitespace:
        return constraint
    if constraint.kind != "json" or constraint.whitespace:
        what = "another field tells of it" if constraint.whitespace else "the answer is no JSON"
        text = f"{name} is of the white space in JSON, and {what}. Remove {name}"
        raise RequestError("out_of_range", text, name)
    return replace(constraint, whitespace=whitespace)


def _read_json(name: str, value: Any, most: int) -> Constraint:
    """Read a schema: an object, true, or its text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = orjson.loads(check_text(value, name))
        except orjson.JSONDecodeError as error:
            raise out_of_range(name, value, f"a JSON Schema, and it is no JSON: {error}") from None
    if schema is False:
        raise out_of_range(name, value, "a schema that something fits; false allows nothing")
    if schema is not True and not isinstance(schema, dict):
        raise wrong_type(name, value, "a JSON Schema, which is an object, or its text")
    if _depth_of(schema) > MAX_DEPTH:
        raise out_of_range(name, value, f"nested at most {MAX_DEPTH} deep")
    try:
        text = _dump({} if schema is True else schema)
    except ValueError:
        raise out_of_range(name, value, "without numbers that fit no double (1e400)") from None
    return _make("json", text, name)


def _depth_of(value: Any) -> int:
    """Return how deep lists and objects lie in each other, or a little more than is allowed."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [each for each in level if isinstance(each, list | dict)]
        depth += bool(level)
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise wrong_type(name, value, "a string that is not empty")
    return value


def _read_choice(name: str, value: Any, most: int) -> Constraint:
    choices = strings(one=False).read(name, value, most)
    if not 1 <= len(choices) <= MAX_CHOICES:
        found = f"{name} has {len(choices):,} choices; it must have"
        raise RequestError("out_of_range", f"{found} from 1 to {MAX_CHOICES:,}", name)
    return _make("choice", _dump(choices), name)


def _read_true(name: str, value: Any, most: int) -> Constraint:
    if value is not True:
        raise wrong_type(name, value, "true or null")
    return _make("json", '{"type":"object"}', name)


def _dump(value: object) -> str:
    """Return a value as compact JSON; an infinite number is a ValueError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _make(kind: ConstraintKind, text: str, name: str) -> Constraint:
    """Return a constraint whose text is not too long.

    Raises:
        RequestError: it is, or it holds half a surrogate pair.
    """
    most = MAX_REGEX_BYTES if kind == "regex" else MAX_BYTES
    size = len(check_text(text, name).encode())
    if size > most:
        told = f"{name} has {size:,} bytes; at most {most:,} may be. Shorten it"
        raise RequestError("out_of_range", told, name)
    return Constraint(kind, text)


def _read_object(name: str, value: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Return an object's keys that are not null, if all of them are known.

    Raises:
        RequestError: it is no object, or has other keys.
    """
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object or null")
    found = {key: each for key, each in value.items() if each is not None}
    for key in found:
        if key not in allowed:
            text = f"{name} has {show(key)}; it may have {', '.join(allowed)}"
            raise RequestError("unsupported_parameter", f"{text}. Leave {show(key)} out", name)
    return found


def _read_response_format(name: str, value: Any, most: int) -> Constraint | None:
    """Read OpenAI's field; llama.cpp and others put the schema beside the type."""
    kind = value.get("type") if isinstance(value, dict) else "text"
    if not isinstance(kind, str) or kind not in FORMATS:
        told = ", ".join(map(show, FORMATS))
        raise RequestError(
            "unsupported_parameter",
            f"{name} has the type {show(kind)}; it must be one of {told}. For a regex, choices or "
            "a grammar, give structured_outputs",
            name,
        )
    found = _read_object(name, value, ("type", *FORMATS[kind]))
    if len(found) == 3:
        text = f"{name} has json_schema and schema; keep one of the two"
        raise RequestError("out_of_range", text, name)
    if "json_schema" in found:
        name = f"{name}.json_schema"
        found = _read_object(name, found["json_schema"], ("schema", *_BESIDE_SCHEMA))
        for key in [key for key in found if key in _BESIDE_SCHEMA]:
            _BESIDE_SCHEMA[key].read(f"{name}.{key}", found[key], most)
    if "schema" in found:
        return _read_json(f"{name}.schema", found["schema"], most)
    if kind == "json_schema":
        raise RequestError("out_of_range", f"{name} has no schema; give one", name)
    return None if kind == "text" else _read_true(name, True, most)


def _read_structured_outputs(name: str, value: Any, most: int) -> Constraint:
    """Read vLLM's field."""
    found = _read_object(name, value, (*_WAYS, *_BESIDE_WAYS))
    ways = [way for way in _WAYS if way in found]
    if len(ways) != 1:
        raise out_of_range(name, value, f"an object with {_ONE_WAY}")
    for key in [key for key in found if key in _BESIDE_WAYS]:
        found[key] = _BESIDE_WAYS[key].read(f"{name}.{key}", found[key], most)
    if found.get("disable_additional_properties"):
        text = f"{name}.disable_additional_properties is true, and this version cannot do that"
        remedy = 'Write "additionalProperties": false into the schema'
        raise RequestError("unsupported_parameter", f"{text}. {remedy}", name)
    constraint = _WAYS[ways[0]].read(f"{name}.{ways[0]}", found[ways[0]], most)
    if found.get("disable_any_whitespace"):
        constraint = _with_whitespace(constraint, "none", f"{name}.disable_any_whitespace")
    pattern = found.get("whitespace_pattern")
    return _with_whitespace(constraint, pattern, f"{name}.whitespace_pattern")


def _read_whitespace(name: str, value: Any, most: int) -> str:
    """Read a regex of white space; its `\\s` is that of JSON, and not all of Unicode's."""
    pattern = _read_text(name, value)
    if len(pattern) > MAX_REGEX_BYTES or not re.search(_SPACES, pattern):
        allowed = f"a regex of spaces, \\n, \\t, \\r and \\s alone, of at most {MAX_REGEX_BYTES:,}"
        raise out_of_range(name, value, f"{allowed} characters, such as [ \\n]?")
    return pattern.replace(r"\s", r"[ \t\n\r]")


def _kind(read: Callable[[str, Any, int], Any], schema: Schema, told: str) -> Kind:
    return Kind(read, lambda most: schema, told)


def _of_text(kind: ConstraintKind, told: str) -> Kind:
    return _kind(
        lambda name, value, most: _make(kind, _read_text(name, value), name), SOME_TEXT, told
    )


def _or_empty(kind: Kind) -> Kind:
    """Return a kind that takes "" for no wish, as some tools write it."""
    return Kind(
        lambda name, value, most: None if value == "" else kind.read(name, value, most),
        lambda most: {"anyOf": [kind.schema(most), {"enum": [""]}]},
        kind.told,
    )


def _whole(properties: dict[str, Schema], beside: dict[str, Kind], *required: str) -> Schema:
    """Return the schema of an object whose further keys are null."""
    further = {key: allow_null(kind.schema(0)) for key, kind in beside.items()}
    return object_of(properties | further, *required) | {"additionalProperties": NULL}


_SWITCH = of_type(bool, "true, false or null", SWITCH)
_TEXT = of_type(str, "a string or null", TEXT)
_BESIDE_SCHEMA = {"name": _TEXT, "strict": _SWITCH, "description": _TEXT}
_SCHEMA: Schema = {
    "anyOf": [{"type": "object"}, {"enum": [True]}, TEXT | {"pattern": r"^\s*(\{|true)"}]
}
_WHITE = _kind(_read_whitespace, TEXT | {"pattern": _SPACES}, "a regex of white space")
_WAYS = {
    "json": _kind(_read_json, _SCHEMA, "a JSON Schema"),
    "regex": _of_text("regex", "a regex"),
    "choice": _kind(
        _read_choice, list_of(SOME_TEXT) | {"minItems": 1, "maxItems": MAX_CHOICES}, "strings"
    ),
    "grammar": _of_text("grammar", "Lark or GBNF"),
    "json_object": _kind(_read_true, {"enum": [True]}, "true"),
}
_BESIDE_WAYS = {
    "disable_any_whitespace": _SWITCH,
    "whitespace_pattern": _WHITE,
    "disable_additional_properties": _SWITCH,
    "disable_fallback": _SWITCH,  # there is nothing to fall back on
}
_ONE_WAY = f"exactly one of {', '.join(_WAYS)}"
_FORMAT: Schema = {
    "anyOf": [
        _whole({"type": {"enum": ["text"]}}, {}, "type"),
        _whole({"type": {"enum": ["json_object"]}}, {"schema": _WAYS["json"]}, "type"),
        _whole({"type": {"enum": ["json_schema"]}, "schema": _SCHEMA}, {}, "type", "schema"),
        _whole(
            {
                "type": {"enum": ["json_schema"]},
                "json_schema": _whole({"schema": _SCHEMA}, _BESIDE_SCHEMA, "schema"),
            },
            {},
            *("type", "json_schema"),
        ),
    ]
}
_STRUCTURED: Schema = {
    "anyOf": [_whole({way: kind.schema(0)}, _BESIDE_WAYS, way) for way, kind in _WAYS.items()]
}
# By a field's name: what it may be, and its help.
KINDS: dict[str, Kind] = {
    "response_format": _kind(_read_response_format, _FORMAT, "an object"),
    "structured_outputs": _or_empty(_kind(_read_structured_outputs, _STRUCTURED, "an object")),
    **{f"guided_{way}": _or_empty(_WAYS[way]) for way in ("json", "regex", "choice", "grammar")},
    WHITE_SPACE: _or_empty(_WHITE),
    "json_schema": _or_empty(_WAYS["json"]),
    "grammar": _or_empty(_WAYS["grammar"]),
}
HELPS = {
    "response_format": "OpenAI's way to ask for JSON: `text`, `json_object`, or `json_schema` "
    "with a schema, `strict` or not.",
    "structured_outputs": f"vLLM's way: {_ONE_WAY}; further `whitespace_pattern`, "
    "`disable_any_whitespace`.",
    "guided_json": "An older name of `structured_outputs.json`.",
    "guided_regex": "Of `structured_outputs.regex`.",
    "guided_choice": "Of `structured_outputs.choice`.",
    "guided_grammar": "Of `structured_outputs.grammar`.",
    WHITE_SPACE: "Of `structured_outputs.whitespace_pattern`.",
    "json_schema": "llama.cpp's name of `structured_outputs.json`.",
    "grammar": "llama.cpp's name of `structured_outputs.grammar`.",
}

"""What a request says its answer must be: a JSON Schema, a regex, one of some texts, a grammar.

`response_format` is OpenAI's, `structured_outputs` and `guided_…` are vLLM's, `grammar` and
`json_schema` are llama.cpp's. What a schema cannot have is found later, when it is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import orjson

from fminfer.contract.fields import (
    TEXT,
    TEXTS,
    Kind,
    Schema,
    object_of,
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
FORMATS = ("text", "json_object", "json_schema")
# Of `structured_outputs`, one of which says what the answer is.
WAYS = ("json", "regex", "choice", "grammar", "json_object")
WHITE_SPACE = "guided_whitespace_pattern"
_ONE_WAY = f"exactly one of {', '.join(WAYS)}"


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
    if constraint.kind != "json":
        raise out_of_range(name, whitespace, "null beside a regex, choices or a grammar")
    return replace(constraint, whitespace=whitespace)


def _read_json(name: str, value: Any, most: int) -> Constraint | None:
    """Read a schema: an object, a boolean, or its text."""
    if value == "":
        return None
    schema = value
    if isinstance(value, str):
        try:
            schema = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise out_of_range(name, value, f"a JSON Schema, and it is no JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        if schema is False:
            raise out_of_range(name, value, "a schema that something fits; false allows nothing")
        raise wrong_type(name, value, "a JSON Schema, which is an object, or its text")
    if _depth_of(schema) > MAX_DEPTH:
        raise out_of_range(name, value, f"nested at most {MAX_DEPTH} deep")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
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


def _read_text(kind: ConstraintKind, what: str) -> Any:
    def read(name: str, value: Any, most: int) -> Constraint | None:
        if not isinstance(value, str):
            raise wrong_type(name, value, f"{what}, as a string")
        return _make(kind, value, name) if value else None

    return read


def _read_choice(name: str, value: Any, most: int) -> Constraint | None:
    choices = [] if value == "" else strings(one=False).read(name, value, most)
    if value == "":
        return None
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise out_of_range(name, value, f"a list of 1 to {MAX_CHOICES:,} strings")
    return _make("choice", json.dumps(choices, ensure_ascii=False), name)


def _make(kind: ConstraintKind, text: str, name: str) -> Constraint:
    """Return a constraint whose text is not too long.

    Raises:
        RequestError: it is, or it holds half a surrogate pair.
    """
    most = MAX_REGEX_BYTES if kind == "regex" else MAX_BYTES
    if len(text) > most:
        raise RequestError(
            "out_of_range", f"{name} has {len(text):,} characters; at most {most:,} may be", name
        )
    return Constraint(kind, check_text(text, name))


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
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind not in FORMATS:
        told = ", ".join(map(show, FORMATS))
        raise RequestError(
            "unsupported_parameter",
            f"{name} has the type {show(kind)}; it must be one of {told}. For a regex, choices or "
            "a grammar, give structured_outputs",
            name,
        )
    found = _read_object(name, value, ("type", "json_schema", "schema"))
    if kind == "text":
        return None
    inner = f"{name}.json_schema"
    wrapped = found.get("json_schema", {})
    keys = ("name", "schema", "strict", "description")
    schema = _read_object(inner, wrapped, keys).get("schema", found.get("schema"))
    if schema is not None:
        return _read_json(f"{inner}.schema", schema, most)
    if kind == "json_schema":
        raise RequestError("out_of_range", f"{inner} has no schema; give one", name)
    return _make("json", '{"type":"object"}', name)


def _read_structured_outputs(name: str, value: Any, most: int) -> Constraint | None:
    """Read vLLM's field."""
    further = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
    found = _read_object(name, value, (*WAYS, *further))
    if found.get(further[2], False) is not False:
        text = f"{name}.{further[2]} is {show(found[further[2]])}, and this version cannot do that"
        remedy = 'Write "additionalProperties": false into the schema'
        raise RequestError("unsupported_parameter", f"{text}. {remedy}", name)
    if found.get("json_object") is False:
        del found["json_object"]
    ways = [way for way in WAYS if way in found]
    if len(ways) != 1:
        raise out_of_range(name, value, f"an object with {_ONE_WAY}")
    way = ways[0]
    if way == "json_object":
        constraint = None if found[way] is not True else _make("json", '{"type":"object"}', name)
    else:
        constraint = KINDS[f"guided_{way}"].read(f"{name}.{way}", found[way], most)
    if constraint is None:
        raise out_of_range(f"{name}.{way}", found[way], "true" if way == "json_object" else "given")
    whitespace = found.get("whitespace_pattern")
    if whitespace is not None and not isinstance(whitespace, str):
        raise wrong_type(f"{name}.whitespace_pattern", whitespace, "a regex, as a string")
    if found.get("disable_any_whitespace"):
        whitespace = "none"
    return _with_whitespace(constraint, whitespace, f"{name}.whitespace_pattern")


def _read_whitespace(name: str, value: Any, most: int) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a regex, as a string")
    return check_text(value, name)


def _kind(read: Any, schema: Schema, told: str) -> Kind:
    return Kind(read, lambda most: schema, told)


_OBJECT: Schema = {"type": "object"}
_SCHEMA: Schema = {"anyOf": [_OBJECT, {"type": "boolean"}, TEXT]}
_CHOICES: Schema = {"anyOf": [TEXTS | {"maxItems": MAX_CHOICES}, {"enum": [""]}]}
_FORMAT = object_of(
    {"type": {"enum": [*FORMATS]}, "json_schema": _OBJECT, "schema": _OBJECT}, "type"
) | {"additionalProperties": False}
_GRAMMAR = _kind(_read_text("grammar", "a grammar in Lark or GBNF"), TEXT, "Lark or GBNF")
_JSON = _kind(_read_json, _SCHEMA, "a JSON Schema")
KINDS: dict[str, Kind] = {
    "response_format": _kind(_read_response_format, _FORMAT, "an object"),
    "structured_outputs": _kind(_read_structured_outputs, _OBJECT, "an object"),
    "guided_json": _JSON,
    "guided_regex": _kind(_read_text("regex", "a regex"), TEXT, "a regex"),
    "guided_choice": _kind(_read_choice, _CHOICES, "strings"),
    "guided_grammar": _GRAMMAR,
    WHITE_SPACE: _kind(_read_whitespace, TEXT, "a regex"),
    "json_schema": _JSON,
    "grammar": _GRAMMAR,
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

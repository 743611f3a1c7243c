"""Gives an argument that a model writes as bare text the type that the tool's schema says."""

from __future__ import annotations

import json
from typing import Any

from fminfer.text.calls.python_literals import convert_literals
from fminfer.text.calls.tool_call import parse_json_value
from fminfer.text.json_schemas import ANNOTATIONS, find_referenced_schema

_TYPE_NAMES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
_UNKNOWN: frozenset[str] = frozenset()
_UNIONS = ("anyOf", "oneOf", "allOf")


def make_argument(parameters: Any, name: str, text: str) -> str:
    """Return the JSON of an argument of which a model wrote the text.

    A string stays as it is. What fits none of its types is JSON if it is any, else a string.
    So is an argument of which nothing is known. Others may be written as Python.

    Args:
        parameters: the schema of all arguments; None: nobody says.
    """
    schema = parameters
    if reference := _find_value(parameters, "$ref"):
        schema = find_referenced_schema(str(reference), parameters)
    properties = _find_value(schema, "properties")
    others = {name: _find_value(schema, "additionalProperties")}
    known = others | properties if isinstance(properties, dict) else others
    types = find_argument_types(known[name], parameters)
    spellings = [text, convert_literals(text)] if types else [text]
    for spelling in [] if types == {"string"} else spellings:
        try:
            value = parse_json_value(spelling)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()  # half of a surrogate pair fits no answer
        except (ValueError, RecursionError):
            continue
        is_text = isinstance(value, str) and types <= {"string", "null"}
        fits = not is_text and types & _TYPE_NAMES[type(value)]
        if fits or "string" not in types:
            return written
    return json.dumps(text, ensure_ascii=False)


def find_argument_types(schema: Any, root: Any) -> frozenset[str]:
    """Return the types that a schema allows; the empty set: it does not say."""
    all_names = _UNKNOWN
    for branch in list_branches(schema, root):
        values = [branch["const"]] if "const" in branch else branch.get("enum")
        types = branch.get("type")
        types = types if isinstance(types, list) else [types]
        names = frozenset(name for name in types if isinstance(name, str))
        if not names and isinstance(values, list):
            names = _UNKNOWN.union(*(_TYPE_NAMES[type(value)] for value in values))
        if not names:
            return _UNKNOWN
        all_names |= names
    return all_names


def list_branches(schema: Any, root: Any) -> list[dict[str, Any]]:
    """Return the schemas of which a value must fit one, behind references and unions."""
    branches = []
    pending = [schema]
    seen = set[int]()
    for part in pending:  # which grows on the way
        rules = {*part} - ANNOTATIONS if isinstance(part, dict) else set()
        inner = None
        if rules == {"$ref"}:
            inner = [find_referenced_schema(str(part["$ref"]), root)]
        elif len(rules) == 1 and rules <= {*_UNIONS}:
            (name,) = rules
            inner = part[name]
        if isinstance(inner, list) and (len(inner) == 1 or rules != {"allOf"}):
            pending += [each for each in inner if id(each) not in seen]
            seen.update(map(id, inner))
        else:
            branches.append(part if isinstance(part, dict) else {})
    return branches


def _find_value(schema: Any, key: str) -> Any:
    return schema.get(key) if isinstance(schema, dict) else None

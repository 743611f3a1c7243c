"""The single-turn Python calls of BFCL, from an installed `bfcl-eval`, which is not imported.

Its answers are lists of allowed values, of which the first that fits the type is taken. An
empty text among them means that the argument may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.text.call_writers import Call

CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class BfclCase:
    """A question's tools, in OpenAI's form, and the calls that answer it."""

    id: str
    tools: list[dict[str, Any]]
    calls: list[Call]


def make_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a type of BFCL's."""
    made = dict(schema)
    kind = made.pop("type", "any")
    if kind != "any":
        made["type"] = TYPES.get(kind, kind)
    if isinstance(made.get("properties"), dict):
        properties = made["properties"]
        made["properties"] = {key: make_schema(properties[key]) for key in properties}
    for name in ("items", "additionalProperties"):
        if isinstance(made.get(name), dict):
            made[name] = make_schema(made[name])
    return made


def fits(value: object, schema: dict[str, Any]) -> bool:
    kinds = PYTHON_TYPES.get(schema.get("type", "any"))
    is_flag = isinstance(value, bool) and bool not in (kinds or (bool,))
    return kinds is None or (isinstance(value, kinds) and not is_flag)


def choose_value(value: Any) -> Any:
    """Return a value in which each key of an object has a list of allowed ones."""
    if isinstance(value, list):
        return [choose_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    allowed = {key: each for key, each in value.items() if each != [""]}
    return {
        key: choose_value(each[0] if isinstance(each, list) else each)
        for key, each in allowed.items()
    }


def choose_arguments(
    allowed: dict[str, list[Any]], schema: dict[str, Any]
) -> dict[str, Any]:
    """Return one of the allowed calls."""
    properties = schema.get("properties", {})
    arguments = {}
    for key, values in allowed.items():
        usable = [value for value in values if fits(value, properties.get(key, {}))]
        if not usable or (usable[0] == "" and len(usable) == 1):
            continue
        arguments[key] = choose_value(usable[0] if usable[0] != "" else usable[1])
    return arguments


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@cache
def read_cases() -> list[BfclCase]:
    """Return all cases; a test that asks is skipped where they are not installed."""
    package = find_spec("bfcl_eval")
    if package is None or not package.submodule_search_locations:
        pytest.skip("bfcl-eval is not installed")
    folder = Path(package.submodule_search_locations[0]) / "data"
    cases = []
    for category in CATEGORIES:
        name = f"BFCL_v4_{category}.json"
        answers = {
            line["id"]: line["ground_truth"]
            for line in read_lines(folder / "possible_answer" / name)
        }
        for line in read_lines(folder / name):
            functions = [
                each | {"parameters": make_schema(each["parameters"])}
                for each in line["function"]
            ]
            schemas = {each["name"]: each["parameters"] for each in functions}
            calls = [
                (function, choose_arguments(allowed, schemas[function]))
                for answer in answers[line["id"]]
                for function, allowed in answer.items()
            ]
            tools = [{"type": "function", "function": each} for each in functions]
            cases.append(BfclCase(line["id"], tools, calls))
    return cases

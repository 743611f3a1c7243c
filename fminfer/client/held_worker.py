"""Checks answers against schemas and regexes, in a limited process: both may take long."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import orjson

MAX_KEPT = 64  # schemas and regexes
MAX_SHOWN = 200  # characters of what is wrong


def build_checker() -> Any:
    """Return what checks a text, as `text.limited_process` wants it."""
    # what is missing is missed before the first answer
    import jsonschema  # type: ignore[import-untyped]  # noqa: F401

    return check_text


def check_text(message: list[str]) -> str:
    """Return what is wrong with a text; "": nothing, or nobody can tell.

    Args:
        message: the kind of a constraint, its text, and the text to check.
    """
    kind, constraint, text = message
    try:
        validator = _make_validator(kind, constraint)
        if kind == "regex":
            is_right = validator.fullmatch(text) is not None
            return "" if is_right else "the regex does not match all of it"
        value = orjson.loads(text)
        fault = next(validator.iter_errors(value), None)
    except orjson.JSONDecodeError as error:
        return f"it is no JSON: {error}"
    except Exception:  # such as a `$ref` to elsewhere, or a regex that Python lacks
        return ""
    if fault is None:
        return ""
    return f"{fault.json_path} does not follow the schema: {fault.message}"[:MAX_SHOWN]


@lru_cache(MAX_KEPT)
def _make_validator(kind: str, text: str) -> Any:
    if kind == "regex":
        if "[[:" in text:  # a class that Python reads as something else
            raise ValueError("a regex that is not Python's")
        return re.compile(text)
    from jsonschema.validators import (  # type: ignore[import-untyped]
        Draft202012Validator,
        extend,
        validator_for,
    )
    from referencing import Registry

    schema = orjson.loads(text)
    chosen = validator_for(schema, default=Draft202012Validator)
    # By floats 0.07 is no multiple of 0.01.
    chosen = extend(chosen, {"multipleOf": lambda *arguments: ()})
    # an empty registry fetches no schema from anywhere
    return chosen(schema, registry=Registry())

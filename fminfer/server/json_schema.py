"""JSON Schema in few words, and tables of fields that become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "array", "items": TEXT, "minItems": 1}
SWITCH: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {}


@dataclass(slots=True, frozen=True)
class Field:
    """One field of a request's object.

    A field that is not required may be null, which means the default.
    """

    name: str
    meaning: str
    schema: Schema
    default: object = None  # None: `meaning` says what happens without it
    is_required: bool = False

    def describe(self) -> Schema:
        """Return its JSON Schema."""
        told: Schema = {"description": self.meaning}
        if self.default is not None:
            told["default"] = self.default
        return allow_null(self.schema) | told if not self.is_required else self.schema | told


@dataclass(slots=True, frozen=True)
class FieldTable:
    """All fields of one kind of request."""

    meaning: str
    fields: tuple[Field, ...]
    example: dict[str, Any]

    def describe(self, *, is_strict: bool = False) -> Schema:
        """Return the JSON Schema of the request's object.

        Args:
            is_strict: it has no other fields.
        """
        return {
            "type": "object",
            "description": self.meaning,
            "required": [each.name for each in self.fields if each.is_required],
            "properties": {each.name: each.describe() for each in self.fields},
            "additionalProperties": not is_strict,
            "examples": [self.example],
        }


def allow_null(schema: Schema) -> Schema:
    """Return a schema that null passes, too."""
    if schema in (ANYTHING, NULL):
        return schema
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema | {"type": [schema["type"], "null"]}


def integer(low: int, high: int) -> Schema:
    """Return the schema of an integer within limits."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    """Return the schema of a number within limits."""
    return {"type": "number", "minimum": low, "maximum": high}


def object_of(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object, and which of its properties it must have."""
    return {"type": "object", "properties": properties, "required": list(required)}

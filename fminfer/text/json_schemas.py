"""Reads JSON Schemas beside llguidance: unions, unknown keywords, shortest texts, finite values.

llguidance holds answers to `anyOf`, and takes `oneOf` only in the simplest cases. Unions with a
discriminator, as pydantic writes them, are proven here: nothing fits two of their branches.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

from fminfer.text.string_formats import FORMATS, NATIVE_FORMATS

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})
MAX_DEPTH = 64
_BESIDE_TYPE = frozenset({"properties", "required", "items", "prefixItems", "minItems"})
MAX_SHORTEST = 20_000  # characters
MAX_ROUNDS = 20  # over a whole schema; each finds texts that the next one needs
_LONG = "".ljust(MAX_SHORTEST, "a")  # stands for a text that is too long
ANNOTATIONS = frozenset(  # keywords that ask for nothing
    {
        "$schema",
        "$id",
        "id",
        "$comment",
        "$anchor",
        "$dynamicAnchor",
        "$vocabulary",
        "title",
    }
    | {
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    }
    | {"discriminator", "xml", "externalDocs", "contentEncoding", "contentMediaType"}
    | {"contentSchema", "x-guidance"}
)
_RULES = frozenset(
    {
        *_MAPS,
        *_LISTS,
        *_SINGLE,
        "type",
        "enum",
        "const",
        "required",
        "minItems",
        "maxItems",
    }
    | {
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "multipleOf",
    }
    | {
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minProperties",
        "maxProperties",
        "not",
        "if",
    }
    | {
        "then",
        "else",
        "$ref",
        "$dynamicRef",
        "uniqueItems",
        "propertyNames",
        "nullable",
    }
    | {
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
    }
    | {"dependencies", "unevaluatedProperties", "unevaluatedItems"}
)
KNOWN_KEYS = ANNOTATIONS | _RULES


def find_unknown_keywords(schema: Any) -> set[str]:
    """Return a schema's unknown keywords, such as misspelled ones, and unknown formats.

    Raises:
        ValueError: a schema has unknown keywords alone.
    """
    names: set[str] = set()
    grouped: set[int] = set()  # an entry of $defs may be a group of schemas

    def visit(part: Any) -> Any:
        if isinstance(part, dict):
            unknown = part.keys() - KNOWN_KEYS
            for places in (part.get("$defs"), part.get("definitions")):
                grouped.update(
                    map(id, places.values() if isinstance(places, dict) else ())
                )
            # An inner schema may have a program's own notes, such as "javaType": "Name".
            odd = {
                n
                for n in unknown
                if n[:2] != "x-" and (part is schema or isinstance(part[n], dict))
            }
            if odd and not part.keys() & _RULES and id(part) not in grouped:
                raise _no_keyword_error(part, min(odd))
            form = part.get("format")
            if isinstance(form, str) and form not in FORMATS.keys() | NATIVE_FORMATS:
                names.add(f'the format "{form}"')
            names.update(unknown)
            change_inner_schemas(part, visit)
        return part

    visit(schema)
    return names


def _no_keyword_error(schema: dict[str, Any], name: str) -> ValueError:
    remedy = 'Put names of properties under "properties"'
    for wrapper in ("schema", "json_schema", "parameters", "input_schema"):
        if wrapper in schema:
            name = wrapper
            remedy = f"Give what stands under {json.dumps(wrapper)} as the schema"
    return ValueError(
        f"it has {json.dumps(name)} and no keyword of JSON Schema, so that any JSON would fit. "
        + remedy
    )


def change_inner_schemas(
    schema: dict[str, Any], change: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return a schema with the schemas inside it changed."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            changed[key] = {name: change(part) for name, part in value.items()}
        elif key in _LISTS + _SINGLE and isinstance(value, list):
            changed[key] = [change(part) for part in value]
        elif key in _SINGLE:
            changed[key] = change(value)
    return changed


class UnionRewriter:
    """Rewrites a schema, whose references are looked up in `root`."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def rewrite(self, schema: Any) -> Any:
        """Return a schema that the same texts fit, with fewer `oneOf`."""
        if not isinstance(schema, dict) or self._has_own_references(schema):
            return schema
        rewritten = change_inner_schemas(schema, self.rewrite)
        branches = schema.get("oneOf")
        if (
            isinstance(branches, list)
            and "anyOf" not in schema
            and self._are_exclusive(branches)
        ):
            # for which llguidance would look into each branch
            rewritten.pop("discriminator", None)
            return {
                "anyOf" if key == "oneOf" else key: value
                for key, value in rewritten.items()
            }
        return rewritten

    def _has_own_references(self, schema: dict[str, Any]) -> bool:
        """Tell whether references inside a schema are not those of the whole one."""
        return schema is not self._root and "$id" in schema

    def _are_exclusive(self, branches: list[Any]) -> bool:
        """Tell whether nothing fits two of some schemas, as far as that is easy to see."""
        pairs = combinations(branches, 2)
        return len(branches) <= 100 and all(
            self._are_apart(one, other) for one, other in pairs
        )

    def _are_apart(self, first: Any, second: Any, depth: int = 0) -> bool:
        one = self._resolve_references(first)
        other = self._resolve_references(second)
        values = _values_of(one)
        others = _values_of(other)
        if values is not None and others is not None:
            return values.isdisjoint(others)
        if find_types(one).isdisjoint(find_types(other)):
            return True
        if find_types(one) | find_types(other) != {"object"} or depth > 2:
            return False
        ones, seconds = (each.get("properties") for each in (one, other))
        if not isinstance(ones, dict) or not isinstance(seconds, dict):
            return False
        required = {*_find_required_names(one)} & {*_find_required_names(other)}
        return any(
            self._are_apart(ones.get(n), seconds.get(n), depth + 1) for n in required
        )

    def _resolve_references(self, schema: Any) -> dict[str, Any]:
        """Follow references that stand alone; {}: to nothing."""
        for _ in range(10):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = find_referenced_schema(str(schema["$ref"]), self._root)
        if (
            not isinstance(schema, dict)
            or "$ref" in schema
            or self._has_own_references(schema)
        ):
            return {}
        return schema


def _find_required_names(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required", [])
    return (
        [name for name in names if isinstance(name, str)]
        if isinstance(names, list)
        else []
    )


def find_types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that may fit; integers are numbers."""
    if (values := _values_of(schema)) is not None:
        names = {
            dict: "object",
            list: "array",
            str: "string",
            bool: "boolean",
            type(None): "null",
        }
        return frozenset(
            names.get(type(json.loads(value)), "number") for value in values
        )
    kinds = schema.get("type", [*_TYPES])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return frozenset("number" if kind == "integer" else str(kind) for kind in kinds)


def _values_of(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the only values that may fit, as JSON; None: there may be others."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    # Equal numbers are written alike: 1.0 is 1.
    return frozenset(
        json.dumps(_normalize_numbers(value), sort_keys=True) for value in values
    )


def _normalize_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normalize_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _normalize_numbers(item) for name, item in value.items()}
    return value


def find_shortest_text(schema: Any) -> str | None:
    """Return a short text that a schema allows; None: it is long, or none was found."""
    text = _ShortestTexts(schema).find_root_text()
    return text if text is not None and len(text) < MAX_SHORTEST else None


def has_finite_value(schema: Any) -> bool:
    """Tell whether a finite value may fit a schema. False is proven, True is not."""
    try:
        return _ShortestTexts(schema).find_root_text() is not None
    except (AttributeError, TypeError):  # llguidance names what has the wrong type
        return True


class _ShortestTexts:
    """Finds a short text for parts of a schema, whose references are looked up in `root`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._texts: dict[int, str] = {}  # found texts, by the ids of their schemas
        self._seen: set[int] = set()  # schemas in this round
        self._depth = 0

    def find_root_text(self) -> str | None:
        """Return a text of the root; None: each one would have to contain another."""
        for _ in range(MAX_ROUNDS):
            num_known = len(self._texts)
            self._seen.clear()
            text = self.find_text(self._root)
            if text is not None or len(self._texts) == num_known:
                return text
        return _LONG

    def find_text(self, schema: Any) -> str | None:
        """Return a text; None: this round has found none yet."""
        if not isinstance(schema, dict):
            return None if schema is False else "0"
        if self._depth > MAX_DEPTH or ("$id" in schema and schema is not self._root):
            return _LONG
        key = id(schema)
        if key not in self._seen and key not in self._texts:
            self._seen.add(key)
            self._depth += 1
            text = self._find_schema_text(schema)
            self._depth -= 1
            if text is not None:
                self._texts[key] = text
        return self._texts.get(key)

    def _find_schema_text(self, schema: dict[str, Any]) -> str | None:
        needed = (
            [find_referenced_schema(str(schema["$ref"]), self._root)]
            if "$ref" in schema
            else []
        )
        kinds: Any = schema.get("type", "integer")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        texts = [self.find_text(target) for target in needed]
        for part in schema.get("allOf", []):
            is_beside = "type" in schema and {*part} <= _BESIDE_TYPE
            texts.append(
                self._find_text_of_types(kinds, part)
                if is_beside
                else self.find_text(part)
            )
        if needed or None in texts:
            return None if None in texts else texts[0]
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        others: Any = schema.get("anyOf") or schema.get("oneOf") or []
        texts = [*map(compact_json, values), *map(self.find_text, others)]
        if texts:
            return min(
                (text for text in texts if text is not None), key=len, default=None
            )
        return self._find_text_of_types(kinds, schema)

    def _find_text_of_types(
        self, kinds: list[str], schema: dict[str, Any]
    ) -> str | None:
        texts = [self._find_text_of_type(kind, schema) for kind in kinds]
        return min((text for text in texts if text is not None), key=len, default=None)

    def _find_text_of_type(self, kind: str, schema: dict[str, Any]) -> str | None:
        if kind == "object":
            properties = schema.get("properties", {})
            names = schema.get("required", [])
            other = "patternProperties" in schema or schema.get(
                "additionalProperties", True
            )
            wanted = dict.fromkeys(names)
            parts = ""
            for name in filter(
                wanted.__contains__, dict.fromkeys([*properties, *names])
            ):
                value = self.find_text(properties.get(name, other))
                if value is None:
                    return None
                parts = f"{parts},{compact_json(name)}:{value}"[
                    :MAX_SHORTEST
                ]  # a cut one is too long anyway
            return "{" + parts[1:] + "}"
        if kind == "array":
            least = schema.get("minItems", 0)
            items = schema.get("items", True)
            first = items if isinstance(items, list) else schema.get("prefixItems", [])
            other = schema.get("additionalItems", True) if items is first else items
            texts = [self.find_text(item) for item in first[:least]]
            if least > len(first):
                texts += [self.find_text(other)] * min(least - len(first), MAX_SHORTEST)
            if None in texts or sum(len(text or "") for text in texts) > MAX_SHORTEST:
                return None if None in texts else _LONG
            return f"[{','.join(text or '' for text in texts)}]"
        if kind == "string":
            return compact_json("a" * min(schema.get("minLength", 0), MAX_SHORTEST))
        return {"boolean": "true", "null": "null"}.get(kind, "0")


def find_referenced_schema(reference: str, root: Any) -> Any:
    """Return the schema at a reference; None: there is none, or only llguidance can resolve it.

    llguidance resolves an `$anchor`, another document, and escaped names.
    """
    if not f"{reference}/".startswith("#/") or {*"%~"} & {*reference}:
        return None
    for part in reference.split("/")[1:]:
        root = root.get(part) if isinstance(root, dict) else None
    return root


def compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

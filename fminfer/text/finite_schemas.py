"""Tells whether anything finite fits a schema: one that contains itself may never end."""

from __future__ import annotations

from typing import Any

from fminfer.text.json_schemas import look_up

MAX_ROUNDS = 20  # of looks at the whole schema; each finds values of the parts that need more
MAX_DEPTH = 200


def has_end(schema: Any) -> bool:
    """Tell whether a finite value may fit; False is a proof that there is none."""
    search = _Search(schema)
    for _ in range(MAX_ROUNDS):
        num_known = len(search.ending)
        search.seen.clear()
        if search.find(schema, 0):
            return True
        if len(search.ending) == num_known:
            return False
    return True


class _Search:
    """Finds the parts of a schema that something finite fits, whose parts were found before."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.ending: set[int] = set()  # ids of dicts
        self.seen: set[int] = set()

    def find(self, schema: Any, depth: int) -> bool:
        """Tell whether a finite value of a schema is known by now."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return schema is not False
        if id(schema) not in self.seen and id(schema) not in self.ending:
            self.seen.add(id(schema))
            if self._has_end(schema, depth + 1):
                self.ending.add(id(schema))
        return id(schema) in self.ending

    def _has_end(self, schema: dict[str, Any], depth: int) -> bool:
        if "$id" in schema and schema is not self._root:
            return True  # its references are looked up in itself
        if "$ref" in schema and not self.find(look_up(str(schema["$ref"]), self._root), depth):
            return False
        for key, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            branches = schema.get(key)
            if isinstance(branches, list) and not enough(self.find(b, depth) for b in branches):
                return False
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not {*map(str, kinds)} <= {"object", "array"} or {"const", "enum"} & schema.keys():
            return True
        return any(all(self.find(part, depth) for part in _needs(kind, schema)) for kind in kinds)


def _needs(kind: str, schema: dict[str, Any]) -> list[Any]:
    """Return the schemas of which each object or array has a value."""
    if kind == "object":
        properties = schema.get("properties", {})
        names = schema.get("required", [])
        other = "patternProperties" in schema or schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or not isinstance(names, list):
            return []
        return [properties.get(str(name), other) for name in names]
    first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    items = schema.get("items", True)
    if isinstance(items, list):  # of drafts before 2020
        first, items = items, schema.get("additionalItems", True)
    if not isinstance(first, list) or not isinstance(least, int):
        return []
    return [*first[:least], *([items] if least > len(first) else [])]

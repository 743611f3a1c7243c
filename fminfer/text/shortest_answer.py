"""A short text that a JSON Schema allows: what `max_tokens` must not be below.

It is found by looking at the schema, so that it is a guess; who asks tries it on the grammar.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
MAX_SHORTEST = 20_000  # characters


def find_shortest(schema: Any) -> str | None:
    """Return a short text that a schema allows; None: that is not easy to see."""
    return _Shortest(schema).find(schema)


class _Shortest:
    """Finds a short text for parts of a schema.

    Args:
        root: the whole schema, for its references.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = 5000  # looks at parts of it: references can make it endless
        self._depth = 0

    def find(self, schema: Any) -> str | None:
        """Return a text; None: it is not easy to see, or long."""
        self._left -= 1
        if self._left < 0 or self._depth > MAX_DEPTH or not isinstance(schema, dict):
            return None
        self._depth += 1
        found = self._find_inside(schema)
        self._depth -= 1
        return found

    def _find_inside(self, schema: dict[str, Any]) -> str | None:
        if "$ref" in schema:
            return self._find_referred(str(schema["$ref"]))
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        others: Any = schema.get("anyOf") or schema.get("oneOf") or []
        found = [*map(_compact, values), *map(self.find, others)]
        if not found:
            kinds: Any = schema.get("type", "integer")
            kinds = kinds if isinstance(kinds, list) else [kinds]
            found = [self._find_of_kind(kind, schema) for kind in kinds]
        short = [text for text in found if text is not None and len(text) < MAX_SHORTEST]
        return min(short, key=len, default=None)

    def _find_referred(self, reference: str) -> str | None:
        target = self._root
        for part in reference.split("/")[1:]:
            target = target.get(part) if isinstance(target, dict) else None
        return self.find(target)

    def _find_of_kind(self, kind: str, schema: dict[str, Any]) -> str | None:
        if kind == "object":
            properties, names = schema.get("properties", {}), schema.get("required", [])
            wanted, parts = dict.fromkeys(names), ""
            for name in filter(wanted.__contains__, dict.fromkeys([*properties, *names])):
                value = self.find(properties.get(name, {}))
                if value is None or len(parts) > MAX_SHORTEST:
                    return None
                parts += f",{_compact(name)}:{value}"
            return "{" + parts[1:] + "}"
        if kind == "array":
            num_items = min(schema.get("minItems", 0), MAX_SHORTEST)
            item = self.find(schema.get("items", {})) if num_items else ""
            if item is None or num_items * len(item) > MAX_SHORTEST:
                return None
            return f"[{','.join([item] * num_items)}]"
        if kind == "string":
            return _compact("a" * min(schema.get("minLength", 0), MAX_SHORTEST))
        return {"integer": "0", "number": "0", "boolean": "true", "null": "null"}.get(kind)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

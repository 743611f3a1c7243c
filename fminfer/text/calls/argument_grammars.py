"""Grammars of a call's arguments, in llguidance's Lark: JSON, values between tags, Python.

JSON goes through the compiler of schemas that `response_format` has. Between tags, strings are
raw text. What a schema asks of that text and cannot have is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fminfer.text.calls.argument_types import find_argument_types, list_branches
from fminfer.text.calls.call_syntax import CallSyntax, TagSyntax
from fminfer.text.grammar_forms import make_held_schema
from fminfer.text.json_schemas import (
    ANNOTATIONS,
    KNOWN_KEYS,
    compact_json,
    find_types,
)
from fminfer.text.string_formats import FORMATS, NATIVE_FORMATS

_DEFINITIONS = ("$defs", "definitions", "components")
# What of an object's keywords arguments in tags and in Python are held to.
_OBJECT_KEYS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_RAW_KEYS = ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength", "format"}
_SLASH = r"\/"  # in a regex of Lark
_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}
# Keywords that may forbid a flag or null of the right type.
_RULES_OF_VALUES = frozenset(
    {"enum", "const", "not", "if", "allOf", "anyOf", "oneOf", "$ref"}
)


def quote(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def escape_regex(text: str) -> str:
    """Return a regex in Lark of a text."""
    return re.escape(text).replace("/", _SLASH).replace("\n", r"\n")


class ArgumentWriter:
    """Writes rules of the arguments of functions.

    Args:
        write_text: returns a text of the form in Lark, with its special tokens.
        bounds_numbers: the rules allow any JSON whose numbers `JSON_NUMBER` allows.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        write_text: Callable[[str], str],
        *,
        bounds_numbers: bool,
    ) -> None:
        self.rules: dict[str, str] = {}  # bodies of rules, with their names
        self._syntax = syntax
        self._write_text = write_text
        self._bounds_numbers = bounds_numbers

    def write_arguments(self, schema_text: str) -> str:
        """Return the grammar of one function's arguments.

        Raises:
            ValueError: they cannot be held to the schema.
        """
        tags = self._syntax.tags
        if not tags:
            return self._write_json(schema_text)
        schema = json.loads(schema_text)
        _check_keys(schema, _OBJECT_KEYS.union(_DEFINITIONS), "arguments in this form")
        other = schema.get("additionalProperties", True)
        required = schema.get("required", [])
        properties = schema.get("properties", {})
        properties |= {name: other for name in required if name not in properties}
        items = {
            name: self._write_argument(name, value, schema, tags)
            for name, value in properties.items()
            if name in required or not _is_impossible(value)
        }
        separator = quote(tags.separator)
        if not items and other is not False:
            # readers take text of no known type for JSON if it is any
            is_text = other is True and tags.has_raw_text
            value = {"type": "string"} if is_text else other
            item = self._write_argument("", value, schema, tags)
            return f"({item} ({separator} {item})*)?"
        rest = '""'  # the arguments behind one
        first_arguments = [rest]  # what may begin, with the rest of it
        for name, item in reversed(items.items()):
            if name in required:
                first_arguments.clear()
            first_arguments.append(f"{item} {rest}")
            mark = "" if name in required else "?"
            rest = self._add_rule("rest", f"({separator} {item}){mark} {rest}")
        return f"({' | '.join(first_arguments)})"

    def _write_argument(
        self, name: str, schema: Any, root: Any, tags: TagSyntax
    ) -> str:
        """Return an argument of a name; "": of any."""
        if name and not re.fullmatch(tags.key, name):
            raise ValueError(
                f"the property {quote(name)} cannot be written in this form. Rename it"
            )
        key = quote(name) if name else f"/{tags.free_key}/"
        head = f"{self._write_text(tags.before_key)} {key}"
        value = self._write_tagged_value(schema, root, tags)
        return f"{head} {self._write_text(tags.before_value)} {value}"

    def _write_tagged_value(self, schema: Any, root: Any, tags: TagSyntax) -> str:
        """Return a value and the tag behind it: raw text if it is a string, JSON otherwise.

        Readers take quoted text for a string where a value may have several types.
        """
        types = find_argument_types(schema, root)
        after_value = self._write_text(tags.after_value)
        if not tags.has_raw_text or not {"string"} <= types <= {"string", "null"}:
            return f"{self._write_value(schema, root)} {after_value}"
        tag = escape_regex(tags.after_value.strip())
        texts = [
            quote("null")
            if find_types(branch) == {"null"}
            else _write_raw_text(branch, tag)
            for branch in list_branches(schema, root)
        ]
        first, _, rest = after_value.partition(" ")
        if first.startswith("<"):  # a special token ends the text
            first = '""'
            rest = after_value
        raw = self._add_rule("RAW", f"({' | '.join(texts)}) {first}")
        # Where it is no token, the text ends with the first of these tags.
        ending = "" if rest else "[lazy]"
        return f"{self._add_rule('raw', raw, ending)} {rest}"

    def _write_value(self, schema: Any, root: dict[str, Any]) -> str:
        """Return a value in JSON, whose references are looked up in `root`.

        Models write Python's flags and None as well.
        """
        inner = {} if schema is True else schema
        shared = {key: root[key] for key in _DEFINITIONS if key in root}
        values = [self._write_json(compact_json(shared | inner))]
        for branch in list_branches(schema, root):
            if not _RULES_OF_VALUES & {*branch}:
                values += [_WORDS[kind] for kind in find_types(branch) & {*_WORDS}]
        return f"({' | '.join(sorted({*values}))})"

    def _write_json(self, schema_text: str) -> str:
        schema, options = make_held_schema(schema_text)
        if self._bounds_numbers:
            return "json_value"
        held = compact_json(schema | {"x-guidance": options})
        return self._add_rule("json", f"%json {held}")

    def _add_rule(self, kind: str, body: str, ending: str = "") -> str:
        """Add a rule, unless there is one with this body; return its name."""
        name = f"{kind}_{len(self.rules)}{ending}"
        return self.rules.setdefault(body, name).partition("[")[0]


def _is_impossible(schema: Any) -> bool:
    """Tell whether an argument can only be absent, as far as that is easy to see."""
    if not isinstance(schema, dict):
        return schema is False
    kinds = find_types({"type": schema["type"]} if "type" in schema else {})
    return find_types(schema).isdisjoint(kinds)


def _write_raw_text(schema: dict[str, Any], tag: str) -> str:
    """Return a terminal of the raw texts that a schema of strings allows.

    Args:
        tag: a regex of what no text may hold.
    """
    _check_keys(schema, _RAW_KEYS, "text between tags")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        words = (each if isinstance(each, str) else json.dumps(each) for each in values)
        return f"({' | '.join(map(quote, words))}) & ~/(?s:.*{tag}.*)/"
    name = str(schema.get("format"))
    if name in NATIVE_FORMATS:
        raise _unheld_error(f'the format "{name}"', "text between tags")
    limits = FORMATS.get(name, {}) | schema
    sizes = f"{limits.get('minLength', 0)},{limits.get('maxLength', '')}"
    text = f"/(?s:.{{{sizes}}})/ & ~/(?s:.*{tag}.*)/"
    if "pattern" in limits:
        text += f" & /{limits['pattern'][1:-1].replace('/', _SLASH)}/"
    return f"({text} | {quote('null')})" if "null" in find_types(schema) else text


def _check_keys(schema: dict[str, Any], allowed: frozenset[str], place: str) -> None:
    """Raise a ValueError for a known keyword that has no effect on `place`."""
    for name in sorted((schema.keys() & KNOWN_KEYS) - allowed):
        raise _unheld_error(quote(name), place)


def _unheld_error(name: str, place: str) -> ValueError:
    return ValueError(f"it has {name}, to which {place} cannot be held. Leave that out")

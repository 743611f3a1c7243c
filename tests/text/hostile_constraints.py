"""Constraints that somebody writes to keep a computer busy: each is within the bounds
in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]
MOST = 250_000  # bytes: a little less than a constraint may have


def one_of_products(size: int) -> Any:
    """Return two branches whose properties refer to each other three deep: a cubic proof."""

    def of(name: str) -> dict[str, Any]:
        names = [f"p{number}" for number in range(size)]
        properties = {each: {"$ref": f"#/$defs/{name}"} for each in names}
        return {"type": "object", "properties": properties, "required": names}

    last = {"type": "object"}
    return {
        "$defs": {"B": of("C"), "C": of("D"), "D": last},
        "oneOf": [of("B"), of("B")],
    }


def one_of_enums(branches: int, size: int) -> Any:
    return {
        "oneOf": [{"enum": [f"{n}.{i}" for i in range(size)]} for n in range(branches)]
    }


def one_of_references(branches: int, depth: int) -> Any:
    """Return branches, each a chain of references to one large enum."""
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(depth)}
    last = {f"d{depth}": {"enum": [f"v{n}" for n in range(20_000)]}}
    return {"$defs": chain | last, "oneOf": [{"$ref": "#/$defs/d0"}] * branches}


def doubled_references(depth: int, key: str, copies: int = 2) -> Any:
    """Return definitions, each of which has the next one twice: 2^depth in all."""
    defs: dict[str, Any] = {
        f"d{n}": {key: [{"$ref": f"#/$defs/d{n + 1}"}] * copies} for n in range(depth)
    }
    return {"$defs": defs | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def doubled_properties(depth: int) -> Any:
    defs: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "abcd"},
            "required": ["a", "b", "c", "d"],
            "additionalProperties": False,
        }
        for n in range(depth)
    }
    return {"$defs": defs | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def crossed_unions(size: int) -> Any:
    """Return an allOf of anyOf, which multiply."""
    union = [
        {"properties": {f"p{n}": {"const": n}}, "required": [f"p{n}"]}
        for n in range(size)
    ]
    return {"type": "object", "allOf": [{"anyOf": union}] * size}


def shortest_texts(size: int) -> Any:
    """Return definitions in an order in which each round finds one text."""
    defs = {
        f"d{n}": {
            "type": "object",
            "properties": {
                f"p{i}": {"$ref": f"#/$defs/d{n + i + 1}"} for i in range(10)
            },
            "required": [f"p{i}" for i in range(10)],
        }
        for n in range(size)
    }
    ends = {f"d{size + i}": {"type": "string", "minLength": 900} for i in range(11)}
    return {"$defs": defs | ends, "$ref": "#/$defs/d0"}


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"type": "array", "items": inner, "minItems": 3}
    return inner


def as_json(schema: Any) -> Fields:
    return {"guided_json": schema}


def fill(part: Callable[[int], str], most: int = MOST) -> str:
    """Return parts until they have a size."""
    found: list[str] = []
    size = 0
    while size < most:
        found.append(part(len(found)))
        size += len(found[-1])
    return "".join(found)


def regex(text: str) -> Fields:
    return {"guided_regex": text}


def grammar(text: str) -> Fields:
    return {"guided_grammar": text}


HOSTILE: dict[str, Callable[[], Fields]] = {
    "blank lines": lambda: grammar("\n" * 24_000),
    "more blank lines": lambda: grammar("\n" * MOST),
    "blank lines, GBNF": lambda: grammar("\n" * MOST + 'root ::= "a"'),
    "comments without end": lambda: grammar("# " * (MOST // 2)),
    "slashes": lambda: grammar("start: x\n" + "/" * MOST),
    "quotes": lambda: grammar('start: x\n"' * (MOST // 20)),
    "open classes": lambda: grammar("root ::= " + "[" * MOST),
    "open braces": lambda: grammar("root ::= " + "{ " * (MOST // 2)),
    "escapes": lambda: grammar('root ::= "' + "\\" * MOST),
    "one long name": lambda: grammar("a" * MOST),
    "rules, each the next": lambda: grammar(
        "root ::= r0\n"
        + fill(lambda n: f"r{n} ::= r{n + 1} | r{n + 1}\n")
        + "r99999 ::= r0"
    ),
    "rules in rules, doubled": lambda: grammar(
        "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(40)).replace(
            "r0 ", "root ", 1
        )
        + 'r40 ::= "a"'
    ),
    "terminals, doubled": lambda: grammar(
        "start: T0\n"
        + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(40))
        + 'T40: "a"'
    ),
    "an ambiguous grammar": lambda: grammar(
        'start: s\ns: s s | s s s | "a" | "ab" | "b" |'
    ),
    "many rules": lambda: grammar(
        'root ::= "x"\n' + fill(lambda n: f'a{n} ::= "a" a{n}? "b{n}"\n')
    ),
    "many alternatives": lambda: grammar(
        "start: " + fill(lambda n: f'"a{n}" start | ') + '"z"'
    ),
    "bounds in bounds": lambda: grammar(
        'root ::= ((((("a"{0,1000}){0,1000}){0,1000}){0,1000}){0,1000})'
    ),
    "parentheses": lambda: grammar("start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "JSON in Lark": lambda: grammar(
        'start: %json {"type": "integer", "multipleOf": 123456789}'
    ),
    "odd heads": lambda: grammar(fill(lambda n: "a[" + "b" * 50 + "\n")),
    "spaces and heads": lambda: grammar(fill(lambda n: " " * 1000 + "a[temperature=")),
    "%json again and again": lambda: grammar(fill(lambda n: "%json ")),
    "a regex of bounds": lambda: regex("(a{0,1000}){0,1000}"),
    "a long regex of bounds": lambda: regex("(a{0,1000}){0,1000}" * 850),
    "nested bounds": lambda: regex("(" * 500 + "a" + "{0,9})" * 500),
    "a regex of parentheses": lambda: regex("(" * 8000 + "a" + ")" * 8000),
    "a regex with a window": lambda: regex("(.|a)*a" + "." * 300),
    "a regex with windows": lambda: regex(
        "|".join(f"(.*a.{{{n}}})" for n in range(1, 1200))
    ),
    "an intersection by look-ahead": lambda: regex("(?=.*a.{50})" * 100 + ".*"),
    "open classes of a regex": lambda: regex("[" * 16_000),
    "Unicode classes": lambda: regex(r"(\p{L}\w){1,900}" * 1000),
    "a multiple": lambda: as_json({"type": "integer", "multipleOf": 123456789}),
    "a fine multiple": lambda: as_json({"type": "number", "multipleOf": 0.0000123457}),
    "multiples": lambda: as_json(
        {"anyOf": [{"type": "integer", "multipleOf": 9973 + n} for n in range(500)]}
    ),
    "oneOf of products": lambda: as_json(one_of_products(100)),
    "oneOf of larger products": lambda: as_json(one_of_products(1000)),
    "oneOf of enums": lambda: as_json(one_of_enums(100, 150)),
    "oneOf of references": lambda: as_json(one_of_references(100, 9)),
    "enums in a oneOf": lambda: as_json(
        {"oneOf": [{"enum": list(range(10_000))}, {"enum": list(range(9000, 19_000))}]}
    ),
    "unions in unions": lambda: as_json(
        {
            "oneOf": [
                {"oneOf": [{"const": f"{n}.{i}"} for i in range(90)]} for n in range(90)
            ]
        }
    ),
    "doubled allOf": lambda: as_json(doubled_references(40, "allOf")),
    "doubled anyOf": lambda: as_json(doubled_references(40, "anyOf")),
    "doubled oneOf": lambda: as_json(doubled_references(40, "oneOf")),
    "doubled items": lambda: as_json(doubled_references(40, "prefixItems")),
    "doubled properties": lambda: as_json(doubled_properties(30)),
    "crossed unions": lambda: as_json(crossed_unions(40)),
    "shortest texts": lambda: as_json(shortest_texts(500)),
    "nested lists": lambda: as_json(nested(30, {"type": "string", "minLength": 10})),
    "many properties": lambda: as_json(
        {"type": "object", "properties": {f"p{n}": {} for n in range(15_000)}}
    ),
    "many optional properties": lambda: as_json(
        {
            "properties": {f"p{n}": {"type": "string"} for n in range(6000)},
            "additionalProperties": {"type": "number"},
        }
    ),
    "patterns of properties": lambda: as_json(
        {"patternProperties": {f"^a{n}.*b.{{{n}}}$": {} for n in range(1, 2000)}}
    ),
    "a pattern and a length": lambda: as_json(
        {
            "type": "string",
            "pattern": "^(ab?c?)*$",
            "minLength": 5000,
            "maxLength": 9000,
        }
    ),
    "formats and patterns": lambda: as_json(
        {
            "allOf": [
                {"type": "string", "format": "email", "pattern": f"a{n}"}
                for n in range(99)
            ]
        }
    ),
    "an enum": lambda: as_json({"enum": [f"value {n}" for n in range(15_000)]}),
    "an enum of numbers": lambda: as_json({"enum": list(range(30_000))}),
    "long lists": lambda: as_json(
        {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 10**6,
            "maxItems": 10**9,
        }
    ),
    "bounds of digits": lambda: as_json(
        {"type": "number", "minimum": 5e-324, "maximum": 1e308}
    ),
    "tiny numbers": lambda: as_json(
        {"enum": [float(f"{n}e-{300 + n % 20}") for n in range(1, 12_000)]}
    ),
    "references to nothing": lambda: as_json(
        {"anyOf": [{"$ref": f"#/$defs/x{n}"} for n in range(9000)]}
    ),
    "a reference to itself": lambda: as_json({"$ref": "#", "x": 1}),
    "a circle of references": lambda: as_json(
        {
            "$defs": {
                f"d{n}": {"$ref": f"#/$defs/d{(n + 1) % 5000}"} for n in range(5000)
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "long references": lambda: as_json(
        {"anyOf": [{"$ref": "#" + "/a" * 1000} for n in range(120)], "a": {}}
    ),
    "unknown keywords": lambda: as_json(
        {"type": "object"} | {f"k{n}": 1 for n in range(20_000)}
    ),
    "properties in unknown keywords": lambda: as_json(
        {"type": "object", "components": nested_names(20)}
    ),
    "equal choices": lambda: {
        "guided_choice": ["a" * 20 + f"{n:05}" for n in range(9000)]
    },
    "long choices": lambda: {"guided_choice": [f"{n}" + "a" * 600 for n in range(400)]},
    "one long choice": lambda: {"guided_choice": ["ab" * (MOST // 2)]},
    "choices of quotes": lambda: {
        "guided_choice": ['"' * 50 + str(n) for n in range(2000)]
    },
    "white space": lambda: {
        "guided_json": {"type": "object"},
        "guided_whitespace_pattern": "[ ]" * 5000 + "x",
    },
    "white space of bounds": lambda: {
        "guided_json": {"type": "object"},
        "guided_whitespace_pattern": "( {0,1000}){0,1000}",
    },
    "white space, open": lambda: {
        "guided_json": {"type": "object"},
        "guided_whitespace_pattern": "[" + " " * 16_000,
    },
    "white space of classes": lambda: {
        "guided_json": {"type": "object"},
        "guided_whitespace_pattern": r"[\s" * 5000,
    },
}


def nested_names(depth: int) -> Any:
    """Return values under names that schemas use, where each rewriting looks anew."""
    value: Any = {"type": "string"}
    for number in range(depth):
        value = (
            {f"x{number}": value, "properties": {"a": value}}
            if number < 9
            else {"b": value}
        )
    return value

"""Constraints in llguidance's own form, and its refusals in words for users."""

from __future__ import annotations

import json
import re
from typing import Any

from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.text.json_schemas import Branches

# Between tokens of JSON: a space, or a line break and its indent. Small models go on and on with
# white space that nothing bounds.
WHITE_SPACE = r"\x20|\r?\n[\x20\t]{0,20}"
# llguidance lets keys spell any character as \u, and so takes "\u0061" for another key than "a".
ESCAPES = '"\\bfnrt'
CONTROL = re.compile(r"(?<!\\)(\\\\)*\\u00[01]")  # in JSON; only \u spells these
# Of Lark; GBNF has neither.
IGNORED_HEAT = re.compile(r'^\s*[?!]?\w+\[[^]"\n]*\btemperature\s*=[^]"\n]*\]\s*:', re.MULTILINE)
HIDDEN_KEYS = re.compile(r'%json.*"lenient"\s*:', re.DOTALL)
MOST_EXACT = 2**53  # llguidance rounds larger numbers, as float64 does
NO_RULES = ("default", "examples")
UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")


def write_grammar(constraint: Constraint) -> str:
    """Return a constraint in llguidance's own form; Lark and GBNF as they are.

    Raises:
        ValueError: it cannot be read.
    """
    from llguidance import LLMatcher, regex_to_lark

    text = constraint.text
    if constraint.kind == "json":
        _refuse_inexact(json.loads(text), "")
        # These count more than what a schema says of itself in "x-guidance".
        options: Any = {"lenient": False, "coerce_one_of": False}
        options |= {"item_separator": ",", "key_separator": ":"}
        if not CONTROL.search(text):
            options["json_allowed_escapes"] = ESCAPES
        options["whitespace_flexible"] = constraint.whitespace != "none"
        if options["whitespace_flexible"]:
            options["whitespace_pattern"] = constraint.whitespace or WHITE_SPACE
        schema = json.loads(text)
        text = json.dumps(Branches(schema).join(schema), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    if constraint.kind == "regex":  # with \d and \w as in JSON Schema: of ASCII
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/")
    if constraint.kind == "choice":
        words = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        # One token of the grammar: of thousands of rules, too many would be open at once.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(words))
    if IGNORED_HEAT.search(text):
        raise ValueError("the temperature of a rule has no effect here. Give the request's")
    if HIDDEN_KEYS.search(text):
        raise ValueError("lenient in its JSON hides keywords. Leave it out")
    return text


def _refuse_inexact(value: Any, key: str) -> None:
    """Raise a ValueError for what llguidance takes and does not hold answers to."""
    if isinstance(value, dict):
        least, is_open = value.get("minProperties"), value.get("additionalProperties") is not False
        if isinstance(least, int) and least > 1 and (is_open or "patternProperties" in value):
            raise ValueError(
                '"minProperties" is above 1 where keys are free, and an answer could repeat one. '
                'Set "additionalProperties" to false, without "patternProperties"'
            )
        for name, inner in value.items():
            _refuse_inexact(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _refuse_inexact(inner, key)
    elif isinstance(value, int | float) and abs(value) > MOST_EXACT and not _is_held(value, key):
        raise ValueError(
            f"{value} under {json.dumps(key)} is beyond 2^53, and would be rounded. Take a string "
            "for it, or a smaller number"
        )


def _is_held(number: float, key: str) -> bool:
    """Tell whether rounding lets nothing through; a bound may become narrower."""
    if isinstance(number, float) or key in NO_RULES:
        return key in (*UPPER, *LOWER, *NO_RULES)
    rounded = int(float(min(max(number, -(2**63)), 2**63)))
    if key in UPPER:
        return rounded <= number or number == 2**63 - 1  # which has no next one in 64 bits
    return rounded >= number if key in LOWER else rounded == number


def refuse(constraint: Constraint, fault: str) -> RequestError:
    """Return the error of a constraint that cannot be had."""
    names = {"json": "the JSON schema", "choice": "the choices"}
    name = names.get(constraint.kind, f"the {constraint.kind}")
    fault = tidy(fault)
    if fault.startswith("Unimplemented keys: "):
        keys = fault.removeprefix("Unimplemented keys: ").strip("[]")
        fault = f"it has {keys}, to which answers cannot be held. Leave that out"
    if fault.startswith("oneOf constraints are not supported"):
        fault = "it has oneOf whose branches may fit one value at once. Write anyOf"
    return RequestError(
        "unsupported_parameter", f"{name} that answers are to follow cannot be had: {fault}"
    )


def tidy(fault: str) -> str:
    return " ".join(fault.replace("<non-verbose/>", "").split())[:300]

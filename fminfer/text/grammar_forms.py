"""Constraints in llguidance's own form, and its refusals in words for users."""

from __future__ import annotations

import json
import re
from typing import Any

from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.text.gbnf import convert_gbnf, is_gbnf
from fminfer.text.json_schemas import UnionRewriter, has_finite_value
from fminfer.text.patterns import rewrite_lark, rewrite_regex
from fminfer.text.plain_schemas import count_digits, parse_schema

# Between tokens of JSON: a space, or a line break and its indent. Small models go on and on with
# white space that nothing bounds.
WHITE_SPACE = r"\x20|\r?\n[\x20\t]{0,20}"
# llguidance lets keys spell any character as \u, and so takes "\u0061" for another key than "a".
ESCAPES = '"\\bfnrt'
# in JSON; it writes these as \u alone
CONTROL = re.compile(r"(?<!\\)(\\\\)*\\u00[01]|\x7f")
# Of Lark; GBNF has neither.
IGNORED_HEAT = re.compile(
    r'(?m)^[ \t\r]*[?!]?\w+\[[^]"\n]*\btemperature\s*=[^]"\n]*\]\s*:'
)
HIDDEN_KEYS = re.compile(r'%json.*"lenient"\s*:', re.DOTALL)
MOST_EXACT = 2**53  # llguidance rounds larger numbers, as float64 does
_PLAIN = {  # in place of llguidance's words
    "NoExtensionBias": "nothing matches it",
    "Regex is empty": "nothing matches it",
    "Unable to determine if regex": "pattern, format and lengths of a text are too complex "
    "together. Leave one of them out",
}
_INTERNAL = re.compile(r"<(state|grammar|non-verbose/)>.*|\bcompute_time.*", re.DOTALL)
# where it stands in a grammar that is not the user's
_PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?| \d+ \| .*")
NO_RULES = ("default", "examples")
UPPER = ("maximum", "exclusiveMaximum")
LOWER = ("minimum", "exclusiveMinimum")


def write_grammar(constraint: Constraint) -> str:
    """Return a constraint in llguidance's own form. Grammars become Lark.

    Raises:
        ValueError: it cannot be read.
    """
    from llguidance import LLMatcher, regex_to_lark

    text = constraint.text
    if constraint.kind == "json":
        schema, options = make_held_schema(text, constraint.whitespace)
        text = json.dumps(schema, ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    if constraint.kind == "regex":  # with \d and \w as in JSON Schema: of ASCII
        return convert_lark(f"start: /{regex_to_lark(rewrite_regex(text), 'dw')}/")
    if constraint.kind == "choice":
        words = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        # One token of the grammar: of thousands of rules, too many would be open at once.
        return convert_lark("start: CHOICE\nCHOICE: " + " | ".join(words))
    if IGNORED_HEAT.search(text):
        raise ValueError(
            "the temperature of a rule has no effect here. Give the request's"
        )
    if HIDDEN_KEYS.search(text):
        raise ValueError("lenient in its JSON hides keywords. Leave it out")
    return convert_lark(convert_gbnf(text) if is_gbnf(text) else rewrite_lark(text))


def make_held_schema(text: str, whitespace: str = "") -> tuple[Any, Any]:
    """Return a schema that llguidance holds answers to as JSON Schema says, and its options.

    Raises:
        ValueError: answers cannot be held to it.
    """
    schema = parse_schema(text)
    _check_exact(schema, "")
    if not has_finite_value(schema):
        raise ValueError(
            "no finite value fits it. Take a property that leads back to the schema out of "
            '"required", or allow null or an empty list there'
        )
    # These count more than what a schema says of itself in "x-guidance".
    options: Any = {"lenient": False, "coerce_one_of": False}
    options |= {"item_separator": ",", "key_separator": ":"}
    if not CONTROL.search(text):
        options["json_allowed_escapes"] = ESCAPES
    options["whitespace_flexible"] = whitespace != "none"
    if options["whitespace_flexible"]:
        options["whitespace_pattern"] = whitespace or WHITE_SPACE
    return UnionRewriter(schema).rewrite(schema), options


def write_number_grammar(constraint: Constraint) -> str:
    """Return a grammar of all JSON whose numbers have bounded digits, and are finite doubles.

    It is used beside the grammar of a schema, for llguidance lets numbers grow without end. A
    fraction with all its digits does not end with 0, as exclusive bounds may need another digit.
    """
    number = make_number_regex(*count_digits(parse_schema(constraint.text)))
    other = r'[^"0-9.+eE-]|true|false|"(?:[^"\\]|\\.)*"'
    json_text = rf"(?s:(?:{other}|{number}[,\]}}\x20\t\r\n])*(?:{number})?)"
    return convert_lark(f"start: /{json_text}/")


def make_number_regex(whole: int, total: int) -> str:
    """Return a regex of finite doubles with so many digits before the point, and in all."""
    small = "(?:[0-9]{1,2}|1[0-9]{2}|2[0-8][0-9])"  # times 10^19 it is finite
    large = "(?:[0-9]{1,2}|[12][0-9]{2}|30[0-7])"  # times 10 it is
    zero = rf"0(?:\.0{{1,5}}|{_make_fraction_regex(total, zeros='0{0,5}')})"
    one = rf"(?:{zero}|[1-9]{_make_fraction_regex(total - 1)})(?:[eE][+-]?{large})?"
    longer = "|".join(
        rf"[1-9][0-9]{{{size - 1}}}{_make_fraction_regex(total - size)}"
        for size in range(2, whole + 1)
    )
    return rf"-?(?:{one}|(?:{longer})(?:[eE][+-]?{small})?)"


def convert_lark(text: str) -> str:
    """Return a grammar in Lark as llguidance reads it."""
    from llguidance import LLMatcher

    # its lexer lacks DELETE
    return LLMatcher.grammar_from_lark(text.replace("\x7f", r"\u007f"))


def _make_fraction_regex(most: int, zeros: str = "") -> str:
    """Return a regex of an optional fraction with at most `most` digits after `zeros`."""
    if most < 2:  # behind "12.", 1 to 9 are above 12, which may be the most
        return ""
    return rf"(?:\.{zeros}(?:[0-9]{{1,{most - 1}}}|[0-9]{{{most - 1}}}[1-9]))?"


def _check_exact(value: Any, key: str) -> None:
    """Raise a ValueError for what llguidance takes and does not hold answers to."""
    if isinstance(value, dict):
        least = value.get("minProperties")
        is_open = value.get("additionalProperties") is not False
        if (
            isinstance(least, int)
            and least > 1
            and (is_open or "patternProperties" in value)
        ):
            raise ValueError(
                '"minProperties" is above 1 where keys are free, and an answer could '
                "repeat one. "
                'Set "additionalProperties" to false, without "patternProperties"'
            )
        for name, inner in value.items():
            _check_exact(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_exact(inner, key)
    elif (
        isinstance(value, int | float)
        and abs(value) > MOST_EXACT
        and not _is_safely_rounded(value, key)
    ):
        raise ValueError(
            f"{value} under {json.dumps(key)} is beyond 2^53, and would be rounded. "
            "Take a string for it, or a smaller number"
        )


def _is_safely_rounded(number: float, key: str) -> bool:
    """Tell whether rounding lets nothing through; a bound may become narrower."""
    if isinstance(number, float) or key in NO_RULES:
        return key in (*UPPER, *LOWER, *NO_RULES)
    rounded = int(float(min(max(number, -(2**63)), 2**63)))
    if key in UPPER:
        # which has no next one in 64 bits
        return rounded <= number or number == 2**63 - 1
    return rounded >= number if key in LOWER else rounded == number


def constraint_error(constraint: Constraint, fault: str) -> RequestError:
    """Return the error of a constraint that cannot be had."""
    names = {
        "json": "the JSON schema",
        "choice": "the choices",
        "calls": "the calls of these tools",
    }
    name = names.get(constraint.kind, f"the {constraint.kind}")
    fault = tidy_fault(fault)
    if constraint.kind == "calls":
        fault = _PLACE.sub("", fault)
    place, sign, keys = fault.partition("Unimplemented keys: ")
    if sign:
        keys = keys.strip("[]")
        fault = f"{place}it has {keys}, to which answers cannot be held. Leave that out"
    if fault.startswith("oneOf constraints are not supported"):
        fault = "it has oneOf whose branches may fit one value at once. Write anyOf"
    return RequestError(
        "unsupported_parameter",
        f"{name} that answers are to follow cannot be had: {fault}",
    )


def tidy_fault(fault: str) -> str:
    """Return a fault on one line, without llguidance's internals."""
    for sign, plain in _PLAIN.items():
        if sign in fault:
            return plain
    return " ".join(_INTERNAL.sub("", fault).split())[:300]

"""Answers that are not what their lines say they must be."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fminfer.client.held_answers import MAX_QUOTED, check_held
from fminfer.client.held_worker import check_text
from fminfer.core.config import Constraint

SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["den", "porch"]}, "is_near": {"type": "boolean"}},
    "required": ["room", "is_near"],
    "additionalProperties": False,
}


def check_json(schema: Any, text: str) -> str:
    return check_held(Constraint("json", json.dumps(schema)), text)


def test_choices_are_compared_whole() -> None:
    choice = Constraint("choice", '["den","porch"]')
    assert check_held(choice, "den") == ""
    for text in ("Den", "den ", "", "de"):
        fault = check_held(choice, text)
        assert fault.endswith(f"none of the choices. It is {json.dumps(text)}")
    labels = Constraint("labels", '[["den", "porch"], 1]')
    assert check_held(labels, "porch") == ""
    assert check_held(labels, "1")


def test_regexes_match_the_whole_text() -> None:
    regex = Constraint("regex", "[a-c]+")
    assert check_held(regex, "abc") == ""
    assert "does not match" in check_held(regex, "abcd")
    assert "does not match" in check_held(regex, "abc\n")
    # Python has no classes of Unicode: nobody can tell
    assert check_held(Constraint("regex", r"\p{Lu}+"), "x") == ""


def test_keys_may_be_in_any_order_with_any_white_space() -> None:
    assert check_json(SCHEMA, '{"room":"den","is_near":true}') == ""
    assert check_json(SCHEMA, ' {\n"is_near" :false, "room":\t"porch"}\n') == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ('{"room":"den","is_near":true} so', "no JSON"),
        ("NaN", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "$ does not follow the schema"),
        ('{"room":"hall","is_near":true}', "$.room does not follow the schema"),
        ('{"room":"den"}', "'is_near' is a required property"),
        ('{"room":"den","is_near":true,"x":1}', "Additional properties"),
    ],
)
def test_wrong_json(text: str, words: str) -> None:
    fault = check_json(SCHEMA, text)
    assert words in fault
    assert fault.endswith(json.dumps(text[:MAX_QUOTED], ensure_ascii=False))


def test_what_a_schema_may_hold() -> None:
    """A pattern of ECMA's, or a reference to elsewhere, failed as a fault of fminfer's."""
    assert check_json({"type": "string", "pattern": r"^\p{L}+$"}, '"a"') == ""
    elsewhere = {"$ref": "http://127.0.0.1:9/schema.json"}
    assert check_json(elsewhere, '"a"') == ""
    inside = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}
    assert check_json(inside, "[1, 2]") == ""
    assert "$[1]" in check_json(inside, '[1, "a"]')
    older = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}
    assert "not of type" in check_json(older, '"a"')
    assert check_json({}, "1e3") == ""


def test_grammars_are_not_checked() -> None:
    assert check_held(Constraint("grammar", 'root ::= "a"'), "b") == ""


def test_a_regex_without_end_costs_seconds_once() -> None:
    """It cost each line two seconds, in which no other answer was read."""
    regex = Constraint("regex", "(a+)+b")
    assert check_held(regex, "a" * 60) == ""
    start_s = time.perf_counter()
    assert check_held(regex, "a" * 60) == ""
    assert time.perf_counter() - start_s < 1
    assert check_held(Constraint("regex", "a+"), "aa") == ""


def test_what_is_wrong_is_quoted_short() -> None:
    schema = json.dumps({"enum": ["x" * 1000]})
    assert len(check_text(["json", schema, '"y"'])) <= 200
    assert len(check_held(Constraint("choice", '["a"]'), "b" * 9999)) < 400


def test_what_python_judges_in_another_way_is_not_checked() -> None:
    """0.07 is no multiple of 0.01 by floats, and a class in brackets is Rust's."""
    schema = {"type": "number", "multipleOf": 0.01, "maximum": 1}
    constraint = Constraint("json", json.dumps(schema))
    assert check_held(constraint, "0.07") == ""
    assert "maximum" in check_held(constraint, "2")
    assert check_held(Constraint("regex", "[[:alpha:]]+"), "abc") == ""

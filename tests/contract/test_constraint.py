"""The fields that constrain an answer: one Constraint of them, or a refusal that says why."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from fminfer.contract.chat import parse_chat
from fminfer.contract.constraint import (
    CONSTRAINTS,
    MAX_BYTES,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_REGEX_BYTES,
    find_constraint,
)
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import DRAW_FIELDS, FIELDS
from fminfer.contract.fields import INT64
from fminfer.contract.request import parse_request
from fminfer.core.config import Constraint
from fminfer.core.errors import ErrorCode, RequestError
from fminfer.engine.noise import digest_meaning, make_draw_key
from fminfer.split.grouping import Groups

Fields = dict[str, Any]
SCHEMA: Fields = {
    "type": "object",
    "required": ["b", "a"],
    "properties": {"b": {"const": "é\u2028"}, "a": {"maximum": 1.5}},
}
TEXT = (
    '{"type":"object","required":["b","a"],'
    '"properties":{"b":{"const":"é\u2028"},"a":{"maximum":1.5}}}'
)
AS_JSON = Constraint("json", TEXT)
ANY_OBJECT = Constraint("json", '{"type":"object"}')
COMPACT = Constraint("json", TEXT, "none")
SPACED = Constraint("json", TEXT, r"[ \n]?")
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}
HELLO = [{"role": "user", "content": "Hello"}]


def as_format(**inside: Any) -> Fields:
    return {"response_format": {"type": "json_schema", "json_schema": inside}}


def structured(**inside: Any) -> Fields:
    return {"structured_outputs": inside}


def read(fields: Fields) -> Constraint | None:
    """Return the constraint of a request, which is that of chat, too."""
    found = parse_request({"prompt": "x"} | fields, max_logprobs=5, is_strict=True)
    chat = parse_chat({"messages": HELLO} | fields, max_logprobs=5, is_strict=True)
    assert chat.params.constraint is found.params.constraint, (
        "equal ones are one object"
    )
    assert not found.warnings and not chat.warnings
    return found.params.constraint


def refused(fields: Fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_request({"prompt": "x"} | fields, max_logprobs=5)
    with pytest.raises(RequestError) as of_chat:
        parse_chat({"messages": HELLO} | fields, max_logprobs=5)
    assert str(of_chat.value) == str(caught.value)
    assert caught.value.code in get_args(ErrorCode)
    return caught.value


def allows(fields: Fields) -> bool:
    """Tell whether /openapi.json allows a request's fields."""
    tables: tuple[Endpoint, ...] = ("completions", "chat")
    (found,) = {
        all(
            Draft202012Validator(FIELDS[table][name].make_schema(INT64 - 1)).is_valid(
                value
            )
            for name, value in fields.items()
        )
        for table in tables
    }
    return found


FORMS: list[tuple[Fields, Constraint | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "text", "json_schema": None}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_JSON),
    (
        {
            "response_format": {
                "type": "json_schema",
                "schema": SCHEMA,
                "json_schema": None,
            }
        },
        AS_JSON,
    ),
    (as_format(schema=SCHEMA), AS_JSON),
    (as_format(name="n", schema=SCHEMA, strict=True, description="d"), AS_JSON),
    (
        as_format(name=None, schema=SCHEMA, strict=False, description=None, x=None),
        AS_JSON,
    ),
    (as_format(schema={}), Constraint("json", "{}")),
    (as_format(schema=True), Constraint("json", "{}")),
    (structured(json=SCHEMA), AS_JSON),
    (structured(json=json.dumps(SCHEMA, indent=1), regex=None), AS_JSON),
    (structured(json_object=True), ANY_OBJECT),
    (structured(regex="a+"), Constraint("regex", "a+")),
    (structured(choice=["b", "a", "é", "b"]), Constraint("choice", '["b","a","é"]')),
    (structured(grammar='root ::= "a"\n'), Constraint("grammar", 'root ::= "a"\n')),
    (structured(json=SCHEMA, disable_any_whitespace=True), COMPACT),
    (
        structured(json=SCHEMA, disable_any_whitespace=False, disable_fallback=True),
        AS_JSON,
    ),
    (structured(json=SCHEMA, whitespace_pattern=r"[ \n]?"), SPACED),
    (structured(json=SCHEMA, disable_additional_properties=False), AS_JSON),
    (structured(regex="a+", disable_any_whitespace=False), Constraint("regex", "a+")),
    ({"guided_json": SCHEMA}, AS_JSON),
    ({"guided_json": json.dumps(SCHEMA)}, AS_JSON),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": r"[ \n]?"}, SPACED),
    (as_format(schema=SCHEMA) | {"guided_whitespace_pattern": r"[ \n]?"}, SPACED),
    (
        {"guided_regex": "a+", "guided_decoding_backend": "outlines"},
        Constraint("regex", "a+"),
    ),
    ({"guided_choice": ["a"], "response_format": None}, Constraint("choice", '["a"]')),
    ({"guided_grammar": "start: A"}, Constraint("grammar", "start: A")),
    ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, AS_JSON),
    (
        {"grammar": "root ::= A", "ignore_eos": False},
        Constraint("grammar", "root ::= A"),
    ),
    (
        dict.fromkeys(
            ("structured_outputs", "guided_json", "guided_regex", "guided_choice"), ""
        ),
        None,
    ),
    (
        dict.fromkeys(
            ("guided_grammar", "guided_whitespace_pattern", "json_schema"), ""
        ),
        None,
    ),
    (dict.fromkeys(("grammar", "structural_tag", "regex", "ebnf"), ""), None),
]


@pytest.mark.parametrize(("fields", "expected"), FORMS, ids=str)
def test_each_form(fields: Fields, expected: Constraint | None) -> None:
    assert read(fields) == expected
    assert allows(fields)


def deep(depth: int) -> Fields:
    schema: Fields = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def long(size: int) -> Fields:
    """Return a schema of so many bytes, of characters that have three."""
    count, rest = divmod(size - len('{"title":""}'), 3)
    return {"title": "漢" * count + "x" * rest}


def test_the_docs_say_what_each_field_may_be() -> None:
    for name, each in CONSTRAINTS.items():
        assert each.kind.values_text, name
    assert find_constraint(dict.fromkeys(CONSTRAINTS)) is None


def test_what_is_as_large_as_it_may_be() -> None:
    for schema in (deep(MAX_DEPTH), long(MAX_BYTES)):
        found = read({"guided_json": schema})
        assert found is not None and json.loads(found.text) == schema
    assert read({"guided_regex": "a" * MAX_REGEX_BYTES})
    assert read({"guided_grammar": "a" * MAX_BYTES})
    assert read({"guided_choice": [str(number) for number in range(MAX_CHOICES)]})


REFUSED: list[tuple[Fields, str, str]] = [
    # response_format
    ({"response_format": "json"}, "response_format", "a string; it must be an object"),
    (
        {"response_format": {}},
        "response_format",
        'one of "text", "json_object", "json_schema"',
    ),
    ({"response_format": {"type": ["text"]}}, "response_format", "structured_outputs"),
    ({"response_format": {"type": "regex"}}, "response_format", "choices or a grammar"),
    ({"response_format": {"type": "grammar"}}, "response_format", "structured_outputs"),
    (
        {"response_format": {"type": "structural_tag"}},
        "response_format",
        "structured_outputs",
    ),
    (
        {"response_format": {"type": "text", "schema": {}}},
        "response_format",
        '"schema"',
    ),
    *(  # the advice was to leave the schema out
        (
            {"response_format": {"type": kind, "json_schema": {"schema": {}}}},
            "response_format",
            'Write "type": "json_schema"',
        )
        for kind in ("json_object", "text")
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "no schema"),
    (as_format(name="n"), "response_format.json_schema", "no schema"),
    (as_format(schema=SCHEMA, strikt=True), "response_format.json_schema", '"strikt"'),
    (
        as_format(schema=SCHEMA, strict="yes"),
        "response_format.json_schema.strict",
        "true, false",
    ),
    (as_format(schema=SCHEMA, name=5), "response_format.json_schema.name", "a string"),
    (as_format(schema=[1]), "response_format.json_schema.schema", "a list"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "schema": {},
                "json_schema": {"schema": {}},
            }
        },
        "response_format",
        "keep one of the two",
    ),
    # structured_outputs
    (structured(), "structured_outputs", "exactly one of json, regex, choice, grammar"),
    (structured(regex=None), "structured_outputs", "exactly one of"),
    (structured(regex="a", choice=["a"]), "structured_outputs", "exactly one of"),
    (
        structured(structural_tag="x"),
        "structured_outputs",
        'Leave "structural_tag" out',
    ),
    (structured(jsn={}), "structured_outputs", '"jsn"; it may have json, regex'),
    (
        structured(json={}, probabilities=True),
        "structured_outputs",
        "needs choice, and this request has json",
    ),
    (structured(regex=""), "structured_outputs.regex", "not empty"),
    (structured(regex=5), "structured_outputs.regex", "a number"),
    (structured(grammar=""), "structured_outputs.grammar", "not empty"),
    (structured(choice=[]), "structured_outputs.choice", "0 choices"),
    (structured(choice=["a", ""]), "structured_outputs.choice", "an empty string"),
    (structured(choice="a"), "structured_outputs.choice", "a list of strings"),
    (structured(choice=["a", 1]), "structured_outputs.choice", "a list of strings"),
    (structured(json_object=False), "structured_outputs.json_object", "true or null"),
    (structured(json=5), "structured_outputs.json", "a JSON Schema"),
    (
        structured(json=SCHEMA, disable_additional_properties=True),
        "structured_outputs",
        '"additionalProperties": false',
    ),
    (
        structured(json=SCHEMA, disable_any_whitespace="yes"),
        "structured_outputs.disable_any_whitespace",
        "true, false",
    ),
    (
        structured(json=SCHEMA, disable_any_whitespace=True, whitespace_pattern=" "),
        "structured_outputs.whitespace_pattern",
        "another field",
    ),
    (
        structured(json=SCHEMA, whitespace_pattern=""),
        "structured_outputs.whitespace_pattern",
        "not empty",
    ),
    (
        structured(regex="a", disable_any_whitespace=True),
        "structured_outputs.disable_any_whitespace",
        "the white space in JSON",
    ),
    (
        structured(json=SCHEMA, whitespace_pattern=" ")
        | {"guided_whitespace_pattern": " "},
        "guided_whitespace_pattern",
        "another field",
    ),
    # older names
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_json": False}, "guided_json", "false allows nothing"),
    ({"guided_json": "false"}, "guided_json", "false allows nothing"),
    ({"guided_json": "5"}, "guided_json", "a JSON Schema"),
    ({"json_schema": []}, "json_schema", "a JSON Schema"),
    (
        {"grammar": {"type": "json", "value": {}}},
        "grammar",
        "an object; it must be a string",
    ),
    (
        {"guided_whitespace_pattern": " "},
        "guided_whitespace_pattern",
        "without a JSON schema",
    ),
    (
        {"guided_whitespace_pattern": " ", "guided_choice": ["a"]},
        "guided_whitespace_pattern",
        "the white space in JSON",
    ),
    ({"structural_tag": "x"}, "structural_tag", "structured_outputs takes json"),
    ({"regex": "a"}, "regex", "guided_regex"),
    ({"ebnf": "a"}, "ebnf", "guided_grammar"),
    # what is beside
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "Remove one of the two"),
    # sizes, and what is no text
    ({"guided_json": deep(MAX_DEPTH + 1)}, "guided_json", f"at most {MAX_DEPTH} deep"),
    ({"guided_json": deep(900)}, "guided_json", f"at most {MAX_DEPTH} deep"),
    (
        {"guided_json": long(MAX_BYTES + 1)},
        "guided_json",
        "262,145 bytes; at most 262,144",
    ),
    ({"guided_grammar": "a" * (MAX_BYTES + 1)}, "guided_grammar", "262,145 bytes"),
    ({"guided_regex": "a" * (MAX_REGEX_BYTES + 1)}, "guided_regex", "16,385 bytes"),
    (
        {"guided_choice": [*map(str, range(MAX_CHOICES + 1))]},
        "guided_choice",
        "10,001 choices",
    ),
    ({"guided_choice": ["a" * MAX_BYTES]}, "guided_choice", "262,148 bytes"),
    ({"guided_json": {"maximum": float("inf")}}, "guided_json", "1e400"),
    ({"guided_json": {"const": "\ud800"}}, "guided_json", "surrogate"),
    ({"guided_json": '"\ud800'}, "guided_json", "surrogate"),
    ({"guided_regex": "\ud800"}, "guided_regex", "surrogate"),
    ({"guided_choice": ["\ud800"]}, "guided_choice", "surrogate"),
]


@pytest.mark.parametrize(
    ("fields", "param", "told"), REFUSED, ids=lambda each: str(each)[:60]
)
def test_each_refusal(fields: Fields, param: str, told: str) -> None:
    """A schema beside the type text, a wrong `strict` and two patterns of space were ignored."""
    error = refused(fields)
    assert error.param == param and told in error.message, error.message
    assert error.message.startswith(param) and len(error.message) < 300


SENT = [
    {"response_format": {"type": "json_object"}},
    structured(json_object=True),
    {"guided_json": {"type": "object"}},
    {"json_schema": {"type": "object"}},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
    {"guided_grammar": "a"},
    {"grammar": "a"},
]


@pytest.mark.parametrize(("one", "other"), list(combinations(SENT, 2)), ids=str)
def test_two_constraints_are_refused_and_both_named(one: Fields, other: Fields) -> None:
    """Equal ones, too: a program that sends two does not know what it asks for."""
    message = refused(one | other).message
    assert all(name in message for name in one | other) and "keep one" in message


@pytest.mark.parametrize(
    ("pattern", "read_as"),
    [
        *(
            (each, each)
            for each in (
                " ",
                r"[ \n\t]*",
                r"[ ]?",
                r"(?:\n {0,4})?",
                r"\x20|\r?\n[\x20\t]{0,9}",
                r"( |\t){0,2}",
            )
        ),
        (r"\s*", r"[ \t\n\r]*"),
        (r"[\s]{1,3}", r"[[ \t\n\r]]{1,3}"),
        *(
            (each, None)
            for each in ("none", "a*", ".", r"\S", r"[^a]", r"[ *]", r"\x0b", r"[ 0-9]")
        ),
        *(
            (each, None)
            for each in (r"\\s", " \u00a0", "(?i: )", "[]", " {1,2,3}", " \nx", "[ \\]")
        ),
    ],
)
def test_white_space_is_that_of_json(pattern: str, read_as: str | None) -> None:
    """`none` meant no white space, and `a*` made answers that do not parse.

    In a regex `\\s` is of all white space of Unicode, of which JSON has four characters.
    """
    for fields in (
        structured(json=SCHEMA, whitespace_pattern=pattern),
        {"json_schema": SCHEMA, "guided_whitespace_pattern": pattern},
    ):
        if read_as is None:
            assert "it must be a regex of spaces" in refused(fields).message
        else:
            assert read(fields) == Constraint("json", TEXT, read_as or "")
        assert allows(fields) is (read_as is not None)


def test_equal_constraints_are_one_object() -> None:
    """A window of 1,000 lines would hold as many texts."""
    one = read({"guided_json": json.dumps(SCHEMA)})
    other = read(as_format(schema=dict(SCHEMA)))
    assert one is other
    turned = {name: SCHEMA[name] for name in reversed(SCHEMA)}
    assert read({"guided_json": turned}) != one, (
        "the order of keys is that of the answer"
    )


def test_a_constraint_is_of_the_meaning_and_of_no_draw() -> None:
    """With a seed a step draws what it draws without a constraint, where that is allowed."""

    def params(**fields: Any) -> Any:
        return parse_request({"prompt": "x"} | fields, max_logprobs=5).params

    plain = params()
    some = params(guided_regex="a")
    others = (params(guided_regex="b"), params(grammar="a"), params(json_schema=SCHEMA))
    spaced = params(json_schema=SCHEMA, guided_whitespace_pattern=" ")
    assert (
        len({digest_meaning(["x"], each) for each in (plain, some, *others, spaced)})
        == 6
    )
    assert make_draw_key([[5]], some, 7, 0, b"") == make_draw_key(
        [[5]], plain, 7, 0, b""
    )
    assert "constraint" not in DRAW_FIELDS
    groups = Groups()
    assert {groups.add({"prompt": "x"} | fields) for fields in (*SENT, {})} == {0}


def test_a_constrained_answer_calls_no_tool() -> None:
    for fields, told in (({}, True), ({"tool_choice": "none"}, False)):
        fields |= {"tools": [TOOL], "response_format": {"type": "json_object"}}
        warnings = parse_chat({"messages": HELLO} | fields, max_logprobs=5).warnings
        assert [str(each) for each in warnings] == [
            "tools cannot be called by an answer that is constrained"
        ] * told

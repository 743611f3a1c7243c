"""`oneOf` is taken as `anyOf` where its branches are proven to exclude each other,
never else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from fminfer.core.config import Constraint
from fminfer.text.grammar_forms import write_grammar
from fminfer.text.grammar_trial import _ByteTokenizer


def branch(kind: Any, **others: Any) -> dict[str, Any]:
    """Return a schema of pydantic's, whose property `kind` tells it from others."""
    properties = {"kind": {"const": kind}, **others}
    return {"type": "object", "properties": properties, "required": ["kind", *others]}


def one_of(first: Any, second: Any, **others: Any) -> dict[str, Any]:
    """Return a schema whose branches are references, as in every discriminated union."""
    both = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
    return {"oneOf": both, "$defs": {"A": first, "B": second}} | others


def matcher_of(schema: Any) -> Any:
    """Return a matcher over bytes."""
    words = LLTokenizer(TokenizerWrapper(_ByteTokenizer()), n_vocab=257)
    text = json.dumps(schema)
    grammar = write_grammar(Constraint("json", text, whitespace="none"))
    return LLMatcher(words, grammar, log_level=0)


LEAF = branch("leaf")
CIRCLE = branch("tree", inner={"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]})
HINT = {"propertyName": "kind", "mapping": {"leaf": "#/$defs/A", "tree": "#/$defs/B"}}
TEXT = {"type": "string"}
NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "fits", "fits_not"),
    [
        (
            one_of(LEAF, branch("tree", n=NUMBER)),
            {"kind": "tree", "n": 1},
            {"kind": "tree"},
        ),
        (
            one_of(LEAF, CIRCLE),
            {"kind": "tree", "inner": {"kind": "leaf"}},
            {"kind": "root"},
        ),
        (one_of(LEAF, CIRCLE, discriminator=HINT), {"kind": "leaf"}, {"kind": "tree"}),
        (one_of({"enum": ["a", "b"]}, {"const": "c"}), "c", "d"),
        (one_of({"type": ["integer", "null"]}, TEXT), None, 0.5),
        (
            one_of(branch("a", to=TEXT), branch("a", to=NUMBER)),
            {"kind": "a", "to": 1},
            {},
        ),
    ],
)
def test_branches_that_exclude_each_other(
    schema: Any, fits: Any, fits_not: Any
) -> None:
    """pydantic-ai's discriminated unions were refused, and circles of them, whoever
    wrote them."""
    for value, is_fit in ((fits, True), (fits_not, False)):
        matcher = matcher_of(schema)
        assert not matcher.is_error(), matcher.get_error()
        data = [*json.dumps(value, separators=(",", ":")).encode()]
        assert (
            matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        ) is is_fit


@pytest.mark.parametrize(
    "schema",
    [
        one_of(LEAF, branch("leaf", n=NUMBER)),
        one_of(LEAF, branch("leaf", n=NUMBER), discriminator=HINT),
        one_of(
            LEAF, LEAF | {"properties": {"kind": {"const": "tree"}}, "required": []}
        ),
        one_of(LEAF, {"properties": {"kind": {"const": "tree"}}, "required": ["kind"]}),
        one_of({"type": "integer"}, NUMBER),
        one_of({"const": 1}, {"const": 1.0}),
        one_of({"enum": ["a", "b"]}, {"enum": ["b", "c"]}),
        one_of({"$ref": "#/$defs/B"}, {"$ref": "#/$defs/A"}),
        one_of(LEAF, {"$ref": "other.json"}),
        one_of(5, ["a"]),
        {"oneOf": [{"type": [{}]}, {"enum": 5}, {"type": "object", "required": 3}]},
    ],
)
def test_others_are_refused(schema: Any) -> None:
    try:
        matcher = matcher_of(schema)
    except ValueError:
        return
    assert matcher.is_error()


def test_values_that_look_like_schemas_stay() -> None:
    value = {"oneOf": [{"type": "null"}, {"type": "string"}]}
    matcher = matcher_of({"enum": [value], "properties": {"oneOf": {"type": "array"}}})
    assert not matcher.is_error(), matcher.get_error()
    assert (
        matcher.try_consume_tokens([*json.dumps(value, separators=(",", ":")).encode()])
        > 20
    )

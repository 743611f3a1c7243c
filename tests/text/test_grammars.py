"""Grammars over the tokens of several kinds of tokenizers, and over real schemas."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.text import grammars
from fminfer.text.grammar_forms import write_grammar
from fminfer.text.grammars import Grammar, Grammars, Vocabulary
from fminfer.text.json_schemas import UnionRewriter, find_shortest_text
from fminfer.text.tokenizer import NoTokenizer, Tokenizer
from tests.conftest import IS_ALL
from tests.text.test_tokenizer import byte_level, sentencepiece_tokenizer

__all__ = ["sentencepiece_tokenizer"]  # a fixture
# schemas of others, where they are at hand
DATA = Path(__file__).parents[3] / "shared" / "data"
CORPUS = [
    '{"name": "Ada", "long name": [1, 2.5, null]} and some words in a row of words. Größe\n'
] * 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "long name": {"enum": [1, 2.5, None, "Größe 北"]},
    },
    "required": ["name", "long name"],
    "additionalProperties": False,
}
TWO = {"type": "array", "items": {"$ref": "#/d"}, "minItems": 2, "d": {"const": "ab"}}


def as_json(schema: Any, whitespace: str = "") -> Constraint:
    return Constraint("json", json.dumps(schema, ensure_ascii=False), whitespace)


def trained(kind: str) -> Tokenizer:
    """Train a tokenizer whose pieces are no bytes: with Metaspace, or WordPiece's ##."""
    special = ["<unk>", "<eos>"]
    if kind == "unigram":
        backend = BackendTokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=120,
            special_tokens=special,
            unk_token="<unk>",
            show_progress=False,
        )
    else:
        backend = BackendTokenizer(models.WordPiece(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=120, special_tokens=special, show_progress=False
        )
    backend.train_from_iterator(CORPUS, trainer)
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>"
    )
    return Tokenizer(hf)


def compile_for(
    tokenizer: Tokenizer, constraint: Constraint, num_more: int = 5
) -> Grammar:
    """Compile for a model that has more rows than the tokenizer has tokens."""
    assert tokenizer.backend is not None and tokenizer.eos_id is not None
    vocab_size = tokenizer.backend.get_vocab_size() + num_more
    return Grammars(tokenizer, vocab_size, frozenset({tokenizer.eos_id})).find(
        constraint
    )


def ids_of(grammar: Grammar, text: str) -> list[int]:
    vocabulary: Vocabulary = grammar.grammars.vocabulary
    return vocabulary(text)


def follow(grammar: Grammar, ids: list[int]) -> bool:
    """Tell whether each token is allowed, and then the end; look at every mask on the way."""
    matcher = grammar.make_matcher()
    for token_id in ids:
        bits = matcher.mask.bits
        if not bits[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.advance(token_id)
    return matcher.is_complete


@pytest.fixture(params=["byte_level", "sentencepiece", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "sentencepiece":
        found: Tokenizer = request.getfixturevalue("sentencepiece_tokenizer")
        return found
    return byte_level() if request.param == "byte_level" else trained("unigram")


def test_answers_of_all_kinds_of_tokenizers(tokenizer: Tokenizer) -> None:
    """What is allowed is what is said in the end, spaces and characters of several bytes too."""
    grammar = compile_for(tokenizer, as_json(SCHEMA))
    for value in (1, 2.5, None):
        text = json.dumps({"name": "a row of words", "long name": value})
        ids = ids_of(grammar, text)
        assert follow(grammar, ids), text
        before = tokenizer.encode("and").ids
        shown = tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before))
        assert shown == text
    assert not follow(grammar, ids_of(grammar, '{"name": "a", "long name": 3}'))
    assert not follow(grammar, ids_of(grammar, '{"long name": 1, "name": "a"}')), (
        "another order"
    )


def test_what_is_no_text_is_never_allowed(tokenizer: Tokenizer) -> None:
    """Special tokens, and rows of the head that no token belongs to; EOS at an end only."""
    grammar = compile_for(tokenizer, Constraint("regex", "(.|\\n)+"))
    assert tokenizer.backend is not None and tokenizer.eos_id is not None
    matcher = grammar.make_matcher()
    size = tokenizer.backend.get_vocab_size()
    for is_first in (True, False):
        bits = matcher.mask.bits
        allowed = {i for i in range(len(bits) * 8) if bits[i // 8] >> i % 8 & 1}
        assert len(allowed) > 30 and max(allowed) < size
        assert allowed & tokenizer.special_ids == (
            set() if is_first else {tokenizer.eos_id}
        )
        matcher.advance(ids_of(grammar, "a")[0])


def test_tokenizers_and_models_that_cannot_be_constrained_are_told() -> None:
    with pytest.raises(RequestError, match="not its tokens' bytes, as in WordPiece"):
        compile_for(trained("wordpiece"), Constraint("regex", "a"))
    with pytest.raises(RequestError, match="this run has no tokenizer"):
        Grammars(NoTokenizer(), 300, frozenset({0})).find(Constraint("regex", "a"))
    with pytest.raises(RequestError, match="this run has no EOS"):
        Grammars(byte_level(), 300, frozenset()).find(Constraint("regex", "a"))


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (as_json({"not": {}}), 'it has "not", to which answers cannot be held'),
        (as_json({"items": {"uniqueItems": True}}), '"uniqueItems"'),
        (as_json({"not": {}, "x-guidance": {"lenient": True}}), '"not"'),
        (
            as_json({"oneOf": [{"minimum": 1}, {"maximum": 3}]}),
            "oneOf whose branches may fit",
        ),
        (as_json({"type": "what"}), "Invalid type: what"),
        (as_json({"allOf": [{"const": 1}, {"const": 2}]}), "Unsatisfiable"),
        (
            as_json({"enum": [1, 2**53 + 1]}),
            '9007199254740993 under "enum" is beyond 2\\^53',
        ),
        (as_json({"const": {"id": -(2**64)}}), "-18446744073709551616 under"),
        (
            as_json({"const": 2.0**64}),
            "18446744073709551616.0|1.8446744073709552e\\+19",
        ),
        (
            as_json({"items": {"minimum": 2**53 + 1}}),
            'under "minimum" is beyond 2\\^53',
        ),
        (
            as_json({"minProperties": 2}),
            '"minProperties" is above 1 where keys are free',
        ),
        (as_json({}, whitespace="("), "the JSON schema .* unclosed group"),
        (Constraint("regex", "("), "the regex .* unclosed group"),
        (Constraint("regex", "(?=a)b"), "look-around"),
        (Constraint("regex", r"[^\x00-\x{10FFFF}]"), "the regex"),
        (Constraint("grammar", "root ::= other"), "'other' not found"),
        (Constraint("grammar", "start: other"), "the grammar .* other"),
        (Constraint("grammar", "nonsense"), "the grammar"),
        (
            Constraint("grammar", "start: x\nx[temperature=0.1]: /.*/"),
            "temperature of a rule",
        ),
        (
            Constraint("grammar", 'start: %json {"x-guidance": {"lenient": true}}'),
            "lenient in",
        ),
    ],
)
def test_what_cannot_be_had_is_named(constraint: Constraint, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        compile_for(byte_level(), constraint)


def test_keys_are_spelled_in_one_way() -> None:
    """llguidance takes "\\u0061" for a key beside "a": twice in an object, or with
    another type."""
    schema = {
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    grammar = compile_for(byte_level(), as_json(schema))
    assert follow(grammar, ids_of(grammar, r'{"a":1,"b\n\"":"\n"}'))
    for text in (r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}', r'{"b":"","b\u0061":""}'):
        assert not follow(grammar, ids_of(grammar, text)), text
    grammar = compile_for(byte_level(), as_json({"enum": ["\0", "a\\u00"]}))
    assert follow(grammar, ids_of(grammar, r'"\u0000"')), (
        "it can be spelled in no other way"
    )


def test_numbers_are_exact() -> None:
    """Those that float64 rounds were rounded in silence: an enum's 64-bit id became another."""
    for schema, within, beyond in (
        ({"const": 2**60, "default": 2**53 + 1}, 2**60, 2**60 + 24),
        ({"type": "integer", "maximum": 2**63 - 1}, 2**63 - 1, 2**63),
    ):
        grammar = compile_for(byte_level(), as_json(schema))
        assert follow(grammar, ids_of(grammar, str(within)))
        assert not follow(grammar, ids_of(grammar, str(beyond)))


def test_white_space_is_bounded_and_can_be_chosen() -> None:
    """Small models go on with it for ever; "x-guidance" in a schema changes nothing."""
    schema = SCHEMA | {
        "x-guidance": {"whitespace_flexible": True, "item_separator": ";"}
    }
    grammar = compile_for(byte_level(), as_json(schema))
    spaced = '{%s"name": "a", "long name": 1}'
    for space, is_allowed in (
        (" ", True),
        ("\n" + " " * 20, True),
        ("  ", False),
        ("\n\n", False),
    ):
        assert follow(grammar, ids_of(grammar, spaced % space)) is is_allowed
    assert not follow(grammar, ids_of(grammar, " " + spaced % " "))
    assert not follow(grammar, ids_of(grammar, '{"name": "a"; "long name": 1}'))
    none = compile_for(byte_level(), as_json(SCHEMA, "none"))
    assert follow(none, ids_of(none, '{"name":"a","long name":1}'))
    assert not follow(none, ids_of(none, '{"name": "a","long name":1}'))
    own = compile_for(byte_level(), as_json(SCHEMA, r"\t{3}"))
    assert follow(own, ids_of(own, '{\t\t\t"name":"a","long name":1}'))


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (as_json(SCHEMA), '{"name":"","long name":1}'),
        (as_json(TWO), '["ab","ab"]'),
        (
            as_json(
                {"anyOf": [{"type": "string", "minLength": 9}, {"type": ["null"]}]}
            ),
            "null",
        ),
        (Constraint("choice", '["a long one", "short"]'), "short"),
        (as_json({"$ref": "#"}), None),
        (as_json({"type": "string", "minLength": 10**9}), None),
        (Constraint("regex", "abc"), None),
    ],
)
def test_the_shortest_answer(constraint: Constraint, text: str | None) -> None:
    """It is a bound for a warning: 0 where it is not known."""
    try:
        grammar = compile_for(byte_level(), constraint)
    except RequestError:
        assert text is None
        return
    assert grammar.num_shortest == (len(ids_of(grammar, text)) if text else 0)


def test_sequences_share_masks_until_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "MAX_NODES", 6)
    grammar = compile_for(byte_level(), as_json(SCHEMA))
    ids = ids_of(grammar, '{"name": "a longer text", "long name": null}')
    first = grammar.make_matcher()
    second = grammar.make_matcher()
    for place, token_id in enumerate(ids):
        assert first.mask == second.mask
        assert (first.mask is second.mask) is (place < 6)
        first.advance(token_id)
        second.advance(token_id)
    assert first.is_complete and second.is_complete


def test_grammars_that_are_not_used_any_more_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The masks that are kept are counted for all grammars together."""
    monkeypatch.setattr(grammars, "MAX_KEPT", 3)
    grammar = compile_for(byte_level(), Constraint("regex", "[ab]+"))
    ids = ids_of(grammar, "ab")
    assert follow(grammar, ids)
    for number in range(5):
        grammar.grammars.find(Constraint("regex", f"[ab]+{number}"))
        with pytest.raises(RequestError):
            grammar.grammars.find(Constraint("regex", f"({number}"))
    assert len(grammar.grammars._compiled._entries) == 3
    kept = [
        each
        for each, _ in grammar.grammars._compiled._entries.values()
        if isinstance(each, Grammar)
    ]
    assert grammar.grammars._num_nodes == sum(each.num_nodes for each in kept)


def test_a_shortest_answer_is_never_built_at_length() -> None:
    """20,000 items of 15,000 characters took 600 MB; each name was looked up among all
    others."""
    long = {"const": "x" * 15_000}
    many = {f"{n}": {"$ref": "#/d"} for n in range(4000)}
    items = {"type": "array", "minItems": 20_000, "items": {"$ref": "#/d"}}
    for schema in (items, {"type": "object", "properties": many, "required": [*many]}):
        tracemalloc.start()
        assert find_shortest_text(schema | {"d": long}) is None
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
        tracemalloc.stop()


def test_thousands_of_choices_are_compiled_at_once() -> None:
    """Each of them was tried on the grammar: that took seconds, in which nothing else ran."""
    choices = [f"a choice, number {number}" for number in range(5000)] + ["b"]
    compile_for(byte_level(), Constraint("choice", '["a"]'))
    start = time.thread_time()
    grammar = compile_for(byte_level(), Constraint("choice", json.dumps(choices)))
    assert grammar.num_shortest == 1 and time.thread_time() - start < 6


def test_masks_of_grammars_that_left_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that go on with such a grammar filled the place of all others; so did two threads."""
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    grammar = compile_for(byte_level(), Constraint("regex", "[ab]+"))
    places = grammar.grammars
    matcher = grammar.make_matcher()
    for number in range(3):
        places._compile_into_cache(Constraint("regex", "c"))
        places.find(Constraint("regex", f"[ab]+{number}"))
    for token_id in ids_of(grammar, "abab"):
        matcher.advance(token_id)
        assert matcher.mask == grammar.first_node.mask or matcher.is_complete
    kept = [
        each
        for each, _ in places._compiled._entries.values()
        if isinstance(each, Grammar)
    ]
    assert places._num_nodes == sum(each.num_nodes for each in kept)


def write_longest(schema: Any, first: str, most: int = 60, begun: str = "") -> str:
    """Return what is written where one character comes whenever it may, and an end never."""
    tokenizer = byte_level()
    grammar = compile_for(tokenizer, as_json(schema))
    matcher = grammar.make_matcher()
    favoured = ids_of(grammar, first)[0]
    text = begun.encode()
    for token_id in ids_of(grammar, begun):
        matcher.advance(token_id)
    while len(text) < most:
        bits = matcher.mask.bits
        ids = [i for i in range(len(bits) * 8) if bits[i // 8] >> i % 8 & 1]
        ids = [each for each in ids if each != tokenizer.eos_id]
        if not ids:
            break
        matcher.advance(favoured if favoured in ids else ids[0])
        text += grammar.grammars.vocabulary.tokens[
            favoured if favoured in ids else ids[0]
        ]
    return text.decode()


def jsonschema_errors(schema: Any, value: Any) -> list[Any]:
    return [*Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize("digit", "019.e-")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "integer"},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-3},
        {"type": "number", "exclusiveMinimum": 1e-30, "maximum": 1e-29},
        {"type": "integer", "minimum": 10**16},
        {"type": "number", "exclusiveMinimum": 2**53},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "number", "exclusiveMaximum": -0.5},
        {"type": "integer", "multipleOf": 7},
        {"type": "number", "multipleOf": 7},
        {"type": "number", "multipleOf": 0.01},
        {"type": "number", "multipleOf": 0.25, "minimum": 0},
        {"anyOf": [{"type": "number"}, {"type": "null"}]},
    ],
)
def test_numbers_end(schema: Any, digit: str) -> None:
    """A number took digits until max_tokens, and was no JSON then; 1e400 is no double."""
    text = write_longest(schema, digit)
    number = json.loads(text)
    if number is not None:
        assert abs(number) < float("inf") and len(text) < 55
        mantissa = text.lower().partition("e")[0].replace(".", "").lstrip("-0")
        assert len(mantissa) <= 17 and not jsonschema_errors(schema, number)


def test_digits_of_numbers_are_counted() -> None:
    """17 digits tell all doubles apart. Bounds of a schema may need more of them."""
    free = compile_for(byte_level(), as_json({}))
    for text, is_allowed in (
        ("12345678901234567", True),
        ("123456789012345678", False),
        ("[0.12345678901234567, -1.2345678901234567]", True),
        ("1.23456789012345678", False),
        ("6.02e23", True),
        ("-1.5E-300", True),
        ("1e400", False),
        ("1e-400", False),
        ("99999999999999999e300", False),
        ('{"a": "123456789012345678901234567890", "b": true}', True),
    ):
        assert follow(free, ids_of(free, text)) is is_allowed, text
    wide = compile_for(byte_level(), as_json({"type": "integer", "format": "int64"}))
    assert follow(wide, ids_of(wide, str(2**62)))


@pytest.mark.parametrize(
    ("schema", "begun"),
    [
        ({"type": "integer", "minimum": 123456789012345680}, "113488326021705123"),
        ({"type": "integer", "maximum": -123456789012345680}, "-113488326021705123"),
        ({"type": "number", "maximum": 2**53 - 1}, str(2**53 - 1)),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 2**53 - 1},
            str(2**53 - 1),
        ),
        ({"type": "number", "multipleOf": 3.5, "maximum": 1e20}, "1994402688317769912"),
    ],
)
def test_no_digits_lead_to_a_place_without_an_end(schema: Any, begun: str) -> None:
    """Some bounds need a digit more than they have, and 2^53 - 1 took a point, but no 0
    behind."""
    for digit in "019.":
        text = write_longest(schema, digit, begun=begun)
        assert text.startswith(begun) and not jsonschema_errors(
            schema, json.loads(text)
        )


N = "#/$defs/N"


@pytest.mark.parametrize(
    ("schema", "has_end"),
    [
        ({"properties": {"n": {"$ref": N}}, "required": ["n"]}, False),
        ({"properties": {"n": {"$ref": N}}}, True),
        (
            {
                "properties": {"n": {"anyOf": [{"type": "null"}, {"$ref": N}]}},
                "required": ["n"],
            },
            True,
        ),
        (
            {
                "properties": {"n": {"anyOf": [{"$ref": N}, {"$ref": N}]}},
                "required": ["n"],
            },
            False,
        ),
        ({"required": ["n"], "additionalProperties": {"$ref": N}}, False),
        ({"allOf": [{"properties": {"n": {"$ref": N}}, "required": ["n"]}]}, False),
        ({"type": "array", "items": {"$ref": N}, "minItems": 1}, False),
        ({"type": "array", "items": {"$ref": N}}, True),
        ({"type": "array", "prefixItems": [{"$ref": N}], "minItems": 1}, False),
        ({"type": ["array", "null"], "items": {"$ref": N}, "minItems": 1}, True),
        ({"$ref": N}, False),
        ({"$ref": "#/$defs/M"}, False),
    ],
)
def test_schemas_that_nothing_finite_fits(schema: Any, has_end: bool) -> None:
    """They ran to max_tokens and were answered with 200; some told of `NoExtensionBias`."""
    kind = {} if schema.keys() & {"$ref", "type"} else {"type": "object"}
    both = {"$ref": N, "$defs": {"N": kind | schema, "M": {"$ref": N}}}
    if has_end:
        assert compile_for(byte_level(), as_json(both)).first_node.mask.few
        return
    with pytest.raises(RequestError, match="no finite value fits it"):
        compile_for(byte_level(), as_json(both))


@pytest.mark.parametrize(
    ("reference", "names"),
    [
        ("#town", {"$anchor": "town"}),
        ("town.json", {"$id": "town.json"}),
        ("urn:x:1#/$defs/N", {}),
        ("#/$defs/%4E", {}),
    ],
)
def test_references_that_only_llguidance_follows(
    reference: str, names: dict[str, str]
) -> None:
    """An `$anchor` and a relative name were taken for the root: "no finite value fits it"."""
    schema = {
        "$id": "urn:x:1" if reference.startswith("urn") else "http://x.org/all.json",
        "type": "array",
        "items": {"$ref": reference},
        "minItems": 1,
        "$defs": {"N": {"type": "integer"} | names},
    }
    grammar = compile_for(byte_level(), as_json(schema))
    assert follow(grammar, ids_of(grammar, "[12]"))
    assert not follow(grammar, ids_of(grammar, '["a"]'))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"name": "x", "strict": True, "schema": {"type": "object"}},
            'stands under "schema" as',
        ),
        ({"city": {"type": "string"}}, 'names of properties under "properties"'),
        ({"description": "A town", "city": {"type": "string"}}, 'under "properties"'),
        ({"name": "f", "parameters": {"type": "object"}}, 'stands under "parameters"'),
        (
            {"type": "array", "items": {"city": {"type": "string"}}},
            '"city" and no keyword',
        ),
        ({"title": "Any", "x-order": 1}, ""),
        ({"$ref": "#/$defs/all/a", "$defs": {"all": {"a": {"type": "null"}}}}, ""),
        ({"properties": {"a": {"javaType": "String"}}}, ""),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema"}, ""),
    ],
)
def test_schemas_without_a_keyword(schema: Any, told: str) -> None:
    """OpenAI's wrapper, and properties without `properties`, were answered with any JSON."""
    if not told:
        assert compile_for(byte_level(), as_json(schema)).first_node.mask.few != ()
        return
    with pytest.raises(RequestError, match=told):
        compile_for(byte_level(), as_json(schema))


ODD_CODES = (0x1F, 0x20, 0x22, 0x5C, 0x7F, 0x80, 0xFF, 0x2028, 0xFEFF, 0xFFFF, 0x1F600)


@pytest.mark.parametrize("code", [*range(0, 256, 5 if IS_ALL else 64), *ODD_CODES])
def test_constants_have_any_character(code: int) -> None:
    """U+007F was left out: llguidance writes it as an escape alone, and its Lark has none."""
    text = f"a{chr(code)}b"
    spelled = {
        json.dumps(text),
        json.dumps(text, ensure_ascii=False),
        f'"a\\u{code:04X}b"',
    }
    schema = {"enum": [text, 1]}
    named = {"type": "object", "properties": {text: {}}, "required": [text]}
    grammar = compile_for(byte_level(), as_json(schema))
    assert any(follow(grammar, ids_of(grammar, each)) for each in spelled)
    grammar = compile_for(byte_level(), as_json(named))
    assert any(follow(grammar, ids_of(grammar, f"{{{each}:1}}")) for each in spelled)
    grammar = compile_for(byte_level(), Constraint("choice", json.dumps([text, "c"])))
    assert follow(grammar, ids_of(grammar, text))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", r"[^\x00-\x{10FFFF}]"),
        as_json({"type": "string", "pattern": "^a{3}$", "maxLength": 2}),
        as_json({"const": "abc", "pattern": "^z"}),
        as_json({"enum": ["x"], "type": "string", "format": "date"}),
    ],
)
def test_what_matches_nothing_is_told_without_internals(constraint: Constraint) -> None:
    """Users read `NoExtensionBias <state>` and regexes that nobody wrote."""
    with pytest.raises(RequestError, match=r"cannot be had: nothing matches it$"):
        compile_for(byte_level(), constraint)


def read_suite(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz") as file:
        yield from map(json.loads, file)


@pytest.mark.skipif(not DATA.exists(), reason="the schemas of others are not at hand")
@pytest.mark.parametrize(
    ("name", "compiled", "lost"),
    [("maskbench", 934, 10), ("json_schema_suite", 168, 22)],
)
def test_real_schemas(name: str, compiled: int, lost: int) -> None:
    """Nothing that is accepted is invalid; few valid instances are lost, by order and space."""
    tokenizer = byte_level()
    places = Grammars(tokenizer, 310, frozenset({tokenizer.eos_id or 0}))
    num_compiled = num_lost = 0
    for each in read_suite(name):
        try:
            grammar = places.find(as_json(each["schema"]))
        except RequestError as error:
            assert "cannot be had" in error.message
            continue
        num_compiled += 1
        places._num_nodes = grammars.MAX_NODES  # keep no masks: only ends are asked for
        for test in each["tests"]:
            matcher = grammar.make_matcher()
            for token_id in ids_of(
                grammar, json.dumps(test["data"], ensure_ascii=False)
            ):
                matcher.advance(token_id)
            try:
                is_accepted = matcher.is_complete
            except RequestError:
                is_accepted = False
            assert test["valid"] or not is_accepted, (each["name"], test["data"])
            num_lost += test["valid"] and not is_accepted
    assert num_compiled >= compiled and num_lost <= lost


def kinds(*values: Any, **more: Any) -> dict[str, Any]:
    """Return a branch of a union, as pydantic writes one with a discriminator."""
    kind: Any = {"const": values[0]} if len(values) == 1 else {"enum": list(values)}
    return {"type": "object", "properties": {"kind": kind} | more, "required": ["kind"]}


@pytest.mark.parametrize(
    ("branches", "is_joined"),
    [
        ([kinds("a"), kinds("b", "c"), {"$ref": "#/$defs/d"}], True),
        ([kinds("a"), {"$ref": "#/$defs/d"}, kinds("c", "d")], False),
        ([kinds("a"), kinds("b") | {"required": []}], False),
        ([{"const": 1}, {"const": 2}, {"const": "1"}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"enum": [[1], {"a": 2}]}, {"enum": [[1.0]]}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": ["string", "null"]}, {"enum": [1, 2]}, {"type": "boolean"}], True),
        ([{"type": "string"}, {"enum": ["x"]}], False),
        ([{}, {"type": "string"}], False),
        ([{"$ref": "https://elsewhere"}, {"type": "string"}], False),
        ([True, {"type": "string"}], False),
    ],
)
def test_one_of_branches_that_exclude_each_other(
    branches: list[Any], is_joined: bool
) -> None:
    """Only a proof makes `oneOf` an `anyOf`: else what fits two branches would be accepted."""
    inner = {"items": {"oneOf": branches, "title": "T"}, "const": {"oneOf": [1]}}
    schema = {"$defs": {"d": kinds("d"), "more": {"anyOf": [inner]}}}
    found = UnionRewriter(schema).rewrite(schema)["$defs"]["more"]["anyOf"][0]
    assert list(found["items"]) == ["anyOf" if is_joined else "oneOf", "title"]
    assert found["const"] == {"oneOf": [1]}, "a value, not a schema"


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "temperature = " [0-9]+',
        'start: "lenient" | "temperature="',
        "start: /a/",
    ],
)
def test_words_of_a_grammar_are_no_options(text: str) -> None:
    """A literal `"lenient"` was taken for an option, and the grammar refused."""
    assert compile_for(byte_level(), Constraint("grammar", text)).first_node.mask.few


def test_blank_lines_of_a_grammar_take_no_time() -> None:
    """24,000 of them took 6 s: the search for a temperature read on from each."""
    start = time.thread_time()
    write_grammar(Constraint("grammar", "start: x\n" + "\n" * 24_000 + 'x: "a"'))
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("odd", [5, True, 2.0, None, "x", {"title": "x"}, [7]])
@pytest.mark.parametrize("key", ["definitions", "additionalItems", "examples"])
def test_odd_values_that_llguidance_passes_over(key: str, odd: Any) -> None:
    """`"definitions": 5` was an internal error, and `examples` beyond 2^53 were refused."""
    schema = {"type": "object", "default": 2**70, "examples": [2**70], key: odd}
    assert compile_for(byte_level(), as_json(schema)).unknown_keywords == ()


def test_one_of_in_places_of_their_own_stays() -> None:
    """References are looked up in the whole schema, and `$id` makes them mean others."""
    union = {
        "oneOf": [kinds("a"), kinds("b")],
        "discriminator": {"propertyName": "kind"},
    }
    assert list(UnionRewriter(union | {"$id": "x"}).rewrite(union | {"$id": "x"})) == [
        "oneOf",
        "discriminator",
        "$id",
    ]
    assert list(UnionRewriter(union).rewrite(union)) == ["anyOf"]
    for name in ("foo", "/$defs/a%62", "/$defs/a~1b"):
        both = [{"$ref": f"#{name}"}, {"type": "integer", "minimum": 1}]
        most = {"$anchor": "foo", "type": "integer", "maximum": 5}
        places = {"oneOf": both, "type": "null", "$defs": {"a/b": most, "ab": most}}
        assert "oneOf" in UnionRewriter(places).rewrite(places), "3 fits both"
    circle = {
        "$defs": {"c": {"$ref": "#/$defs/c"}},
        "oneOf": [{"$ref": "#/$defs/c"}, kinds("a")],
    }
    assert "oneOf" in UnionRewriter(circle).rewrite(circle)

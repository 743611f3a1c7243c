"""Grammars of calls: each takes BFCL's calls in its form, and none that leaves a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from fminfer.core.config import KnownParser
from fminfer.text.calls.call_grammars import (
    CallSpec,
    write_call_grammar,
    write_call_number_grammar,
)
from fminfer.text.calls.call_reader import ToolCallReader
from fminfer.text.calls.call_syntax import choose_variant
from fminfer.text.grammar_trial import EOS, LIMITS, _ByteTokenizer, _try_calls
from tests.conftest import IS_ALL
from tests.text.bfcl_calls import BfclCase, read_cases
from tests.text.call_writers import (
    WRITERS,
    Call,
    Writer,
    dump,
    write_glm45,
    write_hermes,
    write_minimax_m2,
    write_pythonic,
    write_qwen3_coder,
)

# What the templates of a form's other variants have.
SIGNS = {
    "write_mistral": "[ARGS]",
    "write_deepseek_v3": "```json",
    "write_phi4_functools": "functools",
}
FORMS = [
    pytest.param(form, writer, id=writer.__name__.removeprefix("write_"))
    for form, writers in WRITERS.items()
    for writer in writers
    if writer.__name__ != "write_openai_recipient"
]
WAY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "start": {"type": "string", "enum": ["porch", "den"]},
        "steps": {"type": "integer", "minimum": 1},
        "note": {"type": "string", "maxLength": 5},
        "day": {"type": "string", "format": "date"},
        "is_fast": {"type": "boolean"},
        "stops": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "end": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "key": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    },
    "required": ["start", "steps"],
    "additionalProperties": False,
}
FUNCTIONS = (
    ("find_way", json.dumps(WAY)),
    (
        "list_rooms",
        '{"type": "object", "properties": {}, "additionalProperties": false}',
    ),
)
GOOD: Call = ("find_way", {"start": "den", "steps": 2})


@cache
def build_tokenizer() -> Any:
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer()), n_vocab=EOS + 1)


def make_spec(form: KnownParser, writer: Writer, **changes: Any) -> CallSpec:
    variant = choose_variant(form, SIGNS.get(writer.__name__, ""))
    fields: dict[str, Any] = {"functions": FUNCTIONS, "is_forced": True}
    fields |= {"is_single": False, "token_ids": {}}
    return CallSpec(form, variant, **fields | changes)


class Judge:
    """Tells whether a grammar of calls takes a text: both its roots must."""

    def __init__(self, spec: CallSpec) -> None:
        limits = LLParserLimits(**LIMITS)
        texts = write_call_grammar(spec), write_call_number_grammar(spec)
        self.roots = [
            LLMatcher(build_tokenizer(), text, log_level=0, limits=limits)
            for text in texts
        ]
        assert not any(root.is_error() for root in self.roots), [
            root.get_error() for root in self.roots
        ]

    def takes(self, text: str) -> bool:
        ids = list(text.encode())
        for root in self.roots:
            matcher = root.deep_copy()
            if matcher.validate_tokens(ids) < len(ids):
                return False
            matcher.consume_tokens(ids)
            if not matcher.is_accepting():
                return False
        return True


def put_in_order(value: Any, schema: Any) -> Any:
    """Return arguments with their keys in the schema's order, which grammars ask for."""
    if isinstance(value, list):
        return [put_in_order(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    keys = dict.fromkeys([*(key for key in properties if key in value), *value])
    return {key: put_in_order(value[key], properties.get(key, {})) for key in keys}


def find_calls(case: BfclCase) -> list[Call]:
    """Return the calls of a case; none: they do not follow their own schemas."""
    schemas = {
        each["function"]["name"]: each["function"]["parameters"] for each in case.tools
    }
    calls = [(name, put_in_order(each, schemas[name])) for name, each in case.calls]
    validators = {
        name: jsonschema.Draft202012Validator(schemas[name]) for name in schemas
    }
    is_valid = all(
        validators[name].is_valid(arguments)
        and arguments.keys() <= {*schemas[name]["properties"]}  # one case has another
        for name, arguments in calls
    )
    return calls if is_valid else []


def write_as_held(writer: Writer, calls: list[Call], case: BfclCase) -> str:
    """Write calls as a grammar has them where that is not what every model writes.

    Between tags, a string has quotes where its type is not said. Python's lists and objects are
    those of JSON.
    """
    if writer is write_pythonic:
        texts = (
            f"{name}({', '.join(f'{key}={dump(each)}' for key, each in arguments.items())})"
            for name, arguments in calls
        )
        return f"[{', '.join(texts)}]"
    if writer not in (write_qwen3_coder, write_glm45, write_minimax_m2):
        return writer(calls)
    functions = [tool["function"] for tool in case.tools]
    types = {each["name"]: each["parameters"]["properties"] for each in functions}
    return writer(
        [
            (
                name,
                {
                    key: dump(each)
                    if isinstance(each, str) and "type" not in types[name][key]
                    else each
                    for key, each in arguments.items()
                },
            )
            for name, arguments in calls
        ]
    )


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_calls_of_bfcl_are_taken(form: KnownParser, writer: Writer) -> None:
    cases = read_cases()
    num_taken = 0
    for case in cases if IS_ALL else cases[:: len(cases) // 8]:
        if calls := find_calls(case):
            functions = [
                (each["function"]["name"], json.dumps(each["function"]["parameters"]))
                for each in case.tools
            ]
            held = calls[:1] if form == "openai" else calls
            text = write_as_held(writer, held, case)
            assert Judge(make_spec(form, writer, functions=functions)).takes(text), (
                case.id
            )
            num_taken += 1
    assert num_taken > (2000 if IS_ALL else 5)


def list_wrong_texts(form: KnownParser, writer: Writer) -> Iterator[tuple[str, str]]:
    """Yield texts that leave a form or a schema, with what is wrong with them."""
    name, arguments = GOOD
    wrong_arguments: dict[str, dict[str, Any]] = {
        "required": {"start": "den"},
        "order": {"steps": 2, "start": "den"},
        "extra": arguments | {"speed": 2},
        "type": arguments | {"steps": [2]},
        "fraction": arguments | {"steps": 2.5},
        "minimum": arguments | {"steps": 0},
        "enum": arguments | {"start": "attic"},
        "length": arguments | {"note": "longer"},
        "format": arguments | {"day": "2026-02-29"},
        "flag": arguments | {"is_fast": 1},
        "items": arguments | {"stops": [1, "b"]},
        "too many": arguments | {"stops": [1, 2, 3]},
        "digits": arguments | {"steps": 10**40},
    }
    for fault, each in wrong_arguments.items():
        yield fault, writer([(name, each)])
    good = writer([GOOD])
    yield "name", writer([("find", arguments)])
    yield "longer name", writer([("find_way2", arguments)])
    yield "text before", "Sure. " + good
    yield "text behind", good + " Done."
    yield "nothing", ""
    yield "broken mark", good[1:]
    yield "cut", good[: len(good) // 2]
    yield "no end", good[:-1]
    yield "doubled mark", good[0] + good


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_what_leaves_form_or_schema_is_refused(
    form: KnownParser, writer: Writer
) -> None:
    judge = Judge(make_spec(form, writer))
    full = GOOD[1] | {
        "note": "a<b",
        "day": "2026-02-28",
        "is_fast": True,
        "stops": [1.5, -2e3],
        "end": "x",
    }
    for good in (GOOD, ("find_way", full), ("list_rooms", {})):
        assert judge.takes(writer([good])), good
    wrong_texts = dict(list_wrong_texts(form, writer))
    assert len(wrong_texts) > 20
    assert [fault for fault, text in wrong_texts.items() if judge.takes(text)] == []
    two = writer([GOOD, ("list_rooms", {})])
    assert judge.takes(two) is (form != "openai")
    assert not Judge(make_spec(form, writer, is_single=True)).takes(two)


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_in_free_text_a_call_is_held_once_it_has_begun(
    form: KnownParser, writer: Writer
) -> None:
    judge = Judge(make_spec(form, writer, is_forced=False))
    good = writer([GOOD])
    for text in (
        "",
        "Hello, [a] or {b} 1.5e3 <b>.",
        good,
        writer([("list_rooms", {})]),
    ):
        assert judge.takes(text), text
    wrong_texts = dict(list_wrong_texts(form, writer))
    kept = ("text before", "text behind", "nothing", "broken mark", "cut", "no end")
    held = {fault: text for fault, text in wrong_texts.items() if fault not in kept}
    del held["doubled mark"]
    assert [fault for fault, text in held.items() if judge.takes(text)] == []
    begins_answer = form in ("llama3_json", "pythonic")
    assert judge.takes("Sure. " + held["type"]) is begins_answer


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_calls_that_a_grammar_takes_are_read_back(
    form: KnownParser, writer: Writer
) -> None:
    """Strings that look like other values, and those beside other types, keep their type."""
    judge = Judge(make_spec(form, writer))
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": json.loads(schema)},
        }
        for name, schema in FUNCTIONS
    ]
    for more in (
        {"note": "5"},
        {"note": "true"},
        {"note": "\n"},
        {"end": None},
        {"end": "</b>\n"},
        {"key": 5},
        {"stops": [0.5]},
        {"is_fast": False},
    ):
        call = (GOOD[0], GOOD[1] | more)
        text = writer([call])
        assert judge.takes(text), more
        content, (found,) = ToolCallReader(form, tools, is_certain=True).feed(text)
        assert (content, found.name, json.loads(found.arguments)) == ("", *call)
    if form in ("qwen3_coder", "glm45", "minimax_m2"):
        text = writer([(GOOD[0], GOOD[1] | {"key": "5"})])
        assert judge.takes(text) and not judge.takes(text.replace("5", "five"))
        quoted = text.replace("5", '"5"')
        assert judge.takes(quoted), "beside other types, a string has quotes"
        _, (call_found,) = ToolCallReader(form, tools, is_certain=True).feed(quoted)
        assert json.loads(call_found.arguments)["key"] == "5"
    else:
        assert judge.takes(writer([(GOOD[0], GOOD[1] | {"key": "a 5"})]))


@pytest.mark.parametrize(
    ("keyword", "form"),
    [("pattern", "qwen3_coder"), ("allOf", "glm45"), ("pattern", "minimax_m2")],
)
def test_what_text_between_tags_cannot_have_is_refused_by_name(
    keyword: str, form: KnownParser
) -> None:
    value = {"allOf": [{"minLength": 2}]}.get(keyword, "^a+$")
    schema = {"properties": {"a": {"type": "string", keyword: value}}}
    spec = CallSpec(form, 0, (("f", json.dumps(schema)),), True, False, {})
    with pytest.raises(ValueError, match=f'parameters of "f": it has "{keyword}"'):
        write_call_grammar(spec)
    for form in ("hermes", "pythonic"):
        spec = CallSpec(form, 0, (("f", json.dumps(schema)),), True, False, {})
        assert _try_calls(build_tokenizer(), spec)[0]


def test_what_a_tag_or_python_cannot_name_is_refused() -> None:
    for form, name in (("glm45", "a<b"), ("pythonic", "c d")):
        schema = json.dumps({"properties": {name: {}}})
        spec = CallSpec(form, 0, (("f", schema),), True, False, {})
        with pytest.raises(ValueError, match=name):
            write_call_grammar(spec)
    spec = CallSpec("glm45", 0, (("f g", "{}"),), True, False, {})
    with pytest.raises(ValueError, match='"f g" cannot be held'):
        write_call_grammar(spec)
    with pytest.raises(ValueError, match='"dependentRequired"'):
        schema = '{"dependentRequired": {"a": ["b"]}}'
        write_call_grammar(CallSpec("glm45", 0, (("f", schema),), True, False, {}))


def test_rules_beside_a_reference_or_a_union_are_refused_between_tags() -> None:
    """They were forgotten there: a longer text passed."""
    for rules in ({"$ref": "#/$defs/a"}, {"anyOf": [{"minLength": 1}]}):
        value = {"type": "string", "maxLength": 2} | rules
        schema = {"properties": {"a": value}, "$defs": {"a": {"minLength": 1}}}
        spec = CallSpec("glm45", 0, (("f", json.dumps(schema)),), True, False, {})
        with pytest.raises(ValueError, match=next(iter(rules)).replace("$", r"\$")):
            write_call_grammar(spec)


def test_a_schema_that_does_not_compile_is_named_by_its_function() -> None:
    wrong = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    functions = (*FUNCTIONS, ("look", json.dumps(wrong)))
    with pytest.raises(ValueError, match=r'parameters of "look": .*not'):
        _try_calls(build_tokenizer(), CallSpec("hermes", 0, functions, True, False, {}))


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "minimax_m2", "pythonic"])
def test_a_function_without_a_schema_takes_any_names(form: KnownParser) -> None:
    (writer,) = WRITERS[form]
    judge = Judge(make_spec(form, writer, functions=(("f", "{}"),)))
    for arguments in ({}, {"a": 5}, {"a": [1], "b_c": {"d": 2.5}}):
        assert judge.takes(writer([("f", arguments)]))
    is_text = form in ("qwen3_coder", "glm45", "minimax_m2")
    assert judge.takes(writer([("f", {"a": 5})]).replace("5", "five")) == is_text


def test_names_in_python_are_those_that_a_reader_reads() -> None:
    """Rust has other letters than Python: a forced call was no call."""
    (writer,) = WRITERS["pythonic"]
    judge = Judge(make_spec("pythonic", writer, functions=(("f", "{}"),)))
    for key in ("a", "größe", "ß_5", "a\u0301", "a\u200d", "a\u203f", "ⓐ", "5"):
        text = f"[f({key}=1)]"
        _, calls = ToolCallReader("pythonic", [], is_certain=True).feed(text)
        assert judge.takes(text) == bool(calls), key


@pytest.mark.parametrize("form", sorted(WRITERS))
@pytest.mark.parametrize("name", ["a:b", "a/b", "a.b-c"])
def test_a_forced_call_has_the_name_of_its_function(
    form: KnownParser, name: str
) -> None:
    writer = WRITERS[form][0]
    text = writer([(name, {"a": 5})])
    assert Judge(make_spec(form, writer, functions=((name, "{}"),))).takes(text)
    reader = ToolCallReader(form, [], is_certain=True)
    calls = [*reader.feed(text)[1], *reader.finish()[1]]
    assert [call.name for call in calls if not call.goes_on] == [name]


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "minimax_m2"])
def test_a_listed_text_that_holds_the_closing_tag_is_not_written(
    form: KnownParser,
) -> None:
    """A reader would end the text there, and lose the call."""
    (writer,) = WRITERS[form]
    values = ("a</parameter>b", "a</arg_value>b", "c")
    schema = {"properties": {"a": {"type": "string", "enum": values}}}
    judge = Judge(make_spec(form, writer, functions=(("f", json.dumps(schema)),)))
    taken = [judge.takes(writer([("f", {"a": value})])) for value in values]
    assert taken == [form == "glm45", form != "glm45", True]


def test_special_tokens_stand_for_their_texts() -> None:
    spec = CallSpec(
        "mistral", 0, FUNCTIONS, False, False, {"[TOOL_CALLS]": 5, "[ARGS]": 6}
    )
    text = write_call_grammar(spec)
    assert "<[5]>" in text and "<[6]>" in text and "[TOOL_CALLS]" not in text
    assert "<[5]>" in _try_calls(build_tokenizer(), spec)[0][0], "bytes are tried alone"


def test_tokens_that_spell_a_special_token_begin_no_call() -> None:
    """A reader sees the text alone, and nothing would hold what follows."""
    for ids, is_taken in (({}, True), ({"<tool_call>": 5}, False)):
        spec = make_spec("hermes", write_hermes, is_forced=False, token_ids=ids)
        assert Judge(spec).takes(write_hermes([GOOD])) is is_taken
        assert not Judge(spec).takes("<tool_call>\n5")
        assert Judge(spec).takes("<tool_")

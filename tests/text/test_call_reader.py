"""Tool calls out of a chat model's text, in any pieces."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fminfer.core.config import KnownParser
from fminfer.text.calls.call_forms import find_parser
from fminfer.text.calls.call_reader import ToolCallReader
from fminfer.text.calls.tool_call import ToolCall

Answer = tuple[str, list[ToolCall]]
SCALARS = st.none() | st.booleans() | st.integers() | st.text()
# how long a machine takes says nothing of what is read
ANY_TIME = settings(deadline=None)
PARSERS: list[KnownParser] = ["hermes", "llama3_json"]


def read_pieces(parser: KnownParser, pieces: list[str]) -> Answer:
    reader = ToolCallReader(parser)
    parts = [reader.feed(piece) for piece in pieces] + [reader.finish()]
    return "".join(content for content, _ in parts), [
        call for _, calls in parts for call in calls
    ]


def read(parser: KnownParser, text: str) -> Answer:
    return read_pieces(parser, [text])


A = '{"name": "add", "arguments": {"a": 1}}'
B = '{"name": "look", "arguments": {"where": "den {north}", "deep": {"x": [{}, "\\"}"]}}}'
CALL_A = ToolCall("add", '{"a": 1}')
CALL_B = ToolCall("look", '{"where": "den {north}", "deep": {"x": [{}, "\\"}"]}}')


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Just text, 1 < 2.\n", "Just text, 1 < 2.\n", []),
        (tagged(A), "", [CALL_A]),
        (f"Let me see.\n\n{tagged(A)}\n{tagged(B)}\n", "Let me see.", [CALL_A, CALL_B]),
        (f"{tagged(A)} and then {tagged(B)} done.", "and thendone.", [CALL_A, CALL_B]),
        (f"<tool_call>{A}</tool_call>", "", [CALL_A]),
        # The end of the text without the closing tag, or with a part of it.
        (f"{tagged(A)}<tool_call>{B}", "", [CALL_A, CALL_B]),
        (f"<tool_call>\n{B}\n</tool", "", [CALL_B]),
        (f" <tool_call>\n{B[:-1]}", f" <tool_call>\n{B[:-1]}", []),
        # A closing tag in a string is text.
        (
            tagged('{"name": "tag", "arguments": {"text": "</tool_call>"}}'),
            "",
            [ToolCall("tag", '{"text": "</tool_call>"}')],
        ),
        # A call that is not valid costs no other one.
        (
            f"<tool_call>{A[:-1]}</tool_call>{tagged(B)}",
            f"<tool_call>{A[:-1]}</tool_call>",
            [CALL_B],
        ),
        (
            f'<tool_call>{{"name": "a\n</tool_call>\n{tagged(B)}',
            '<tool_call>{"name": "a\n</tool_call>',
            [CALL_B],
        ),
        (f"<tool_call>{A} or so</tool_call>", f"<tool_call>{A} or so</tool_call>", []),
        (f"The tag <tool_call> <tool_call>{A}", "The tag <tool_call>", [CALL_A]),
        (f"<tool<tool_call>{A}", "<tool", [CALL_A]),
        (f"<tool_call>[{A}]</tool_call>", f"<tool_call>[{A}]</tool_call>", []),
        ("x <tool_c", "x <tool_c", []),
        (A, A, []),
        ("", "", []),
        (" \n", " \n", []),
    ],
)
def test_hermes(text: str, content: str, calls: list[ToolCall]) -> None:
    assert read("hermes", text) == (content, calls)
    assert read_pieces("hermes", list(text)) == (content, calls)


C = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Just text.\n", "Just text.\n", []),
        (f"See: {C}", f"See: {C}", []),
        (C, "", [CALL_A]),
        (f"\n\n{C}\n", "", [CALL_A]),
        (f"<|python_tag|>{C}", "", [CALL_A]),
        (f"<|python_tag|> {C};  {B}\n{C}", "", [CALL_A, CALL_B, CALL_A]),
        (f"<|python_tag|>{C};<|python_tag|>{C}", "", [CALL_A, CALL_A]),
        (f"{C} Done: {C}", f"Done: {C}", [CALL_A]),
        (f'{{"type": "function", {C[1:]}', "", [CALL_A]),
        ('<|python_tag|>print("a")', '<|python_tag|>print("a")', []),
        ("<|python|>", "<|python|>", []),
        (f" \n{C[:-1]}", f" \n{C[:-1]}", []),
        (f"{C}; {C[:-1]}", C[:-1], [CALL_A]),
        (' {"name": "Ann", "age": 4}\n', ' {"name": "Ann", "age": 4}\n', []),
        ("{a}<b>", "{a}<b>", []),
        ("", "", []),
        (" \n", " \n", []),
    ],
)
def test_llama3_json(text: str, content: str, calls: list[ToolCall]) -> None:
    assert read("llama3_json", text) == (content, calls)
    assert read_pieces("llama3_json", list(text)) == (content, calls)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"b":1,"a" : "é 東"}', '{"b": 1, "a": "é 東"}'),
        ('{"a": "\\u00e9\\n"}', '{"a": "é\\n"}'),
        ("{}", "{}"),
        ('"{\\"a\\":1}"', '{"a":1}'),
        ('"north"', None),
        ('"{\\"a\\": NaN}"', None),
        ('{"a": NaN}', None),
        ('{"a": -Infinity}', None),
        ('{"a": 1e999}', None),
        ('{"a": "\\ud800"}', None),
        ('{"a": ' + "1" * 5000 + "}", None),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", None),
        ("{'a': 1}", None),
        ('{"a": 1,}', None),
        ("[1]", None),
        ("null", None),
    ],
)
def test_arguments(parser: KnownParser, written: str, arguments: str | None) -> None:
    text = f'{{"name": "f", "arguments": {written}}}'
    text = tagged(text) if parser == "hermes" else text
    expected = ("", [ToolCall("f", arguments)]) if arguments else (text, [])
    assert read(parser, text) == expected


@pytest.mark.parametrize(
    "call",
    [
        '{"name": 1, "parameters": {}}',
        '{"name": "", "parameters": {}}',
        '{"parameters": {}}',
        '{"name": "f"}',
        "{}",
    ],
)
def test_what_is_no_call(call: str) -> None:
    assert read("llama3_json", call) == (call, [])
    assert read("hermes", tagged(call)) == (tagged(call), [])


def test_what_is_certain_comes_at_once() -> None:
    reader = ToolCallReader("hermes")
    assert reader.feed("Hello <b> \n<tool") == ("Hello <b>", [])
    assert reader.feed("s> <tool_call>") == (" \n<tools>", [])
    assert reader.feed(f"{A}</tool_call") == ("", [])
    assert reader.feed(">") == ("", [CALL_A])
    assert reader.feed(" \n") == ("", [])
    assert reader.feed("Bye\n") == ("Bye", [])
    assert reader.finish() == ("\n", [])
    reader = ToolCallReader("llama3_json")
    assert reader.feed(" H") == (" H", [])
    assert reader.feed("i\n") == ("i", [])
    assert reader.finish() == ("\n", [])
    reader = ToolCallReader("llama3_json")
    assert reader.feed(C) == ("", [CALL_A])
    assert reader.feed(f";{C[:5]}") == ("", [])
    assert reader.feed(C[5:] + " .") == (".", [CALL_A])


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<tool",
    "<",
    ">",
    "{",
    "}",
    '"',
    "\\",
    ";",
    " ",
    "\n",
    "a",
    "é",
    "\u3000",
    "[",
    "]",
    ",",
    ":",
    "1",
    "NaN",
    A,
    B,
    C,
    tagged(A),
    '"name": "f", "arguments": {',
    '{"name": "f", "parameters": {"x": "',
]


@ANY_TIME
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    parser=st.sampled_from(PARSERS),
)
def test_pieces_change_nothing(text: str, cuts: list[int], parser: KnownParser) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read_pieces(parser, pieces) == read(parser, text)
    assert read_pieces(parser, list(text)) == read(parser, text)


@ANY_TIME
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
def test_nothing_is_lost(text: str) -> None:
    """Where there is no call, the content is the text; calls can be counted in it."""
    for parser in PARSERS:
        content, calls = read(parser, text)
        if not calls:
            assert content == text
        assert len(calls) <= text.count('"name"') - content.count('"name"')


@ANY_TIME
@given(
    name=st.text(min_size=1),
    arguments=st.dictionaries(
        st.text(), st.recursive(SCALARS, st.lists, max_leaves=5), max_size=5
    ),
)
def test_every_object_comes_back(name: str, arguments: dict[str, object]) -> None:
    for parser, key in (("hermes", "arguments"), ("llama3_json", "parameters")):
        text = json.dumps({"name": name, key: arguments})
        content, (call,) = read(parser, tagged(text) if parser == "hermes" else text)  # type: ignore[arg-type]
        assert (content, call.name, json.loads(call.arguments)) == ("", name, arguments)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "unit",
    [
        " ",
        "<",
        "<tool_call>",
        "<tool_call>{",
        "{",
        '{"a": "\\',
        tagged(A),
        "<tool_call>{} ",
    ],
)
def test_long_texts_take_linear_time(parser: KnownParser, unit: str) -> None:
    """Of 60,000 characters one by one; what looks at all of them for each takes far longer."""
    text = unit * (60_000 // len(unit))
    start = time.thread_time()
    assert read_pieces(parser, list(text)) == read(parser, text)
    assert time.thread_time() - start < 8


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (
            'return a json object within <tool_call></tool_call> tags: <tool_call>\n{"name": …',
            "hermes",
        ),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{function-name}<arg_key>{a}</arg_key>", "glm45"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument '
            "name and its value}. Do not use variables.",
            "llama3_json",
        ),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        (
            "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}",
            None,
        ),
        ("[TOOL_CALLS]", "mistral"),
    ],
)
def test_find_parser(template: str, parser: KnownParser | None) -> None:
    assert find_parser(template) == parser

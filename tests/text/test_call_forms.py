"""Tool calls in every form: how a template tells it, and what is read of a text."""

from __future__ import annotations

import json
import random
import re
import time
from itertools import pairwise
from typing import Any, get_args

import pytest

from fminfer.core.config import KnownParser
from fminfer.text.calls.call_forms import FORMS, find_form, find_parser
from fminfer.text.calls.call_reader import ToolCallReader
from tests.conftest import IS_ALL
from tests.text.call_writers import WRITERS, Call, Writer, write_calls

PARSERS: tuple[KnownParser, ...] = get_args(KnownParser)
EVERY_WRITER = [
    pytest.param(form, writer, id=writer.__name__)
    for form, writers in WRITERS.items()
    for writer in writers
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
LOOK: Call = ("look", {"at": 'the "den" [1] {é}\n<b>\\ it\'s', "n": 5})
DEEP: Call = ("math.look-up", {"x": [1.5, {"y": None, "z": [True, "a"]}], "w": {}})
STOP: Call = ("stop", {})
Answer = tuple[str, list[Call]]


def read_pieces(
    parser: KnownParser,
    pieces: list[str],
    *,
    keeps_one: bool = False,
    is_certain: bool = False,
) -> Answer:
    """Return content and calls; pieces of calls are joined."""
    reader = ToolCallReader(parser, TOOLS, keeps_one=keeps_one, is_certain=is_certain)
    content = ""
    calls: list[tuple[str, str]] = []
    for text, new in [*map(reader.feed, pieces), reader.finish()]:
        content += text
        for call in new:
            if call.goes_on:
                assert is_certain and not call.name
                name, arguments = calls.pop()
                calls.append((name, arguments + call.arguments))
            else:
                assert call.name
                calls.append((call.name, call.arguments))
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def read(parser: KnownParser, text: str, **options: bool) -> Answer:
    """Read a text at once and in single characters, which must not differ."""
    answer = read_pieces(parser, [text], **options)
    assert read_pieces(parser, list(text), **options) == answer
    return answer


def test_every_form_is_in_the_table_once() -> None:
    assert sorted(form.name for form in FORMS) == sorted(PARSERS) == sorted(WRITERS)


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize(("form", "writer"), EVERY_WRITER)
def test_calls_are_read_back(
    form: KnownParser, writer: Writer, is_certain: bool
) -> None:
    for calls in ([LOOK], [STOP], [LOOK, STOP, DEEP]):
        text = writer(calls)
        assert read(form, text, is_certain=is_certain) == ("", calls)
        assert read(form, text, is_certain=is_certain, keeps_one=True) == (
            "",
            calls[:1],
        )
        assert read(form, f"{text}\n", is_certain=is_certain) == ("", calls)


@pytest.mark.parametrize("form", sorted({*PARSERS} - {"llama3_json", "pythonic"}))
def test_content_stands_around_calls(form: KnownParser) -> None:
    text = write_calls(form, [LOOK])
    assert read(form, f"I look. 1 < 2 [x]\n\n{text}") == ("I look. 1 < 2 [x]", [LOOK])
    assert read(form, f"A {text} B") == ("AB", [LOOK])


@pytest.mark.parametrize(("form", "writer"), EVERY_WRITER)
def test_a_text_that_breaks_off_has_whole_calls_or_none(
    form: KnownParser, writer: Writer
) -> None:
    """What is no whole call is content, but what stands around a message of Harmony's."""
    text = writer([LOOK])
    for end in range(len(text)):
        content, calls = read_pieces(form, [text[:end]])
        assert (content, calls) in [("", [LOOK]), (text[:end], []), ("", [])]
        assert content or calls or form == "openai" or not text[:end].strip()


@pytest.mark.parametrize("form", PARSERS)
def test_certain_calls_come_in_pieces(form: KnownParser) -> None:
    """Under a grammar the arguments are streamed; otherwise a call comes whole."""
    text = write_calls(form, [DEEP, LOOK])
    for is_certain in (False, True):
        reader = ToolCallReader(form, TOOLS, is_certain=is_certain)
        calls = [call for character in text for call in reader.feed(character)[1]]
        calls += reader.finish()[1]
        assert [call.name for call in calls if not call.goes_on] == [DEEP[0], LOOK[0]]
        assert all(call.arguments for call in calls)
        # Those of Python are whole calls.
        assert (len(calls) > 4) == (is_certain and form != "pythonic")
        whole = ToolCallReader(form, TOOLS, is_certain=is_certain).feed(text)[1]
        assert not any(call.goes_on for call in whole)
        joined = "".join(call.arguments for call in calls)
        assert "".join(call.arguments for call in whole) in joined


def test_a_certain_call_that_breaks_off_is_cut() -> None:
    """Its pieces are returned already, so nothing of it is content."""
    for form in set(PARSERS) - {"pythonic"}:
        text = write_calls(form, [LOOK])
        end = text.index("n", text.index("den")) - 1
        reader = ToolCallReader(form, TOOLS, is_certain=True)
        parts = [reader.feed(text[:end]), reader.finish()]
        assert "".join(content for content, _ in parts) == ""
        calls = [call for _, calls in parts for call in calls]
        assert calls[0].name == "look" and calls[0].arguments.startswith("{")
        assert all(call.arguments for call in calls)


@pytest.mark.parametrize("form", PARSERS)
def test_text_comes_at_once_under_a_grammar(form: KnownParser) -> None:
    reader = ToolCallReader(form, TOOLS, is_certain=True)
    assert reader.feed('Hi, {"a": "b": {}} [c(d=1)]') == (
        'Hi, {"a": "b": {}} [c(d=1)]',
        [],
    )


CHANNEL = "<|channel|>commentary"
NO_CALLS: list[tuple[KnownParser, str]] = [
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function>"),
    ("qwen3_coder", "<tool_call><function=f>a</function></tool_call>"),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter>",
    ),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n1</tool_call>"),
    ("glm45", "<tool_call>\n</tool_call>"),
    ("glm45", "<tool_call>f\n<arg_value>1</arg_value></tool_call>"),
    ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>"),
    ("minimax_m2", '<invoke name="f"></invoke>'),
    ("pythonic", "[look(5)]"),
    ("pythonic", "[look(at=den)]"),
    ("pythonic", "[look(at=open('x'))]"),
    ("pythonic", "[look(at='a' 'b' * 9)]"),
    ("pythonic", "[look(at=1).x]"),
    ("pythonic", "[look(**{'at': 1})]"),
    ("pythonic", "[look(at={1, 2})]"),
    ("pythonic", "[look(at=1e999)]"),
    ("pythonic", "[look(at=1j)]"),
    ("pythonic", "[look(at=(1))]"),
    ("pythonic", f"[look(at={'[' * 5000}{']' * 5000})]"),
    ("pythonic", f"[look(at=[1]{'[1]' * 5000})]"),
    ("pythonic", "[link](http://a)"),
    ("pythonic", "See [look(at=1)]"),
    ("pythonic", "<|python_end|>Yes"),
    ("mistral", "[TOOL_CALLS]look[ARGS]5"),
    ("mistral", "[TOOL_CALLS]look(at=1)"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[1] and [TOOL]"),
    ("openai", f'{CHANNEL} to=python<|message|>{{"a": 1}}'),
    ("openai", f'{CHANNEL} to=functions.look<|message|>["a"]'),
    ("openai", f'{CHANNEL} to=functions.look{{"a": 1}}'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>5"),
    ("granite", '<|tool_call|>{"name": "f", "arguments": {}}'),
    ("phi4_mini_json", '<|tool_call|>[{"name": "f"}]<|/tool_call|>'),
    ("phi4_mini_json", "I use functools here"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_content(form: KnownParser, text: str) -> None:
    assert read(form, text) == (text, [])
    behind = f"{text}\n{write_calls(form, [STOP])}"
    if form not in {"pythonic", "openai"} and not text.endswith("1</function>"):
        assert read(form, behind) == (text, [STOP]), "it costs no other call"


F = '{"name": "f", "arguments": {}}'
HEADER = "<|start|>assistant<|channel|>"
TEXTS: list[tuple[KnownParser, str, str, list[str]]] = [
    # closing tags that are missing, and calls that are written more loosely
    ("qwen3_coder", "<tool_call><function=f></function>", "", ["f"]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\nYes", "Yes", ["f"]),
    ("glm45", "<tool_call>f</tool_call><tool_call>g\n</tool_call>", "", ["f", "g"]),
    ("glm45", "<tool_call>f</tool_call> <tool_call>", "<tool_call>", ["f"]),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"></invoke>', "", ["f"]),
    ("pythonic", "<|python_start|>[f(), g()]<|python_end|>", "", ["f", "g"]),
    ("pythonic", " [f()] Yes [g()]", "Yes [g()]", ["f"]),
    ("pythonic", "[f(a=[1], b=(1,), c='\\d', d=-1.5e-3, class=None,)]", "", ["f"]),
    ("mistral", f"[TOOL_CALLS] [{F}, {F}]", "", ["f", "f"]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]aB3[ARGS]{"a": 1}', "", ["f"]),
    ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]g{}", "", ["f", "g"]),
    ("mistral", f"[TOOL_CALLS][{F}, 5]", "5]", ["f"]),
    ("granite", f"<tool_call>[{F}]", "", ["f"]),
    ("phi4_mini_json", f"functools[{F}, {F}]", "", ["f", "f"]),
    # Harmony: a preamble is content, a thought is not
    ("openai", f"{CHANNEL}<|message|>I look.<|end|>", "I look.", []),
    ("openai", f"{HEADER}final<|message|>Yes.<|return|>", "Yes.", []),
    ("openai", f"A.<|end|>{HEADER}final<|message|>B.", "A.B.", []),
    (
        "openai",
        f"{CHANNEL}<|message|>I look.<|end|>{HEADER}analysis<|message|>Hm <|x|><|end|>"
        f"{HEADER}commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>",
        "I look.",
        ["f"],
    ),
    (
        "openai",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|> {}",
        "",
        ["f"],
    ),
    ("openai", f"{HEADER}analysis<|message|>Hm", "", []),
    ("openai", "to be", "to be", []),
]


@pytest.mark.parametrize(("form", "text", "content", "names"), TEXTS)
def test_texts(form: KnownParser, text: str, content: str, names: list[str]) -> None:
    found, calls = read(form, text)
    assert (found, [name for name, _ in calls]) == (content, names)


TAGGED = "return a json object within <tool_call></tool_call> tags"
TEMPLATES: list[tuple[str, KnownParser | None]] = [
    (f'{TAGGED}:\n<tool_call>\n{{"name": <function-name>', "hermes"),
    (
        "reply in the following format:\n\n<tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>\nvalue_1\n</parameter>",
        "qwen3_coder",
    ),
    (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}",
        "glm45",
    ),
    (
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"",
        "minimax_m2",
    ),
    (
        "put it in the format of [func_name1(params_name1=params_value1, "
        "params_name2=params_value2...), func_name2(params)]",
        "pythonic",
    ),
    (
        "in the format <|tool_call_start|> [func_name1(params_name1=params_value1...)]",
        None,
    ),
    ('{"name": function name, "parameters": dictionary of argument', None),
    (
        'Respond in the format {"name": function name, "parameters": dictionary of '
        "argument name and its value}. Do not use variables.",
        "llama3_json",
    ),
    ("{{- '<|python_tag|>' + call.name }}", "llama3_json"),
    ("{{- '[TOOL_CALLS][' }}{{- ', \"id\": \"' }}", "mistral"),
    ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
    (
        "{{- '<|start|>assistant to=functions.' + name + '<|channel|>commentary '"
        " + 'json<|message|>' }}{{- '<|call|>' }}",
        "openai",
    ),
    (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'"
        " + name + '\\n' + '```json'}}",
        "deepseek_v3",
    ),
    ("respond with <|tool_call|> followed by a JSON list of tools used", "granite"),
    ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json"),
    ('formatted as functools[{"name": [function name], "arguments"', "phi4_mini_json"),
    ("{{ '<seed:tool_call>\\n<function=' + name }}<tool_call>", None),
    ("<tool_calls>[{{ call | tojson }}]</tool_calls>, <tool_call>", None),
    ("{% for message in messages %}<|im_start|>{{ message.content }}", None),
]


@pytest.mark.parametrize(("template", "parser"), TEMPLATES)
def test_a_template_tells_one_form(template: str, parser: KnownParser | None) -> None:
    assert find_parser(template) == parser


@pytest.mark.parametrize(("form", "writer"), EVERY_WRITER)
def test_markers_are_in_the_text(form: KnownParser, writer: Writer) -> None:
    """Special tokens of a form are shown, as its markers say; none is forgotten."""
    specials = re.findall(r"<\|[^<>]*\|>|<｜[^<>]*｜>|\[[A-Z_]+\]", writer([STOP]))
    ends = {"<|call|>"}
    assert set(specials) - ends <= set(find_form(form).markers)


def make_hostile_text(form: KnownParser, chance: random.Random) -> str:
    """Return calls, cut ones, and marks in any order."""
    texts = [writer([LOOK, STOP, DEEP]) for writer in WRITERS[form]]
    marks = [
        mark
        for text in texts
        for mark in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\s+|.", text, re.DOTALL)
    ]
    parts = []
    for _ in range(chance.randint(0, 6)):
        text = chance.choice(texts)
        cut = chance.randrange(len(text))
        parts += [
            chance.choice([text, text[:cut], text[:cut] + text[cut + 1 :]]),
            *chance.choices(marks, k=chance.randint(0, 4)),
        ]
    return "".join(parts)


@pytest.mark.parametrize("form", PARSERS)
def test_pieces_change_nothing(form: KnownParser) -> None:
    chance = random.Random(form)
    for _ in range(200 if IS_ALL else 8):
        text = make_hostile_text(form, chance)
        places = sorted(chance.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
        for is_certain in (False, True):
            options: Any = {"is_certain": is_certain}
            whole = read_raw(form, [text], **options)
            assert read_raw(form, list(text), **options) == whole
            assert read_raw(form, pieces, **options) == whole


def read_raw(
    form: KnownParser, pieces: list[str], *, is_certain: bool
) -> tuple[str, str]:
    """Return content, and calls as text: arguments of hostile texts may be cut."""
    reader = ToolCallReader(form, TOOLS, is_certain=is_certain)
    parts = [*map(reader.feed, pieces), reader.finish()]
    calls = [call for _, calls in parts for call in calls]
    heads = ["" if call.goes_on else f"\0{call.name}\0" for call in calls]
    texts = [head + call.arguments for head, call in zip(heads, calls, strict=True)]
    return "".join(content for content, _ in parts), "".join(texts)


@pytest.mark.parametrize("form", PARSERS)
def test_long_texts_take_linear_time(form: KnownParser) -> None:
    """What looks at the whole text for each character of it takes far longer."""
    text = write_calls(form, [LOOK])
    begun = text[: text.index("den")]
    for unit in ("<", '"', "\\", " ", "[", "{", "a", ">", find_form(form).markers[0]):
        long = begun + unit * (10_000 // len(unit))
        start = time.thread_time()
        read_pieces(form, list(long))
        read_raw(form, [long * 3], is_certain=True)
        assert time.thread_time() - start < 8

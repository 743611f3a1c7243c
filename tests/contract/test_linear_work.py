"""Work on a request's text before it is admitted grows at most linearly with its size.

A row is a function, and a shape that is as bad for it as can be: a text, or fields, of `size`
characters. Each is tried at a size and at four times that size.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

import pytest

from fminfer.contract.chat import parse_chat
from fminfer.contract.envelope import Line, find_custom_id, parse_envelope
from fminfer.contract.request import VectorSpec
from fminfer.contract.responses import parse_response, rename_error
from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine.intake import Intake
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.results import count_possible_stop_chars, find_stop
from fminfer.engine.start import RequestStarter
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.calls.call_reader import ToolCallReader
from fminfer.text.calls.python_literals import convert_literals
from fminfer.text.tokenizer import Tokenizer
from tests.conftest import IS_ALL, more

COUNTS = count(1)
Fields = dict[str, Any]
SIZE = 1 << 20 if IS_ALL else 1 << 17  # bytes of the larger of two texts
# of the times of a text and of one four times as long; 16 is quadratic
MOST_RATIO = 9.0
FLOOR_S = 0.05  # what takes less at the larger size is quick enough
CONTEXT = 1 << 22
BY_DEFAULT = ("line", "fields", "answer", "prompt: combining", "chat: words")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


@cache
def intake(kind: str = "") -> Intake:
    facts = {"vectors": VectorSpec(8), "scores": VectorSpec(1, is_scored=True)}.get(
        kind
    )
    config = EngineConfig(on_too_long="truncate-left" if kind == "cut" else "error")
    context = 2048 if kind == "cut" else CONTEXT
    limits = RequestLimits(context, 2048, config=config, vectors=facts)
    return Intake(Tokenizer.load(DEMO_MODEL) if facts else tokenizer(), limits)


def prepare(fields: Fields, kind: str = "") -> None:
    """Do all that happens to a request before an engine has it."""
    with suppress(RequestError):
        prepared = intake(kind).prepare(intake(kind).parse(fields))
        RequestStarter(tokenizer(), frozenset(), seed=0).start_request(0, prepared)


def open_line(raw: bytes) -> None:
    line = Line(0, 1, raw)
    envelope = parse_envelope(line)
    find_custom_id(line, envelope)
    with suppress(RequestError):
        prepare(envelope.fields)


def names(size: int, length: int = 10) -> list[str]:
    """Return names that no earlier row had, so that nothing that is kept helps."""
    first = next(COUNTS) * 1_000_000
    return [f"{first + number:0{length}}" for number in range(size // (length + 4))]


# Texts by what is bad in them.
TEXTS: dict[str, Callable[[int], str]] = {
    "one letter": lambda size: "a" * size,
    "spaces": lambda size: " " * size,
    "line breaks": lambda size: "\n" * size,
    "signs": lambda size: "<" * size,
    "combining": lambda size: "e" + "\u0301" * (size // 2),
    "emoji": lambda size: "\U0001f469\u200d" * (size // 7),
    "bytes of a character": lambda size: "\ufffd" * (size // 3),
    "special tokens": lambda size: "<|endoftext|>" * (size // 13),
    "digits": lambda size: "1" * size,
    "quotes": lambda size: '\\"' * (size // 2),
    "words": lambda size: "What is the way to the next town? " * (size // 34),
}
# Lines of a file.
LINES: dict[str, Callable[[int], bytes]] = {
    "brackets": lambda size: b'{"a":' + b"[" * size,
    "balanced brackets": lambda size: (
        b'{"prompt":"x","a":' + b"[" * 900 + b"]" * 900 + b"}"
    ),
    "objects": lambda size: b'{"a":' * (size // 5),
    "one key": lambda size: b'{"prompt":"x"' + b',"a":1' * (size // 6) + b"}",
    "many keys": lambda size: json.dumps(
        dict.fromkeys(names(size), 1) | {"prompt": "x"}
    ).encode(),
    "wrapped beside keys": lambda size: json.dumps(
        {"request": {"prompt": "x"}, **dict.fromkeys(names(size), 1)}
    ).encode(),
    "Batch beside keys": lambda size: json.dumps(
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x"},
        }
        | dict.fromkeys(names(size), 1)
    ).encode(),
    "quotes": lambda size: (
        b'{"request":{"prompt":"' + b'\\"' * (size // 2) + b'"},"a":1}'
    ),
    "no end": lambda size: b'{"prompt":"' + b'\\"' * (size // 2),
    "a number": lambda size: b'{"prompt":"x","n":' + b"9" * size + b"}",
    "numbers": lambda size: b'{"prompt":[' + b"1e400," * (size // 6) + b"1]}",
    "surrogates": lambda size: b'{"prompt":"' + b"\\ud800" * (size // 6) + b'"}',
    "white space": lambda size: b'{"prompt":' + b" " * size + b'"x"}',
    "white space in a Batch line": lambda size: (
        b'{"custom_id":' + b" \t" * (size // 2) + b"}"
    ),
    "line breaks": lambda size: b'{"prompt":' + b"\r\n " * (size // 3) + b'"x"}',
    "wrapped arrays": lambda size: (
        b'{"request":{"prompt":"x"},"a":[' + b"[]," * (size // 3) + b"0]}"
    ),
    "no JSON": lambda size: b"x" * size,
}
# Fields of requests.
FIELDS: dict[str, Callable[[int], Fields]] = {
    "stop strings": lambda size: {"prompt": "x", "stop": names(size)},
    "prompts and stop strings": lambda size: {
        "prompt": ["x"] * min(4000, size // 24),
        "stop": names(size // 2),
    },
    "a long stop string": lambda size: {"prompt": "x", "stop": "a" * size},
    "signs as stop strings": lambda size: {
        "prompt": "x",
        "stop": ["<" * size, "<|" * size],
    },
    "stop token ids": lambda size: {"prompt": "x", "stop_token_ids": [5] * (size // 2)},
    "bad words": lambda size: {"prompt": "x", "bad_words": names(size)[:2000]},
    "a long bad word": lambda size: {
        "prompt": "x",
        "bad_words": [f"{next(COUNTS)} " + "ab " * (size // 4)],
    },
    "biases": lambda size: {"prompt": "x", "logit_bias": dict.fromkeys(names(size), 1)},
    "allowed ids": lambda size: {
        "prompt": "x",
        "allowed_token_ids": [*range(size // 8)],
    },
    "unknown fields": lambda size: {"prompt": "x", **dict.fromkeys(names(size), 1)},
    "like a field": lambda size: {
        "prompt": "x",
        **dict.fromkeys(["max_tokenz" + name for name in names(size, 20)], 1),
    },
    "a long name": lambda size: {"prompt": "x", "max_tokens" * (size // 10): 1},
    "names without a prompt": lambda size: dict.fromkeys(
        ["promt" + n for n in names(size)], 1
    ),
    "a long name without a prompt": lambda size: {"prompt" * (size // 6): 1},
    "a wrong value": lambda size: {"prompt": "x", "n": "1" * size},
    "a wrong list": lambda size: {"prompt": "x", "n": [[1]] * (size // 4)},
    "prompts": lambda size: {"prompt": ["ab"] * min(4000, size // 8), "max_tokens": 1},
    "too many prompts": lambda size: {"prompt": ["x"] * (size // 4)},
    "lists of ids": lambda size: {"prompt": [[5]] * min(4000, size // 4)},
    "ids": lambda size: {"prompt": [5] * (size // 2), "echo": True, "logprobs": 1},
    "ids of bytes": lambda size: {
        "prompt": [200] * (size // 8),
        "echo": True,
        "logprobs": 1,
    },
    "special ids": lambda size: {"prompt": [0] * (size // 2), "logprobs": 1},
    "a model": lambda size: {"prompt": "x", "model": "m" * size},
    "messages": lambda size: {
        "messages": [{"role": "user", "content": "x"}] * (size // 40)
    },
    "turns": lambda size: {
        "messages": [
            {"role": role, "content": "x"}
            for _ in range(size // 80)
            for role in ("user", "assistant")
        ]
    },
    "parts": lambda size: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}] * (size // 32)}
        ]
    },
    "calls": lambda size: {
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "a", "function": {"name": "f", "arguments": "{}"}}
                ]
                * (size // 60),
            },
        ],
    },
    "broken arguments": lambda size: {
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "function_call": {"name": "f", "arguments": '{"a":' * (size // 5)},
            },
        ],
    },
    "keys of messages": lambda size: {
        "messages": [
            {"role": "user", "content": "x", **dict.fromkeys(names(size), "x")}
        ]
    },
    "keys of parts": lambda size: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", name: 1}]}
            for name in names(size, 30)
        ]
    },
    "tools": lambda size: {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}] * (size // 50),
    },
    "variables": lambda size: {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": dict.fromkeys(names(size), 1),
    },
    "a long variable": lambda size: {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"x" * size: 1},
    },
    "a long role": lambda size: {
        "messages": [{"role": "user" * (size // 4), "content": "x"}]
    },
}
VECTORS: dict[str, Callable[[int], Fields]] = {
    "inputs": lambda size: {"input": ["ab"] * min(4000, size // 6)},
    "equal inputs": lambda size: {"input": ["a" * 1000] * (size // 1000)},
    "ids": lambda size: {"input": [[5]] * min(4000, size // 4)},
    "a prompt's name": lambda size: {"input": "x", "prompt_name": "p" * size},
    "pairs": lambda size: {"text_1": "a" * 500, "text_2": ["b" * 500] * (size // 500)},
    "a long query": lambda size: {
        "query": "a" * (size // 2),
        "documents": ["b"] * (size // 500),
    },
    "documents": lambda size: {
        "query": "x",
        "documents": [{"text": "x", name: 1} for name in names(size, 20)],
    },
}

CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "content": [{"text": "x" * 200}]}
RESPONSES: dict[str, Callable[[int], Fields]] = {
    "calls": lambda size: {"input": [CALL] * (size // 4)},
    "thoughts": lambda size: {"input": [THOUGHT] * (size // 4)},
    "a wrong item": lambda size: {
        "input": [*[{"role": "user", "content": "x"}] * (size // 8), {"role": "x"}]
    },
    "forced tools": lambda size: {
        "input": "x",
        "tools": [{"type": "function", "name": name} for name in names(4 * size)],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": name} for name in names(size)],
        },
    },
}


def read_response(fields: Fields) -> None:
    response = parse_response(fields, max_logprobs=5)
    try:
        parse_chat(response.fields, max_logprobs=5)
    except RequestError as error:
        rename_error(error, response.names)


def read_calls(text: str, parser: Any) -> None:
    reader = ToolCallReader(parser)
    for start in range(0, len(text), 4):
        reader.feed(text[start : start + 4])
    reader.finish()


def stop_answer(text: str, stop: list[str]) -> None:
    """Look for stop strings as an answer's text comes."""
    stops = tuple(stop)
    num_certain = 0
    for end in range(4, len(text) + 1, 4):
        find_stop(text[:end], stops, 4)
        num_certain = end - count_possible_stop_chars(text[:end], stops, num_certain)


def detokenize(ids: list[int]) -> None:
    tokenizer().describe_ids(ids, with_offsets=True)


ANSWERS: dict[str, Callable[[int], object]] = {
    "opened calls": lambda size: read_calls("<tool_call>" * (size // 11), "hermes"),
    "signs": lambda size: read_calls("<" * size, "hermes"),
    "white space": lambda size: read_calls(" \n" * (size // 2), "hermes"),
    "a call without end": lambda size: read_calls(
        '<tool_call>{"name":"' + "a" * size, "hermes"
    ),
    "quotes": lambda size: read_calls('<tool_call>{"' + '\\"' * (size // 2), "hermes"),
    "braces": lambda size: read_calls('{"a":' * (size // 5), "llama3_json"),
    "calls": lambda size: read_calls(
        '{"name":"f","parameters":{}};' * (size // 29), "llama3_json"
    ),
    "tags of Python": lambda size: read_calls(
        "<|python_tag|>" * (size // 14), "llama3_json"
    ),
    "escaped quotes of Python": lambda size: convert_literals(
        '"' + "\\'" * (size // 2)
    ),
    "bytes": lambda size: detokenize([200] * (size // 16)),
    "spaces": lambda size: detokenize([221] * (size // 16)),
    "special tokens": lambda size: detokenize([0] * (size // 8)),
    "a long stop string": lambda size: stop_answer(
        "ab" * (size // 32), ["b" * (size // 16)]
    ),
    "a stop string that is nearly there": lambda size: stop_answer(
        "a" * (size // 16), ["a" * (size // 16) + "b"]
    ),
    "many stop strings": lambda size: stop_answer("ab" * 64, names(size)[:1024]),
}
ROWS: dict[str, Callable[[int], Callable[[], object]]] = {}


def add_rows(prefix: str, shapes: Any, work: Callable[[Any], object]) -> None:
    for name, make in shapes.items():
        # What is made is made before the clock starts.
        ROWS[f"{prefix}: {name}"] = lambda size, make=make: partial_of(work, make(size))


def partial_of(work: Callable[[Any], object], value: Any) -> Callable[[], object]:
    return lambda: work(value)


SCORED = {"echo": True, "logprobs": 1, "max_tokens": 1}
add_rows("prompt", TEXTS, lambda text: prepare({"prompt": text}))
add_rows("cut prompt", TEXTS, lambda text: prepare({"prompt": text}, "cut"))
add_rows(
    "scored prompt",
    TEXTS,
    lambda text: prepare({"prompt": text[: len(text) // 4]} | SCORED),
)
add_rows(
    "chat",
    TEXTS,
    lambda text: prepare({"messages": [{"role": "user", "content": text}]}),
)
add_rows("embedding", TEXTS, lambda text: prepare({"input": text}, "vectors"))
add_rows("stop", TEXTS, lambda text: prepare({"prompt": "x", "stop": text}))
add_rows("line", LINES, open_line)
add_rows("fields", FIELDS, prepare)
add_rows("fields of a response", RESPONSES, read_response)
add_rows("vectors", VECTORS, lambda fields: prepare(fields, "vectors"))
add_rows("scores", VECTORS, lambda fields: prepare(fields, "scores"))
for name, answer in ANSWERS.items():
    ROWS[f"answer: {name}"] = lambda size, answer=answer: partial_of(answer, size)


def best_time(
    row: Callable[[int], Callable[[], object]], size: int, times: int
) -> float:
    seconds = []
    for _ in range(times):
        work = row(size)
        gc.freeze()  # collections are not to look at all that other tests have imported
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
        gc.unfreeze()
    return min(seconds)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith(BY_DEFAULT) else more, id=name)
        for name in ROWS
    ],
)
def test_work_is_linear(name: str) -> None:
    """A grammar of 24 KB held a server up for 12 s: its time grew with the square of
    its length."""
    row = ROWS[name]
    row(1000)()  # what is built once
    if best_time(row, SIZE, 1) < FLOOR_S:
        return
    short, long = (best_time(row, size, 2) for size in (SIZE // 4, SIZE))
    assert long < MOST_RATIO * short + FLOOR_S, (
        f"{short:.3f} s, four times as long {long:.3f} s"
    )


def test_one_text_before_many_others_has_a_bound() -> None:
    """2,000 pairs with a query of 512 KB took all memory before the first was too long."""
    fields = {"query": "a" * 70_000, "documents": ["b"] * 1000}
    with pytest.raises(RequestError, match="which stand before each of 1,000 texts"):
        intake("scores").prepare(intake("scores").parse(fields))
